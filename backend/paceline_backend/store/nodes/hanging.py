"""Runs that are restarted when they hang, and the attempts that were ended because they hung."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from paceline.wire import State
from paceline_backend.store import leases
from paceline_backend.store.database import now
from paceline_backend.store.schema import runs, worker_steps


@dataclass(frozen=True)
class Restarted:
    """A training run that is restarted when it hangs for `after_s` seconds."""

    key: int
    id: str
    attempt: int
    after_s: float


def watched(connection: sa.Connection, owner: str) -> list[Restarted]:
    """Return the runs that are restarted when they hang, except those that another worker plans."""
    c = runs.c
    query = (
        sa.select(c.key, c.id, c.attempt, c.restart_hung_s)
        .where(c.state == State.RUNNING, c.restart_hung_s.is_not(None), c.attempt.is_not(None))
        .order_by(c.key)
    )
    own = leases.unless_planned(query, owner, now(connection))
    return [Restarted(*row) for row in connection.execute(own)]


def note_end(connection: sa.Connection, run: str, attempt: int) -> bool | None:
    """Record that an attempt of a hanging run is ended; return False if that is already recorded.

    Return None if the run is not in state `running`, or has another attempt by now. The run's row
    stays locked until the end of the transaction.
    """
    c = runs.c
    query = sa.select(c.state, c.attempt, c.hang_ended).where(c.id == run)
    row = connection.execute(query.with_for_update(key_share=True)).one_or_none()
    if row is None or (row.state, row.attempt) != (State.RUNNING, attempt):
        return None
    if row.hang_ended == attempt:
        return False
    connection.execute(sa.update(runs).where(c.id == run).values(hang_ended=attempt))
    return True


def beyond(connection: sa.Connection, run: int, step: int | None) -> int:
    """Count the ranks' records after a step (None: all); if this grows, a rank still trains."""
    c = worker_steps.c
    query = sa.select(sa.func.count()).where(c.run == run, c.step > (-1 if step is None else step))
    return int(connection.execute(query).scalar_one())
