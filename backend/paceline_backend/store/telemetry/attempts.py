"""Store the first step of each attempt, and how far earlier attempts had come."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from paceline.wire import Hello
from paceline_backend.store.database import insert
from paceline_backend.store.schema import attempts, worker_steps
from paceline_backend.store.telemetry.locked import LockedRun


def write(connection: sa.Connection, hellos: Sequence[tuple[LockedRun, Hello]]) -> None:
    """Store each attempt's start, when its Hello arrives for the first time."""
    c = worker_steps.c
    for run, hello in hellos:
        before = (
            sa.select(c.step)
            .where(c.run == run.key, c.attempt < hello.attempt)
            .order_by(c.step.desc())
            .limit(1)
        )
        newest = connection.execute(before).scalar()
        row = {
            "run": run.key,
            "attempt": hello.attempt,
            "started_at": hello.started_at,
            "step": hello.step,
            "reached": 0 if newest is None else newest + 1,
            "placement": hello.placement or None,
            "devices": msgspec.to_builtins(hello.devices) or None,
        }
        connection.execute(insert(connection, attempts).values(row).on_conflict_do_nothing())
