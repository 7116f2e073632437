"""Telemetry as columns: ranges of steps, thinned out by the database so that little travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.schema import segments, steps, worker_steps
from paceline_backend.store.segments import SHOWN

_w = sa.cast(steps.c.workers, sa.Double)
_variance = (steps.c.load_sq - steps.c.load_sum * steps.c.load_sum / _w) / sa.func.nullif(_w - 1, 0)

# Of one step; docs/glossary.md. Rounding can leave a variance of equal loads below zero.
METRICS: dict[str, sa.ColumnElement[Any]] = {
    "step_s": steps.c.step_s,
    "compute_max": steps.c.compute_max,
    "compute_min": steps.c.compute_min,
    "compute_mean": steps.c.compute_sum / _w,
    "se": (steps.c.compute_max - steps.c.compute_min) * _w / sa.func.nullif(steps.c.compute_sum, 0),
    "sp": steps.c.compute_max - steps.c.compute_min,
    "dif": sa.func.sqrt(sa.case((_variance < 0, 0.0), else_=_variance)),
    "waste": 1 - steps.c.compute_sum / (_w * sa.func.nullif(steps.c.compute_max, 0)),
    "ett_error": steps.c.ett_error_sum / sa.func.nullif(steps.c.ett_count, 0),
    "comm_s": steps.c.sync_min,
    "loss": steps.c.loss,
}

# A cell is one rank's step. Values that need all ranks are NULL until all have reported.
_CELLS: dict[str, sa.ColumnElement[Any]] = {
    "compute_s": worker_steps.c.compute_s,
    "ett_s": worker_steps.c.ett_s,
    "wait_s": worker_steps.c.sync_s - steps.c.sync_min,
    "samples": worker_steps.c.samples,
    "load": worker_steps.c.load,
    "share": worker_steps.c.load / sa.func.nullif(steps.c.load_sum, 0),
}
_joined = worker_steps.outerjoin(
    steps, (steps.c.run == worker_steps.c.run) & (steps.c.step == worker_steps.c.step)
)

_SHOWN_RANKS = 1_024  # of a larger world every k-th rank is shown: nobody can tell more apart
_SHOWN_CELLS = 250_000  # ranks × steps of a large world in one answer

Range = tuple[int | None, int | None]  # first and last step, both included; None: open


def step_columns(connection: sa.Connection, run: int, span: Range, points: int) -> dict[str, Any]:
    """Complete steps as columns, at most `points` of each.

    Where there are more steps than points, `bucket` of them become one: its first step, the means
    of `METRICS`, and of each the least and the greatest (``se_min``, ``se_max``, …).
    """
    first, last = _bounds(connection, steps, run, span)
    bucket = bucket_of(first, last, points)
    where = (steps.c.run == run, *within(steps.c.step, span))
    names = ["step", "epoch", "ended_at", *METRICS]
    query: sa.Select[Any]
    if bucket == 1:
        base = (steps.c.step, steps.c.epoch, steps.c.ended_at)
        query = sa.select(*base, *_named(METRICS)).where(*where).order_by(steps.c.step)
    else:
        inner = sa.select(
            (steps.c.step // bucket).label("cell"),
            steps.c.step,
            steps.c.epoch,
            steps.c.ended_at,
            *_named(METRICS),
        ).where(*where)
        row = inner.subquery()
        columns: list[sa.ColumnElement[Any]] = [
            sa.func.min(row.c.step),
            sa.func.min(row.c.epoch),
            sa.func.max(row.c.ended_at),
        ]
        columns += [sa.func.avg(row.c[name]) for name in METRICS]
        for name in METRICS:
            columns += [sa.func.min(row.c[name]), sa.func.max(row.c[name])]
            names += [f"{name}_min", f"{name}_max"]
        query = sa.select(*columns).group_by(row.c.cell).order_by(row.c.cell)
    return {
        "from": first,
        "to": last,
        "bucket": bucket,
        **_columns(names, connection.execute(query).all()),
    }


def worker_step_columns(
    connection: sa.Connection,
    run: int,
    span: Range,
    points: int,
    ranks: Sequence[int] | None = None,
    every: int = 1,
) -> dict[str, Any]:
    """What each rank did, as ``name[rank][step]`` (None: no record), thinned out as `step_columns`.

    Args:
        connection: to read from.
        run: key of the run.
        span: first and last step.
        points: at most so many steps or buckets.
        ranks: only these.
        every: only each so many-th of them; `shown_every`.
    """
    first, last = _bounds(connection, worker_steps, run, span)
    bucket = bucket_of(first, last, points)
    where = [worker_steps.c.run == run, *within(worker_steps.c.step, span)]
    if ranks is not None:
        where.append(worker_steps.c.rank.in_(ranks))
    elif every > 1:
        where.append(worker_steps.c.rank % every == 0)
    names = [*_CELLS]
    cells = list(_CELLS.values())
    query: sa.Select[Any]
    if bucket == 1:
        query = sa.select(worker_steps.c.step, worker_steps.c.rank, *cells)
        query = query.select_from(_joined).where(*where)
    else:
        cell = worker_steps.c.step // bucket
        compute = worker_steps.c.compute_s
        names += ["compute_s_min", "compute_s_max"]
        cells = [sa.func.avg(sa.cast(value, sa.Double)) for value in cells]
        cells += [sa.func.min(compute), sa.func.max(compute)]
        query = sa.select(cell * bucket, worker_steps.c.rank, *cells).select_from(_joined)
        query = query.where(*where).group_by(cell, worker_steps.c.rank)
    rows = connection.execute(query).all()
    at = {step: i for i, step in enumerate(sorted({row[0] for row in rows}))}
    ranks_at = {rank: i for i, rank in enumerate(sorted({row[1] for row in rows}))}
    table = {name: [[None] * len(at) for _ in ranks_at] for name in names}
    for row in rows:
        i, j = ranks_at[row[1]], at[row[0]]
        for name, value in zip(names, row[2:], strict=True):
            table[name][i][j] = value
    return {
        "from": first,
        "to": last,
        "bucket": bucket,
        "ranks": list(ranks_at),
        "step": list(at),
        **table,
    }


def shown_every(world: int | None) -> int:
    """Of so many ranks, each how many-th is shown where nobody asked for certain ones."""
    return max(1, -(-(world or 1) // _SHOWN_RANKS))


def shown_steps(world: int | None, most: int) -> int:
    """How many steps of the ranks shown are one answer, at least 2; `most` in all but huge worlds.

    Reading goes through all ranks, whether they are shown or not.
    """
    return most if shown_every(world) == 1 else max(2, min(most, _SHOWN_CELLS // (world or 1)))


def new_steps(
    connection: sa.Connection,
    run: int,
    wanted: Sequence[int],
    known: Mapping[int, float],
    every: int = 1,
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Those of some steps that are complete: columns as `step_columns`, and flat ones per rank.

    Args:
        connection: to read from.
        run: key of the run.
        wanted: the steps.
        known: step → its end: of these only what has another end by now.
        every: of the ranks only each so many-th; `shown_every`.
    """
    base = (steps.c.step, steps.c.epoch, steps.c.ended_at)
    complete = connection.execute(
        sa.select(*base, *_named(METRICS))
        .where(steps.c.run == run, steps.c.step.in_(wanted))
        .order_by(steps.c.step)
    ).all()
    complete = [row for row in complete if known.get(row.step) != row.ended_at]
    cells = connection.execute(
        sa.select(worker_steps.c.rank, worker_steps.c.step, *_CELLS.values())
        .select_from(_joined)
        .where(
            worker_steps.c.run == run,
            worker_steps.c.step.in_([row.step for row in complete]),
            steps.c.step.is_not(None),
            *([worker_steps.c.rank % every == 0] if every > 1 else []),
        )
        .order_by(worker_steps.c.step, worker_steps.c.rank)
    ).all()
    return (
        _columns(["step", "epoch", "ended_at", *METRICS], complete),
        _columns(["rank", "step", *_CELLS], cells),
    )


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


def _named(metrics: dict[str, sa.ColumnElement[Any]]) -> list[sa.Label[Any]]:
    return [value.label(name) for name, value in metrics.items()]


def within(column: sa.ColumnElement[Any], span: Range) -> list[sa.ColumnElement[bool]]:
    """The condition that a column of steps is in a range."""
    first, last = span
    limits = [] if first is None else [column >= first]
    return limits if last is None else [*limits, column <= last]


def first_step(connection: sa.Connection, run: int) -> int | None:
    """The first complete step: later than 0 where the run was resumed. None: there is none yet."""
    return _bounds(connection, steps, run, (None, None))[0]


def _bounds(connection: sa.Connection, table: sa.Table, run: int, span: Range) -> Range:
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
