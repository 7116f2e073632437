"""Store adopted segments, and when each policy switch took effect."""

from __future__ import annotations

import math
from collections.abc import Sequence

import sqlalchemy as sa

from paceline.wire import Adopted
from paceline_backend.store import blobs, schema, segments
from paceline_backend.store.database import StoreRefusedError, insert
from paceline_backend.store.telemetry.locked import LockedRun


def write(connection: sa.Connection, adopted: Sequence[tuple[LockedRun, Adopted]]) -> None:
    """Store the segments that are not stored yet; refuse those that no leader adopts."""
    if not adopted:
        return
    for run, message in adopted:
        _check(run, message)
    connection.execute(
        insert(connection, schema.segments).on_conflict_do_nothing(),
        [
            {"run": run.key, "body": blobs.pack(message.segment), **segments.row(message)}
            for run, message in adopted
        ],
    )
    _note_effects(connection, adopted)


def _note_effects(connection: sa.Connection, adopted: Sequence[tuple[LockedRun, Adopted]]) -> None:
    """Store that each policy version is in force from its earliest segment on.

    The earliest by time, not by step: a restarted attempt may repeat the same steps.
    """
    c = schema.switches.c
    earliest = (
        sa.update(schema.switches)
        .where(c.run == sa.bindparam("of_run"), c.version == sa.bindparam("of_version"))
        .where(sa.or_(c.effective_at.is_(None), c.effective_at > sa.bindparam("at")))
        .values(effective_step=sa.bindparam("first_step"), effective_at=sa.bindparam("at"))
    )
    connection.execute(
        earliest,
        [
            {
                "of_run": run.key,
                "of_version": message.segment.version,
                "first_step": message.segment.first_step,
                "at": message.adopted_at,
            }
            for run, message in adopted
        ],
    )


def _check(run: LockedRun, message: Adopted) -> None:
    if not 0 <= message.attempt < 2**15 or not math.isfinite(message.adopted_at):
        raise StoreRefusedError(f"run {run.id}: Adopted.attempt or adopted_at is out of range")
    # Ranks and samples of another attempt are unknown.
    known = message.attempt == run.attempt
    terms = (run.world, run.samples) if known else (None, None)
    run.refuse("Adopted.segment", message.segment.problem(*terms))
