"""Live streams keep what came lately, and some entries of runs that say little."""

from __future__ import annotations

import redis

from paceline.wire import live
from paceline_backend.control.trimming import KEPT_S, LEAST, Trimmer
from paceline_backend.store import Store
from support.records import add_run

NODE = 100  # entries that the bus trims together


def add(bus: redis.Redis, run: str, entries: int) -> None:
    pipeline = bus.pipeline(transaction=False)
    for _ in range(entries):
        pipeline.xadd(live(run), {"data": "x"})
    pipeline.execute()


def test_the_last_minute_stays(store: Store, bus: redis.Redis, bus_url: str) -> None:
    now = 0.0
    for run in ("fast", "paused", "slow", "silent", "over"):
        add_run(store, run, state="stopped" if run == "over" else "running")
    for run in ("fast", "paused", "slow", "over"):
        add(bus, run, 3_000)
    trimmer = Trimmer(store, clock=lambda: now)
    trimmer.look(bus)
    now = KEPT_S / 2
    add(bus, "fast", 600)
    add(bus, "paused", 2_000)
    add(bus, "slow", 8)
    trimmer.look(bus)
    assert bus.xlen(live("fast")) == 3_600, "nobody knows yet what came in the last minute"
    now = KEPT_S
    add(bus, "fast", 600)
    trimmer.look(bus)
    assert 1_200 <= bus.xlen(live("fast")) < 1_200 + NODE
    assert 2_000 <= bus.xlen(live("paused")) < 2_000 + NODE
    assert LEAST <= bus.xlen(live("slow")) < LEAST + NODE
    assert bus.xlen(live("over")) == 3_000, "clients that were away ask for it for an hour"
