"""Ingest as the worker has it: in a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import redis
import sqlalchemy as sa

from paceline.node.processes import die_with_parent
from paceline.wire import TELEMETRY, StepBatch
from paceline.wire.bus import publish
from paceline_backend.store import Store, schema
from support.ingesting import settled
from support.records import add_run, hello, record
from support.waiting import DEADLINE_S, until

# What a worker does with it: no database is open when it forks.
WORKER = """
import signal, sys, threading
from paceline_backend.control.ingest_process import IngestProcess
from paceline_backend.server.settings import Settings
ingest, stop = IngestProcess(Settings(sys.argv[1], sys.argv[2]), "w"), threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
print(ingest.pid, flush=True)
thread = threading.Thread(target=ingest.run, args=[stop])
thread.start()
while thread.is_alive():
    thread.join(0.05)
    print(ingest.stats.rows, flush=True)
"""


@contextmanager
def worker(store: Store, bus_url: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A process with an ingest of its own, and that ingest's process."""
    url = store.url.render_as_string(hide_password=False)
    command = [sys.executable, "-c", WORKER, url, bus_url]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    try:
        assert process.stdout is not None
        yield process, psutil.Process(int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


def gone(child: psutil.Process) -> Callable[[], bool]:
    def ended() -> bool:
        try:
            return not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return ended


def test_it_stores_says_what_it_has_done_and_ends_when_it_is_told_to(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r")
    for message in (hello(world=2), StepBatch([record(0, 0), record(0, 1)])):
        publish(bus, TELEMETRY, message, "r")
    with worker(store, bus_url) as (process, child):
        until(lambda: settled(bus), "all is acknowledged")
        with store.read() as connection:
            count = sa.select(sa.func.count()).select_from(schema.worker_steps)
            assert connection.execute(count).scalar_one() == 2
        assert process.stdout is not None
        assert any(line == "2\n" for line in process.stdout)
        for each in (child, psutil.Process(process.pid)):
            os.kill(each.pid, signal.SIGTERM)  # as a service manager does to both
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, errors) == (0, "")
        assert gone(child)()


def test_it_dies_with_its_worker(store: Store, bus_url: str) -> None:
    with worker(store, bus_url) as (process, child):
        process.kill()
        until(gone(child), "the child is gone")


def test_a_worker_hears_of_its_death(store: Store, bus_url: str) -> None:
    with worker(store, bus_url) as (process, child):
        child.kill()
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert "RuntimeError: the ingest process exited with code -9" in errors


def test_it_says_why_it_cannot_begin(store: Store, bus_url: str) -> None:
    command = [sys.executable, "-c", WORKER, "sqlite:////nowhere/at/all.db", bus_url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert "ingest cannot start: database sqlite:////nowhere/at/all.db" in ended.stderr
    assert "RuntimeError: the ingest process exited with code 1" in ended.stderr
