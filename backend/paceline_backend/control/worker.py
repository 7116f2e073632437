"""Entry point of the worker process: ingest in a child process, all other tasks as `Periodic`.

`paceline server` calls `run`. `_parts` lists all repeated tasks with their intervals.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import signal
import threading
from functools import partial

import redis

from paceline.wire.bus import connect
from paceline_backend.control import silent_runs, upkeep
from paceline_backend.control.advice import Advisor, Effects
from paceline_backend.control.alerts import AlertWatch, Sender
from paceline_backend.control.bus_users import UserReconciler, look_for_floods
from paceline_backend.control.engines import ENGINE_LEASE_S, Engines
from paceline_backend.control.fleet import FleetWatch
from paceline_backend.control.hangs import SCAN_S, HangWatch
from paceline_backend.control.ingest_process import GARBAGE, IngestProcess
from paceline_backend.control.manager import ControllerManager
from paceline_backend.control.multi_node import NodeReconciler
from paceline_backend.control.periodic import IdleMonitor, Periodic, Workload
from paceline_backend.control.slow_nodes import SlowNodeWatch
from paceline_backend.insight.whatif.child import Forecaster
from paceline_backend.server import heartbeat, tracing
from paceline_backend.server.floods import Guard
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store
from paceline_backend.store.upkeep.prune import Keep

log = logging.getLogger(__name__)


def run(settings: Settings, owner: str) -> int:
    """Work until SIGTERM or SIGINT, and return the exit code.

    If ingest ends, the process ends, too, and the supervisor restarts it.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # Fork before this process starts threads or opens connections.
    ingest = IngestProcess(settings, owner)
    tracing.configure("worker")
    with (
        Store.open(settings.database) as store,
        connect(settings.bus, keep=True) as bus,
        Forecaster(settings.database) as forecaster,
    ):
        parts = _parts(settings, owner, store, bus, forecaster, ingest, stop)
        idle = IdleMonitor(store, settings.bus)
        threads = [
            threading.Thread(target=part.run, args=(stop, idle), name=part.name) for part in parts
        ]
        threads.append(threading.Thread(target=idle.run, args=(stop,), name="idle monitor"))
        # Controllers create as many objects as ingest, because they read all records, too.
        gc.set_threshold(*GARBAGE)
        gc.freeze()
        for thread in threads:
            thread.start()
        failed = False
        try:
            ingest.run(stop)
        except Exception:
            log.exception("ingest failed: the worker exits")
            failed = True
        stop.set()
        idle.end()
        for thread in threads:
            thread.join()
    return 1 if failed else 0


def _parts(
    settings: Settings,
    owner: str,
    store: Store,
    bus: redis.Redis,
    forecaster: Forecaster,
    ingest: IngestProcess,
    stop: threading.Event,
) -> list[Periodic]:
    controllers = ControllerManager(store, settings.bus, owner, busy=lambda: ingest.behind)
    engines, fleet = Engines(store, owner), FleetWatch(store, owner)
    alerts, effects = AlertWatch(store, owner), Effects(store, owner)
    auto = Advisor(store, settings.bus, owner)
    slow_nodes = SlowNodeWatch(store, settings.bus, owner)
    users, guard = UserReconciler(store, settings.bus), Guard(bus)
    multi_node = NodeReconciler(store, settings.bus)
    keep_claims_s = ENGINE_LEASE_S / 3
    keep = Keep(settings.keep_days, settings.keep_runs, settings.keep_bytes)

    def beat() -> None:
        stats = dataclasses.asdict(ingest.stats)
        leases = {"leases_taken": controllers.taken, "leases_lost": controllers.lost}
        heartbeat.beat(bus, heartbeat.Beat(owner, **stats, **leases))

    def goodbye() -> None:
        try:
            heartbeat.goodbye(bus, owner)
        except redis.RedisError as error:
            log.warning("the heartbeat could not be removed, and stays until it expires: %s", error)

    return [
        Periodic("heartbeat", heartbeat.BEAT_S, beat, goodbye, quiet_s=heartbeat.IDLE_BEAT_S),
        # Only runs that have processes are planned.
        Periodic("controllers", 0.25, controllers.look, controllers.end, needless=Workload.WAITING),
        Periodic("multi-node runs", 0.5, partial(multi_node.look, bus)),
        # Short intervals, because a malicious client can write about 300 MB per second.
        Periodic("flood guard", 0.25, partial(look_for_floods, store, guard), quiet_s=1.0),
        # An ended run may have left jobs in an engine, so these two tasks never pause for long.
        Periodic("engines", 0.5, partial(engines.look, bus), engines.end, quiet_s=3.0),
        Periodic(
            "claims on engine runs", keep_claims_s, engines.keep_claims, quiet_s=keep_claims_s
        ),
        Periodic("bus users", 1.0, partial(users.look, bus)),
        Periodic("auto", 2.0, partial(auto.scan, forecaster, stop)),
        Periodic("slow nodes", 2.0, partial(slow_nodes.scan, forecaster, stop)),
        Periodic("webhooks", 1.0, partial(Sender(store, settings.webhook_origins).send, stop)),
        Periodic("hangs", SCAN_S, HangWatch(store, settings.bus, owner).scan),
        Periodic("fleet", 2.0, partial(fleet.look, stop), fleet.end),
        Periodic("alerts", 5.0, alerts.look, alerts.end),
        Periodic("effects", 5.0, partial(effects.look, stop)),
        Periodic(
            "silent runs",
            silent_runs.SILENCE_CHECK_S,
            partial(silent_runs.SilentRuns(store).look, bus),
        ),
        Periodic("roll-ups", 5.0, partial(upkeep.fill_rollups, store, stop)),
        Periodic("daily totals", 5.0, partial(upkeep.sum_up, store, stop)),
        Periodic("pruning", 60.0, partial(upkeep.prune_runs, store, keep, stop)),
    ]
