"""Runs that shall not hang for long, and which of their attempts was ended for that."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from paceline.wire import State
from paceline_backend.store.database import now
from paceline_backend.store.schema import leases, runs, worker_steps


@dataclass(frozen=True)
class Restarted:
    """A run that trains, and that starts again when it hangs."""

    key: int
    id: str
    attempt: int
    after_s: float  # so long it may hang


def watched(connection: sa.Connection, owner: str) -> list[Restarted]:
    """The runs that start again when they hang, but those that another worker plans."""
    c, at = runs.c, now(connection)
    mine = sa.or_(leases.c.owner.is_(None), leases.c.owner == owner, leases.c.expires_at <= at)
    query = (
        sa.select(c.key, c.id, c.attempt, c.restart_hung_s)
        .outerjoin(leases, leases.c.run == c.key)
        .where(c.state == State.RUNNING, c.restart_hung_s.is_not(None), c.attempt.is_not(None))
        .where(mine)
        .order_by(c.key)
    )
    return [Restarted(*row) for row in connection.execute(query)]


def note_end(connection: sa.Connection, run: str, attempt: int) -> bool | None:
    """Notes that an attempt's ranks are to be ended, as the run hangs.

    Args:
        connection: to write with; the run's row stays locked.
        run: public id.
        attempt: that hangs.

    Returns:
        False: it was noted before. None: the run does not train, or has another attempt by now.
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
    """How many ranks' steps are known after a step: they tell whether a rank goes on by itself."""
    c = worker_steps.c
    query = sa.select(sa.func.count()).where(c.run == run, c.step > (-1 if step is None else step))
    return int(connection.execute(query).scalar_one())
