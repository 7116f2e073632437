"""Read ranges of steps, as columns for charts.

The database downsamples long ranges, to limit the traffic: each `bucket` steps become one point.
`timeline` reads a few steps without downsampling, with the phases of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.rollups import reading as rollups
from paceline_backend.store.rollups.metrics import (
    BLOCK,
    CELLS,
    METRICS,
    MORE_CELLS,
    named,
    of_same_step,
)
from paceline_backend.store.schema import segments, steps, worker_steps
from paceline_backend.store.segments import SHOWN

joined = worker_steps.outerjoin(steps, of_same_step)

# Maximum number of ranks in one result, because a chart cannot show more. In a larger world, only
# every k-th rank is shown.
_SHOWN_RANKS = 1_024
# Maximum product of a result's number of steps and the run's number of ranks, if the result does
# not show all ranks.
_SHOWN_CELLS = 250_000

# First and last step, both included. None: no bound.
Range = tuple[int | None, int | None]
PHASES = ("data_s", "compute_s", "wait_s", "reduce_s", "rest_s")
_NOTHING = (1, 0)


def step_columns(connection: sa.Connection, run: int, span: Range, points: int) -> dict[str, Any]:
    """Return complete steps as columns of at most `points` values.

    If there are more steps than points, each point combines `bucket` steps: it has their first
    step, the means of `METRICS`, and the minimum and maximum of each metric (``se_min``,
    ``se_max``, …).
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
    which: rollups.RankChoice = rollups.ALL_RANKS,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Return each rank's steps as ``name[rank][step]`` (None: no record), like `step_columns`.

    Args:
        points: maximum number of steps or buckets.
        which: selection of the ranks; see `shown_every`.
        more: names of further columns, from `MORE_CELLS`. With any of them, the database reads each
            row, because roll-ups lack these columns.
    """
    first, last = bounds(connection, worker_steps, run, span)
    bucket = rollups.bucket_of(bucket_of(first, last, points), first, last, points)
    names = [*CELLS, *more] if bucket == 1 else [*CELLS, *more, "compute_s_min", "compute_s_max"]
    rolled = bucket >= BLOCK and not more
    covered = rollups.cover(connection, run, first, last) if rolled else None
    rows: Sequence[Any]
    if covered is not None:
        rows = rollups.rank_buckets(connection, covered, bucket, which)
    else:
        where = [worker_steps.c.run == run, *within(worker_steps.c.step, span)]
        where += which.conditions(worker_steps.c.rank)
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
    """Return the ranks and steps of `rows`, and their other values as ``name[rank][step]``.

    The first two columns of the rows are rank and step, and the rows are sorted by them. `names`
    are the names of the other columns. A value is None if there is no row of the rank and step.
    """
    width = 2 + len(names)
    columns: list[Any] = list(zip(*rows, strict=True)) or [()] * width
    ranks, at = sorted(set(columns[0])), sorted(set(columns[1]))
    # Some ranks did not report all steps.
    if len(rows) < len(at) * len(ranks):
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
    """Return k: by default, only every k-th rank of a run with `world` ranks is shown."""
    return max(1, -(-(world or 1) // _SHOWN_RANKS))


def shown_steps(world: int | None, most: int) -> int:
    """Return the maximum number of steps in one result.

    This is `most` if all ranks are shown. If only every k-th rank is shown, the result is between
    2 and `most`: the database must also read the rows of the ranks that are not shown, so a large
    run gets fewer steps.
    """
    return most if shown_every(world) == 1 else max(2, min(most, _SHOWN_CELLS // (world or 1)))


def segment_rows(
    connection: sa.Connection, run: int, span: Range, limit: int
) -> list[dict[str, Any]]:
    """Return the last `limit` adopted segments that overlap a range of steps, oldest first."""
    query = sa.select(*SHOWN).where(segments.c.run == run)
    first, last = span
    if first is not None:
        query = query.where(segments.c.first_step + segments.c.steps > first)
    if last is not None:
        query = query.where(segments.c.first_step <= last)
    query = query.order_by(segments.c.attempt.desc(), segments.c.seq.desc()).limit(limit)
    rows = connection.execute(query).all()
    return [{str(k): v for k, v in row._mapping.items()} for row in reversed(rows)]


# Literals, and not bound values, so that databases use the index `ix_segments_coasts`.
_NOT_BY_CONTROLLERS: list[sa.ColumnElement[str]] = [
    sa.literal_column("'coast'"),
    sa.literal_column("'local'"),
]


def coasts(connection: sa.Connection, run: int, span: Range, points: int) -> list[list[int]]:
    """Return the ranges of steps that no controller planned.

    Each range is [first step, last step]; they are ascending. `span` is divided into `points`
    cells, and ranges in the same cell are merged.
    """
    begin, end = segments.c.first_step, segments.c.first_step + segments.c.steps
    where = [segments.c.run == run, segments.c.source.in_(_NOT_BY_CONTROLLERS)]
    if span[0] is not None:
        where.append(end > span[0])
    if span[1] is not None:
        where.append(begin <= span[1])
    # Two queries, so that each is an index seek.
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
    """Return the SQL conditions that a column of steps is in a range."""
    first, last = span
    limits = [] if first is None else [column >= first]
    return limits if last is None else [*limits, column <= last]


def first_step(connection: sa.Connection, run: int) -> int | None:
    """Return the first complete step; None if there is none yet.

    It is later than 0 if the run's first attempt started from a checkpoint.
    """
    return bounds(connection, steps, run, (None, None))[0]


def complete_bounds(connection: sa.Connection, run: int, span: Range) -> Range:
    """Return the first and last complete step in a range."""
    return bounds(connection, steps, run, span)


def reported_bounds(connection: sa.Connection, run: int, span: Range) -> Range:
    """Return the first and last step in a range that at least one rank reported."""
    return bounds(connection, worker_steps, run, span)


def bounds(connection: sa.Connection, table: sa.Table, run: int, span: Range) -> Range:
    """Return the first and last stored step in a range, with two index seeks."""
    where = (table.c.run == run, *within(table.c.step, span))
    step = sa.select(table.c.step).where(*where).limit(1)
    first = connection.execute(step.order_by(table.c.step)).scalar()
    last = connection.execute(step.order_by(table.c.step.desc())).scalar()
    return first, last


def bucket_of(first: int | None, last: int | None, points: int) -> int:
    """Return the number of steps per point, for at most `points` (2 or more) points.

    Buckets start at multiples of their size, so that existing buckets keep their steps when the
    range grows. The first and the last bucket may then be partial, so one point is reserved for
    this.
    """
    if first is None or last is None or last - first < points:
        return 1
    return -(-(last - first + 1) // (points - 1))


def _columns(names: Sequence[str], rows: Sequence[sa.Row[Any]]) -> dict[str, list[Any]]:
    values = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in names]
    return dict(zip(names, values, strict=True))


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


def newest_steps(connection: sa.Connection, run: int, count: int) -> tuple[int, int] | None:
    """Return first and last of the newest `count` complete steps; None if there are none."""
    query = sa.select(steps.c.step).where(steps.c.run == run)
    newest = connection.execute(query.order_by(steps.c.step.desc()).limit(count)).scalars().all()
    return (newest[-1], newest[0]) if newest else None


def timeline(
    connection: sa.Connection, run: int, first: int, last: int, ranks: Sequence[int]
) -> dict[str, Any]:
    """Return ``began_at`` and `PHASES`, each as ``name[rank][step]``; None without a record.

    The phases of a step, in order: the rank waits for its data, computes, waits for other ranks,
    reduces, and does the rest of the step. `began_at` is Unix time by the clock of the rank's node;
    phases are in seconds. The range includes the step `last`.
    """
    w = worker_steps.c
    columns = (w.rank, w.step, w.data_s, w.compute_s, w.sync_s, w.step_s, w.ended_at)
    query = (
        sa.select(*columns, steps.c.sync_min)
        .select_from(worker_steps.outerjoin(steps, of_same_step))
        .where(w.run == run, w.step.between(first, last), w.rank.in_(ranks))
    )
    known = {(row.rank, row.step): _phases_of(row) for row in connection.execute(query)}
    numbers = range(first, last + 1)
    table = {
        name: [[known.get((rank, step), {}).get(name) for step in numbers] for rank in ranks]
        for name in ("began_at", *PHASES)
    }
    return {"from": first, "to": last, "ranks": list(ranks), "step": list(numbers), **table}


def _phases_of(row: Any) -> dict[str, float]:
    """Return the phases of one rank's step.

    If records of other ranks are missing, all of `sync_s` counts as reduction.
    """
    reduce_s = row.sync_s if row.sync_min is None else min(row.sync_min, row.sync_s)
    return {
        "began_at": row.ended_at - row.step_s - row.data_s,
        "data_s": row.data_s,
        "compute_s": row.compute_s,
        "wait_s": row.sync_s - reduce_s,
        "reduce_s": reduce_s,
        "rest_s": max(0.0, row.step_s - row.compute_s - row.sync_s),
    }
