"""Ingest takes or refuses whatever is written to telemetry, and stores what is good among it."""

from __future__ import annotations

import random
import threading
import time

import msgspec
import pytest
import redis
import sqlalchemy as sa

from paceline import wire
from paceline.wire import (
    TELEMETRY,
    Fallback,
    Message,
    NodeState,
    RoundBatch,
    RunState,
    State,
    StepBatch,
)
from paceline.wire.bus import connect
from paceline.wire.synchronisation import convert
from paceline_backend.control.ingest import Ingest
from paceline_backend.requests import rejected
from paceline_backend.store import Store, schema
from support.fuzz import COUNTS, variants
from support.records import a_round, add_run, adopted, hello, record
from support.waiting import DEADLINE_S

_RULES = {"probes": 2, "staleness": 4, "mean": True, "groups": [[0], [1]], "every": 4}
GOOD: list[Message] = [
    hello(world=2),
    adopted(0, 0, synchroniser=convert("hierarchical", _RULES), memory={"a": [1, {"b": 2.0}]}),
    Fallback(0, 0, "why"),
    StepBatch([record(0, 0), record(0, 1)]),
    RoundBatch([a_round(0)]),
    RunState(State.RUNNING, 5.0, "n"),
    NodeState("n", "host", 2, 2**30, [], 5.0, "0"),
]
_EVERY = 50  # after so many bad messages comes a good one


@pytest.mark.parametrize("count", COUNTS)
def test_ingest_goes_on_whatever_arrives(database_url: str, bus_url: str, count: int) -> None:
    with Store.open(database_url) as store, connect(bus_url) as bus:
        add_run(store, "noise")
        add_run(store, "r")
        expected = _write(bus, count)
        stop = threading.Event()
        ingest = Ingest(store, bus_url, "one")
        thread = threading.Thread(target=ingest.run, args=(stop,), daemon=True)
        thread.start()
        try:
            while bus.xlen(TELEMETRY):
                assert thread.is_alive(), "ingest ended"
                time.sleep(0.01)
        finally:
            stop.set()
            thread.join(timeout=DEADLINE_S)
        assert not thread.is_alive()
        with store.read() as connection:
            c = schema.worker_steps.c
            runs = sa.select(schema.runs.c.key).where(schema.runs.c.id == "r").scalar_subquery()
            count = connection.scalar(sa.select(sa.func.count()).where(c.run == runs))
        assert count == expected
        assert rejected.counts(bus)[1] > count // 4


def _write(bus: redis.Redis, count: int) -> int:
    """Writes variants of all kinds of messages for one run, and good steps of another between."""
    texts = [msgspec.msgpack.encode(message) for message in GOOD]
    per_kind = -(-count // len(GOOD))
    bad = [data for k, text in enumerate(texts) for data in variants(text, per_kind, seed=k)]
    random.Random(0).shuffle(bad)
    good = 0
    for number, data in enumerate(bad):
        bus.xadd(TELEMETRY, {"v": "1", "run": "noise", "data": data})
        if number % _EVERY == 0:
            fields = wire.encode(StepBatch([record(good, 0)]), "r")
            bus.xadd(TELEMETRY, dict(fields.items()))
            good += 1
    return good
