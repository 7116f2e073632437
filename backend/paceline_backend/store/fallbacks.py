"""Where ranks all-reduced gradients in spite of the policy's synchroniser."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from paceline_backend.store import attempts
from paceline_backend.store.reads import Range
from paceline_backend.store.schema import runs, segments


def summary(connection: sa.Connection, run: int, span: Range) -> list[dict[str, Any]]:
    """The segments with a fallback, by policy version, synchroniser and reason; in order.

    Args:
        connection: to read from.
        run: key of the run.
        span: first and last step: only segments that touch it.
    """
    c, (first, last) = segments.c, span
    attempt = connection.execute(sa.select(runs.c.attempt).where(runs.c.key == run)).scalar()
    parts = (
        sa.and_(*part.rows(c.first_step, c.attempt))
        for part in attempts.spans(connection, run, attempt)
    )
    where = [c.run == run, c.fallback != "", sa.or_(*parts)]
    where += [] if first is None else [c.first_step + c.steps > first]
    where += [] if last is None else [c.first_step <= last]
    by = (c.version, c.policy, c.synchroniser, c.fallback)
    begin = sa.func.min(c.first_step)
    end = sa.func.max(c.first_step + c.steps)
    query = (
        sa.select(*by, begin.label("from"), end.label("end"), sa.func.count().label("segments"))
        .where(*where)
        .group_by(*by)
        .order_by(begin, c.version, c.fallback)
    )
    return [
        {
            "version": row.version,
            "policy": row.policy,
            "synchroniser": row.synchroniser,
            "from": row._mapping["from"],
            "to": row.end - 1,
            "segments": row.segments,
            "why": row.fallback,
        }
        for row in connection.execute(query)
    ]
