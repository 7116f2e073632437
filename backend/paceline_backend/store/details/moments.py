"""Which steps of a run ended in a range of wall-clock time."""

from __future__ import annotations

import sqlalchemy as sa

from paceline_backend.store.reads import Range
from paceline_backend.store.schema import worker_steps

_NOTHING = (1, 0)  # an empty range of steps


def steps_between(
    connection: sa.Connection, run: int, since: float | None, until: float | None, within: Range
) -> Range:
    """The first and last step of which a rank's part ended in a range of time.

    Args:
        connection: to read from.
        run: key of the run.
        since: Unix time; None: no bound.
        until: Unix time, not included; None: no bound.
        within: a range of steps that bounds the answer, too.
    """
    if since is None and until is None:
        return within
    c = worker_steps.c
    where = [c.run == run]
    if since is not None:
        where.append(c.ended_at >= since)
    if until is not None:
        where.append(c.ended_at < until)
    step = sa.select(c.step).where(*where).limit(1)
    first = connection.execute(step.order_by(c.step)).scalar()
    last = connection.execute(step.order_by(c.step.desc())).scalar()
    if first is None or last is None:
        return _NOTHING
    low, high = within
    return max(first, low or 0), last if high is None else min(last, high)
