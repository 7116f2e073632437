"""An idle worker pauses for long, and the first change ends its pauses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from paceline.wire import CHANGES
from paceline_backend.control import periodic
from paceline_backend.control.periodic import IdleMonitor, Workload
from paceline_backend.requests import streams
from paceline_backend.store import Store, runs
from support.records import add_run
from support.waiting import DEADLINE_S, until
from support.web import ANY, serving

NEVER_S = 3_600.0


@contextmanager
def following(store: Store, bus_url: str) -> Iterator[IdleMonitor]:
    followed, stop = IdleMonitor(store, bus_url), threading.Event()
    thread = threading.Thread(target=followed.run, args=[stop], daemon=True)
    thread.start()
    try:
        yield followed
    finally:
        stop.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_change_ends_the_pauses_of_a_quiet_worker(
    monkeypatch: pytest.MonkeyPatch, store: Store, bus_url: str, bus: redis.Redis
) -> None:
    monkeypatch.setattr(periodic, "QUIET_AFTER_S", 0.0)
    monkeypatch.setattr(periodic, "_CHANGES_BLOCK_S", 0.1)
    with following(store, bus_url) as followed:
        until(lambda: followed.activity is Workload.QUIET, "the quiet")
        woken, stop = threading.Event(), threading.Event()

        def pause() -> None:
            followed.pause(0.0, NEVER_S, stop, Workload.QUIET)
            woken.set()

        threading.Thread(target=pause, daemon=True).start()
        # Quiet may return before the pause begins, as it is quiet at once here.
        until(lambda: streams.wake(bus) or woken.wait(0.1), "the end of the pause")


def test_it_is_not_quiet_while_a_run_is_active(
    monkeypatch: pytest.MonkeyPatch, store: Store, bus_url: str
) -> None:
    checks = threading.Semaphore(0)

    class Checked(IdleMonitor):
        def activity_of_runs(self) -> Workload:
            checks.release()
            return super().activity_of_runs()

    monkeypatch.setattr(periodic, "QUIET_AFTER_S", 0.0)
    monkeypatch.setattr(periodic, "_CHANGES_BLOCK_S", 0.1)
    monkeypatch.setitem(globals(), "IdleMonitor", Checked)
    add_run(store, "r", state="running")
    with following(store, bus_url) as followed:
        for _ in range(3):
            assert checks.acquire(timeout=DEADLINE_S)
        assert followed.activity is Workload.BUSY
        with store.write() as connection:
            runs.end(connection, "r", "stopped", "")
        until(lambda: followed.activity is Workload.QUIET, "the quiet after the run's end")


@pytest.mark.parametrize(
    ("states", "activity"),
    [
        (["finished"], Workload.QUIET),
        (["pending"], Workload.WAITING),
        (["finished", "queued"], Workload.WAITING),
        (["queued", "starting"], Workload.BUSY),
    ],
)
def test_runs_that_wait_for_an_engine_are_not_planned(
    states: list[str], activity: Workload, store: Store
) -> None:
    for number, state in enumerate(states):
        add_run(store, f"r{number}", state=state)
    monitor = IdleMonitor(store, "redis://127.0.0.1:1")
    assert monitor.activity_of_runs() is activity


@pytest.mark.parametrize("needless", [Workload.QUIET, Workload.WAITING])
def test_a_pause_is_long_only_while_there_is_nothing_to_do(
    needless: Workload, store: Store
) -> None:
    monitor, stop = IdleMonitor(store, "redis://127.0.0.1:1"), threading.Event()
    paused = threading.Event()

    def pause() -> None:
        monitor.pause(0.0, NEVER_S, stop, needless)
        paused.set()

    monitor.activity = Workload.WAITING
    thread = threading.Thread(target=pause, daemon=True)
    thread.start()
    if needless is Workload.WAITING:
        assert not paused.wait(0.1)
        monitor.end()
    assert paused.wait(DEADLINE_S)
    thread.join(DEADLINE_S)


def test_the_end_of_the_worker_ends_the_pauses(store: Store, bus_url: str) -> None:
    stop, ended = threading.Event(), list[bool]()
    followed = IdleMonitor(store, bus_url)
    followed.activity = Workload.QUIET
    thread = threading.Thread(
        target=lambda: ended.append(followed.pause(0.0, NEVER_S, stop, Workload.QUIET)),
        daemon=True,
    )
    thread.start()
    stop.set()
    followed.end()
    thread.join(DEADLINE_S)
    assert ended == [True]


def test_a_request_that_is_no_read_wakes_the_workers(
    store: Store, bus_url: str, bus: redis.Redis
) -> None:
    def newest() -> object:
        return bus.xrevrange(CHANGES, count=1)

    before = newest()
    body = {"script": "/x/train.py", "nproc": 1, "launch": False}
    with serving(store, bus_url) as client:
        client.get("/api/v1/runs")
        assert newest() == before
        assert client.post("/api/v1/runs", json=body, headers=ANY).status_code == 201
        until(lambda: newest() != before, "the entry that wakes workers")
