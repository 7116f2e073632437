"""Read policies' choices of the gradient synchronisation, and the fallbacks to the all-reduce."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from paceline_backend.store import attempts
from paceline_backend.store.reads import Range, within
from paceline_backend.store.schema import runs, segments


def chosen(
    connection: sa.Connection, run: int, span: Range, most: int | None = None
) -> list[dict[str, Any]]:
    """Return the segments where a policy changed the synchronisation, oldest first.

    The first choice of each policy version counts as a change. Coasting segments are left
    out, because they repeat the synchronisation of the segment before. `most` limits the result to
    the newest changes.
    """
    c, (first, last) = segments.c, span
    where = _counting(connection, run)
    begin = first
    # Include the segment before the range, to detect a change in the range's first segment.
    if first is not None:
        earlier = sa.select(sa.func.max(c.first_step)).where(*where, c.first_step < first)
        begin = connection.execute(sa.func.coalesce(earlier.scalar_subquery(), first)).scalar()

    def before(column: sa.Column[Any]) -> sa.Over[Any]:
        return sa.func.lag(column).over(order_by=[c.attempt, c.seq])

    row = (
        sa.select(
            c.attempt,
            c.seq,
            c.first_step,
            c.version,
            c.synchroniser_digest.label("digest"),
            before(c.version).label("version_before"),
            before(c.synchroniser).label("before"),
            before(c.synchroniser_digest).label("digest_before"),
        )
        .where(*where, *within(c.first_step, (begin, last)))
        .subquery()
    )
    f = row.c
    unchanged = sa.and_(f.version == f.version_before, f.digest == f.digest_before)
    query = (
        sa.select(
            c.attempt,
            c.version,
            c.policy,
            c.synchroniser,
            c.first_step.label("from"),
            c.why,
            sa.case((f.version == f.version_before, f.before)).label("before"),
        )
        .join(row, sa.and_(c.run == run, c.attempt == f.attempt, c.seq == f.seq))
        .where(sa.or_(f.version_before.is_(None), sa.not_(unchanged)), *within(f.first_step, span))
        .order_by(c.attempt.desc(), c.seq.desc())
        .limit(most)
    )
    return [dict(row) for row in reversed(connection.execute(query).mappings().all())]


def fallbacks(connection: sa.Connection, run: int, span: Range) -> list[dict[str, Any]]:
    """Count segments that ranks all-reduced in spite of relaxed synchronisation.

    The result has one row for each policy version and reason, ordered by first step. Only segments
    that overlap `span` are included.
    """
    c, (first, last) = segments.c, span
    # A literal instead of a parameter, so that the database can use the partial index.
    fell_back = c.fallback != sa.literal_column("''")
    where = [c.run == run, fell_back, _of_counting_attempts(connection, run)]
    where += [] if first is None else [c.first_step + c.steps > first]
    where += [] if last is None else [c.first_step <= last]
    by = (c.version, c.policy, c.synchroniser, c.fallback.label("why"))
    begin = sa.func.min(c.first_step).label("from")
    end = (sa.func.max(c.first_step + c.steps) - 1).label("to")
    query = (
        sa.select(*by, begin, end, sa.func.count().label("segments"))
        .where(*where)
        .group_by(c.version, c.policy, c.synchroniser, c.fallback)
        .order_by(begin, c.version, c.fallback)
    )
    return [{str(k): v for k, v in row.items()} for row in connection.execute(query).mappings()]


def _counting(connection: sa.Connection, run: int) -> list[sa.ColumnElement[bool]]:
    # A literal instead of a parameter, so that the database can use the partial index.
    chosen = segments.c.why != sa.literal_column("''")
    by_policy = segments.c.source != "equal"
    return [segments.c.run == run, chosen, by_policy, _of_counting_attempts(connection, run)]


def _of_counting_attempts(connection: sa.Connection, run: int) -> sa.ColumnElement[bool]:
    attempt = connection.execute(sa.select(runs.c.attempt).where(runs.c.key == run)).scalar()
    c = segments.c
    return sa.or_(
        *(
            sa.and_(*part.rows(c.first_step, c.attempt))
            for part in attempts.spans(connection, run, attempt)
        )
    )
