"""While much telemetry waits, ingest leaves roll-ups for later."""

from __future__ import annotations

import pytest
import redis
import sqlalchemy as sa

from paceline.wire import TELEMETRY, StepBatch
from paceline.wire.bus import publish
from paceline_backend.store import Store, schema
from paceline_backend.store.rollups.writing import fill
from paceline_backend.store.schema import step_rollups
from support.ingesting import ingest_all
from support.records import add_run, hello, record


def state(store: Store) -> tuple[int, list[int], int | None]:
    """How many steps are there, which blocks have roll-ups, and from where on some are due."""
    with store.read() as connection:
        steps = connection.execute(sa.select(sa.func.count()).select_from(schema.steps))
        blocks = connection.execute(sa.select(step_rollups.c.step).order_by(step_rollups.c.step))
        due = connection.execute(sa.select(schema.runs.c.rollups_due))
        return steps.scalar_one(), [*blocks.scalars()], due.scalar()


def test_a_backlog_is_rolled_up_later(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline_backend.control.ingest._MOST_BATCH_ENTRIES", 500)
    add_run(store, "r")
    publish(bus, TELEMETRY, hello(), "r")
    for step in range(700):
        publish(bus, TELEMETRY, StepBatch([record(step, rank) for rank in range(2)]), "r")
    ingest_all(store, bus_url)
    # The first batch, of 500 messages, held the Hello and 499 steps; the second held the others.
    assert state(store) == (700, [400, 500, 600], 0)
    while fill(store) is not None:
        pass
    assert state(store) == (700, [*range(0, 700, 100)], None)
