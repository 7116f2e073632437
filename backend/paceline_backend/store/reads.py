"""Telemetry as columns: ranges of steps, thinned out by the database so that little travels."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.rollups import reading as rollups
from paceline_backend.store.rollups.metrics import CELLS, METRICS, MORE_CELLS, named, of_same_step
from paceline_backend.store.rollups.tables import BLOCK
from paceline_backend.store.schema import segments, steps, worker_steps
from paceline_backend.store.segments import SHOWN

joined = worker_steps.outerjoin(steps, of_same_step)

_SHOWN_RANKS = 1_024  # of a larger world every k-th rank is shown: nobody can tell more apart
_SHOWN_CELLS = 250_000  # ranks × steps of a large world in one answer

Range = tuple[int | None, int | None]  # first and last step, both included; None: open


def step_columns(connection: sa.Connection, run: int, span: Range, points: int) -> dict[str, Any]:
    """Complete steps as columns, at most `points` of each.

    Where there are more steps than points, `bucket` of them become one: its first step, the means
    of `METRICS`, and of each the least and the greatest (``se_min``, ``se_max``, …).
    """
    first, last = bounds(connection, steps, run, span)
    bucket = rollups.bucket_of(bucket_of(first, last, points), first, last, points)
    names = ["step", "epoch", "ended_at", *METRICS]
    if bucket > 1:
        names += [f"{name}_{bound}" for name in METRICS for bound in ("min", "max")]
    covered = rollups.cover(connection, run, first, last) if bucket >= BLOCK else None
    if covered is not None:
        rows = rollups.step_buckets(connection, covered, bucket)
    else:
        where = [steps.c.run == run, *within(steps.c.step, span)]
        rows = connection.execute(_steps(where, bucket)).all()
    return {"from": first, "to": last, "bucket": bucket, **_columns(names, rows)}


def _steps(where: list[sa.ColumnElement[bool]], bucket: int) -> sa.Select[Any]:
    """Complete steps, or buckets of them, from the rows of the steps themselves."""
    s = steps.c
    single: list[Any] = [s.step, s.epoch, s.ended_at, *named(METRICS)]
    query = sa.select(*single).where(*where)
    if bucket == 1:
        return query.order_by(s.step)
    row = query.add_columns((s.step // bucket).label("cell")).subquery().c
    columns: list[sa.ColumnElement[Any]] = [sa.func.min(row.step), sa.func.min(row.epoch)]
    columns += [sa.func.max(row.ended_at), *(sa.func.avg(row[name]) for name in METRICS)]
    for name in METRICS:
        columns += [sa.func.min(row[name]), sa.func.max(row[name])]
    return sa.select(*columns).group_by(row.cell).order_by(row.cell)


def worker_step_columns(
    connection: sa.Connection,
    run: int,
    span: Range,
    points: int,
    ranks: Sequence[int] | None = None,
    every: int = 1,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """What each rank did, as ``name[rank][step]`` (None: no record), thinned out as `step_columns`.

    Args:
        connection: to read from.
        run: key of the run.
        span: first and last step.
        points: at most so many steps or buckets.
        ranks: only these.
        every: only each so many-th of them; `shown_every`.
        more: further columns, of `MORE_CELLS`. No roll-up has them: each row is read.
    """
    first, last = bounds(connection, worker_steps, run, span)
    bucket = rollups.bucket_of(bucket_of(first, last, points), first, last, points)
    names = [*CELLS, *more] if bucket == 1 else [*CELLS, *more, "compute_s_min", "compute_s_max"]
    rolled = bucket >= BLOCK and not more
    covered = rollups.cover(connection, run, first, last) if rolled else None
    rows: Sequence[Any]
    if covered is not None:
        rows = rollups.rank_buckets(connection, covered, bucket, ranks, every)
    else:
        where = [worker_steps.c.run == run, *within(worker_steps.c.step, span)]
        where += rollups.chosen(worker_steps.c.rank, ranks, every)
        rows = sorted(connection.execute(_cells(where, bucket, more)).all(), key=itemgetter(0, 1))
    shown, at, table = grids(names, rows)
    return {
        "from": first,
        "to": last,
        "bucket": bucket,
        "ranks": shown,
        "step": at,
        **table,
    }


def grids(
    names: Sequence[str], rows: Sequence[Any]
) -> tuple[list[int], list[int], dict[str, list[list[Any]]]]:
    """Ranks, steps, and ``name[rank][step]`` of rows in the order of rank and step, their first."""
    width = 2 + len(names)
    columns: list[Any] = list(zip(*rows, strict=True)) or [()] * width
    ranks, at = sorted(set(columns[0])), sorted(set(columns[1]))
    if len(rows) < len(at) * len(ranks):  # somebody did not report
        known: dict[Any, Sequence[Any]] = {tuple(row[:2]): row for row in rows}
        places = ((rank, step) for rank in ranks for step in at)
        columns = list(zip(*(known.get(place, (None,) * width) for place in places), strict=True))
    size = len(at)
    table = {
        name: [list(column[i * size : (i + 1) * size]) for i in range(len(ranks))]
        for name, column in zip(names, columns[2:], strict=True)
    }
    return ranks, at, table


def _cells(
    where: list[sa.ColumnElement[bool]], bucket: int, more: Sequence[str] = ()
) -> sa.Select[Any]:
    """Ranks' steps, or buckets of them, from the rows of the steps themselves."""
    w = worker_steps.c
    cells = [*CELLS.values(), *(MORE_CELLS[name] for name in more)]
    if bucket == 1:
        columns: list[Any] = [w.rank, w.step, *cells]
        return sa.select(*columns).select_from(joined).where(*where)
    cell = w.step // bucket
    columns = [w.rank, cell * bucket]
    columns += [sa.func.avg(sa.cast(value, sa.Double)) for value in cells]
    columns += [sa.func.min(w.compute_s), sa.func.max(w.compute_s)]
    query = sa.select(*columns).select_from(joined)
    return query.where(*where).group_by(cell, w.rank)


def shown_every(world: int | None) -> int:
    """Of so many ranks, each how many-th is shown where nobody asked for certain ones."""
    return max(1, -(-(world or 1) // _SHOWN_RANKS))


def shown_steps(world: int | None, most: int) -> int:
    """How many steps of the ranks shown are one answer, at least 2; `most` in all but huge worlds.

    Reading goes through all ranks, whether they are shown or not.
    """
    return most if shown_every(world) == 1 else max(2, min(most, _SHOWN_CELLS // (world or 1)))


def segment_rows(
    connection: sa.Connection, run: int, span: Range, limit: int
) -> list[dict[str, Any]]:
    """Adopted segments that touch a range of steps: the last `limit` of them, in order."""
    query = sa.select(*SHOWN).where(segments.c.run == run)
    first, last = span
    if first is not None:
        query = query.where(segments.c.first_step + segments.c.steps > first)
    if last is not None:
        query = query.where(segments.c.first_step <= last)
    query = query.order_by(segments.c.attempt.desc(), segments.c.seq.desc()).limit(limit)
    rows = connection.execute(query).all()
    return [{str(k): v for k, v in row._mapping.items()} for row in reversed(rows)]


def coasts(connection: sa.Connection, run: int, span: Range, points: int) -> list[list[int]]:
    """Spans of steps that no controller planned: first and last step of each, ascending.

    Of a long range, spans that lie within the same of `points` parts are one.
    """
    begin, end = segments.c.first_step, segments.c.first_step + segments.c.steps
    where = [segments.c.run == run, segments.c.source == sa.literal_column("'coast'")]
    if span[0] is not None:
        where.append(end > span[0])
    if span[1] is not None:
        where.append(begin <= span[1])
    # Two queries: each a seek.
    first, last = (
        connection.execute(sa.select(bound(begin)).where(*where)).scalar()
        for bound in (sa.func.min, sa.func.max)
    )
    cell = begin // bucket_of(first, last, points)
    query = sa.select(sa.func.min(begin), sa.func.max(end) - 1).where(*where)
    merged: list[list[int]] = []
    for low, high in connection.execute(query.group_by(cell).order_by(cell)):
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return merged


def within(column: sa.ColumnElement[Any], span: Range) -> list[sa.ColumnElement[bool]]:
    """The condition that a column of steps is in a range."""
    first, last = span
    limits = [] if first is None else [column >= first]
    return limits if last is None else [*limits, column <= last]


def first_step(connection: sa.Connection, run: int) -> int | None:
    """The first complete step: later than 0 where the run was resumed. None: there is none yet."""
    return bounds(connection, steps, run, (None, None))[0]


def complete_bounds(connection: sa.Connection, run: int, span: Range) -> Range:
    """The first and last complete step in a range."""
    return bounds(connection, steps, run, span)


def reported_bounds(connection: sa.Connection, run: int, span: Range) -> Range:
    """The first and last step in a range that some rank reported."""
    return bounds(connection, worker_steps, run, span)


def bounds(connection: sa.Connection, table: sa.Table, run: int, span: Range) -> Range:
    """The first and last step that there is. Two seeks in the primary key, however many rows."""
    where = (table.c.run == run, *within(table.c.step, span))
    step = sa.select(table.c.step).where(*where).limit(1)
    first = connection.execute(step.order_by(table.c.step)).scalar()
    last = connection.execute(step.order_by(table.c.step.desc())).scalar()
    return first, last


def bucket_of(first: int | None, last: int | None, points: int) -> int:
    """Steps per point, for at most `points` (2 or more) of them.

    Buckets begin at multiples of their size, so that they stay while the run goes on; the first and
    the last may be half empty, which takes one point more than their number of steps does.
    """
    if first is None or last is None or last - first < points:
        return 1
    return -(-(last - first + 1) // (points - 1))


def _columns(names: Sequence[str], rows: Sequence[sa.Row[Any]]) -> dict[str, list[Any]]:
    values = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in names]
    return dict(zip(names, values, strict=True))
