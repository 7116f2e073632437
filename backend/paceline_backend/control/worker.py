"""The worker process: ingest, controllers, `auto`, and a sweep for runs that nobody speaks for."""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
import time
from collections.abc import Callable

import redis

from paceline.core.outage import Outage
from paceline.wire import TELEMETRY
from paceline.wire.bus import connect
from paceline_backend.control import ControllerManager
from paceline_backend.control.advisor import Advisor
from paceline_backend.control.ingest import Ingest, IngestStats
from paceline_backend.requests import streams
from paceline_backend.server import heartbeat
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store, StoreUnavailableError
from paceline_backend.store import runs as runs_store

log = logging.getLogger(__name__)

SILENT_S = 30.0
_SWEEP_S = 5.0
_BACKLOG = 1_000  # entries


def run(settings: Settings, owner: str) -> int:
    """Works until SIGTERM or SIGINT; its exit code.

    A part that fails ends the process: the supervisor starts it anew.

    Args:
        settings: which database and bus.
        owner: this worker's name: no other may have it.

    Raises:
        StoreError: the database cannot be used.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    failed: list[str] = []
    with Store.open(settings.database) as store:
        ingest = Ingest(store, settings.bus, owner)
        controllers = ControllerManager(store, settings.bus, owner)
        parts: dict[str, Callable[[threading.Event], None]] = {
            "ingest": ingest.run,
            "controllers": controllers.run,
            "auto": Advisor(store, settings.bus, owner).run,
            "heartbeat": lambda event: _beat(settings.bus, owner, ingest.stats, event),
            "sweep": lambda event: _sweep(store, settings.bus, event),
        }
        threads = [
            threading.Thread(target=_guarded, args=(name, part, stop, failed), name=name)
            for name, part in parts.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return 1 if failed else 0


def _guarded(
    name: str, part: Callable[[threading.Event], None], stop: threading.Event, failed: list[str]
) -> None:
    try:
        part(stop)
        if not stop.is_set():
            raise RuntimeError("ended by itself")
    except Exception:
        log.exception("%s failed: the worker ends", name)
        failed.append(name)
        stop.set()


def _beat(bus_url: str, owner: str, stats: IngestStats, stop: threading.Event) -> None:
    outage = Outage(log, "no heartbeat", "heartbeats again")
    with connect(bus_url) as client:
        while True:
            try:
                sign = heartbeat.Beat(owner, **dataclasses.asdict(stats))
                heartbeat.beat(client, sign)
                outage.over()
            except redis.RedisError as error:
                outage.failed(error)
            if stop.wait(heartbeat.BEAT_S):
                break
        try:
            heartbeat.goodbye(client, owner)
        except redis.RedisError as error:
            log.warning("the heartbeat stays until it expires: %s", error)


def _sweep(store: Store, bus_url: str, stop: threading.Event) -> None:
    """Fails lost runs; after an outage, only when agents have had time to report again."""
    outage = Outage(log, "lost runs are looked for again later", "lost runs are looked for again")
    trusted_from = time.monotonic() + SILENT_S
    while not stop.wait(_SWEEP_S):
        try:
            behind = _behind(bus_url)
            if not behind and time.monotonic() >= trusted_from:
                fail_lost_runs(store, bus_url, SILENT_S)
            outage.over()
        except (StoreUnavailableError, redis.RedisError) as error:
            outage.failed(error)
            behind = True
        if behind:
            trusted_from = time.monotonic() + SILENT_S


def _behind(bus_url: str) -> bool:
    """Whether so much telemetry waits that silence in the database means nothing."""
    with connect(bus_url) as client:
        return int(client.xlen(TELEMETRY)) > _BACKLOG


def fail_lost_runs(store: Store, bus_url: str, silent_s: float) -> list[str]:
    """Fails the runs of which nothing has come for so long; their ids.

    Raises:
        StoreUnavailableError: the database is away.
    """
    ended = []
    for run_id, why in runs_store.lost(store, silent_s):
        with store.write() as connection:
            gone = runs_store.end(connection, run_id, "failed", why, lost=True)
        if gone:
            log.warning("run %s: %s", run_id, why)
            ended.append(run_id)
            with connect(bus_url) as client:
                streams.tell_end(client, run_id)
    return ended
