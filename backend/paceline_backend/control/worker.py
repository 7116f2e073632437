"""The worker: ingest in a child process; controllers, `auto`, sweeps and the like in threads."""

from __future__ import annotations

import dataclasses
import gc
import logging
import signal
import threading
from collections.abc import Callable

import redis

from paceline.core.outage import Outage
from paceline.wire.bus import connect
from paceline_backend.control import ControllerManager, floods, upkeep
from paceline_backend.control.advice.advisor import Advisor
from paceline_backend.control.advice.effects import Effects
from paceline_backend.control.alerts.sender import Sender
from paceline_backend.control.alerts.watch import AlertWatch
from paceline_backend.control.engines.engines import Engines
from paceline_backend.control.fleet.watch import FleetWatch
from paceline_backend.control.hangs import HangWatch
from paceline_backend.control.ingest_process import GARBAGE, IngestProcess
from paceline_backend.control.keeper import Keeper
from paceline_backend.control.meetings import Meetings
from paceline_backend.control.nodes.replacements import Replacements
from paceline_backend.control.nodes.watch import Watch
from paceline_backend.control.silence import Sweep
from paceline_backend.server import heartbeat, tracing
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store
from paceline_backend.store.upkeep.prune import Keep

log = logging.getLogger(__name__)


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
    keep = Keep(settings.keep_days, settings.keep_runs, settings.keep_bytes)
    ingest = IngestProcess(settings, owner)  # first of all: it is a fork
    tracing.configure("worker")
    with Store.open(settings.database) as store:
        controllers = ControllerManager(store, settings.bus, owner, busy=lambda: ingest.behind)

        def sign() -> heartbeat.Beat:
            stats = dataclasses.asdict(ingest.stats)
            leases = {"leases_taken": controllers.taken, "leases_lost": controllers.lost}
            return heartbeat.Beat(owner, **stats, **leases)

        parts: dict[str, Callable[[threading.Event], None]] = {
            "ingest": ingest.run,
            "controllers": controllers.run,
            "users": Keeper(store, settings.bus).run,
            "auto": Advisor(store, settings.bus, owner).run,
            "effects": Effects(store, owner).run,
            "heartbeat": lambda event: _beat(settings.bus, sign, event),
            "engines": Engines(store, settings.bus, owner).run,
            "meetings": Meetings(store, settings.bus).run,
            "hangs": HangWatch(store, settings.bus, owner).run,
            "replacements": Replacements(store, settings.bus).run,
            "slow nodes": Watch(store, settings.bus, owner).run,
            "fleet": FleetWatch(store, owner).run,
            "alerts": AlertWatch(store, owner).run,
            "webhooks": Sender(store, settings.webhook_origins).run,
            "sweep": Sweep(store, settings.bus).run,
            "floods": lambda event: floods.watch(store, settings.bus, event),
            "upkeep": lambda event: upkeep.run(store, keep, event),
        }
        threads = [
            threading.Thread(target=_guarded, args=(name, part, stop, failed), name=name)
            for name, part in parts.items()
        ]
        gc.set_threshold(*GARBAGE)  # controllers read all records, too
        gc.freeze()
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


def _beat(bus_url: str, sign: Callable[[], heartbeat.Beat], stop: threading.Event) -> None:
    outage = Outage(log, "no heartbeat", "heartbeats again")
    with connect(bus_url) as client:
        while True:
            try:
                heartbeat.beat(client, sign())
                outage.over()
            except redis.RedisError as error:
                outage.failed(error)
            if stop.wait(heartbeat.BEAT_S):
                break
        try:
            heartbeat.goodbye(client, sign().owner)
        except redis.RedisError as error:
            log.warning("the heartbeat stays until it expires: %s", error)
