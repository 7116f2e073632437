"""Find the steps of a run that ended in a range of wall-clock time."""

from __future__ import annotations

import sqlalchemy as sa

from paceline_backend.store.reads import Range
from paceline_backend.store.schema import worker_steps

# An empty range of steps.
_NOTHING = (1, 0)


def steps_between(
    connection: sa.Connection, run: int, since: float | None, until: float | None, within: Range
) -> Range:
    """Return the first and last step in `within` that at least one rank ended in a range of time.

    `since` (inclusive) and `until` (exclusive) are Unix times.
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
