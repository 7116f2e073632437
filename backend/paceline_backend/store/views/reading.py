"""Read views from the database."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from paceline_backend.store import reads
from paceline_backend.store.rollups import reading as rollups
from paceline_backend.store.rollups.metrics import CELLS
from paceline_backend.store.rollups.tables import BLOCK
from paceline_backend.store.schema import steps, worker_steps
from paceline_backend.store.views.digits import short
from paceline_backend.store.views.heat import heat_of, together

# Maximum number of columns of a view.
COLUMNS = 512
# Default number of points of a view's steps.
POINTS = 1_000
# Maximum number of ranks with a line each; the heat map shows more ranks.
LINES = 16

# Metrics of a rank's step that a view shows.
_SHOWN = ("compute_s", "ett_s", "share")
# Maximum number of records that are read individually where roll-ups can avoid it.
_MOST_SINGLE = 200_000
# The same for the first response of a page, because the first charts wait for it.
_MOST_NEWEST = 80_000
# Minimum number of steps with a column of their own, for any number of ranks.
_LEAST_SHOWN = 20
# With fewer blocks than this, columns of a block each would show too little.
_FEW_BLOCKS = 4


def view(
    connection: sa.Connection,
    run: int,
    world: int,
    span: reads.Range = (None, None),
    points: int = POINTS,
    columns: int = COLUMNS,
) -> dict[str, Any]:
    """Return the data of a range of steps for charts: steps, lines of ranks, and heat map.

    `points` limits the steps; `columns` limits lines and heat map.
    """
    return {
        "steps": short(reads.step_columns(connection, run, span, points)),
        **_ranks(connection, run, world, span, columns),
        "coasts": reads.coasts(connection, run, span, points),
    }


def newest(
    connection: sa.Connection, run: int, world: int, last: int, columns: int = COLUMNS
) -> dict[str, Any]:
    """Return a `view` of the newest `last` steps, each a point of its own.

    With many ranks, lines and heat map begin later, because each step has a column of its own.
    """
    end = reads.bounds(connection, steps, run, (None, None))[1]
    newest_step = -1 if end is None else end
    span = (max(0, newest_step - last + 1), newest_step)
    shown = min(last, columns - 1, max(_LEAST_SHOWN, _MOST_NEWEST // max(1, world)))
    return {
        "steps": short(reads.step_columns(connection, run, span, last + 1)),
        **_ranks(connection, run, world, (max(0, newest_step - shown + 1), newest_step), columns),
        "coasts": reads.coasts(connection, run, span, max(2, last + 1)),
    }


def _ranks(
    connection: sa.Connection, run: int, world: int, span: reads.Range, columns: int
) -> dict[str, Any]:
    first, last = reads.bounds(connection, worker_steps, run, span)
    bucket = _bucket(first, last, world, columns)
    rows = () if first is None else _rows(connection, run, (first, last), bucket, world)
    extent = {"from": first, "to": last, "bucket": bucket}
    return {
        "worker_steps": short({**extent, **_lines(rows, world)}),
        "heat": {**extent, **heat_of(rows, world)},
    }


def _lines(rows: Sequence[Any], world: int) -> dict[str, Any]:
    names = [*_SHOWN, "compute_s_min", "compute_s_max"]
    own = sorted(rows, key=itemgetter(0, 1)) if world <= LINES else ()
    ranks, step, table = reads.grids(names, own)
    return {"ranks": ranks, "step": step, **table}


def _bucket(first: int | None, last: int | None, world: int, columns: int) -> int:
    bucket = reads.bucket_of(first, last, columns)
    if first is None or last is None:
        return bucket
    length = last - first + 1
    if length * world > _MOST_SINGLE and length >= _FEW_BLOCKS * BLOCK:
        bucket = max(bucket, BLOCK)
    return rollups.bucket_of(bucket, first, last, columns)


def _rows(
    connection: sa.Connection, run: int, span: reads.Range, bucket: int, world: int
) -> Sequence[Any]:
    """Return row of ranks, step, the means of `_SHOWN`, and minimum and maximum compute time."""
    covered = rollups.cover(connection, run, *span) if bucket >= BLOCK else None
    if covered is not None:
        return rollups.rank_buckets(
            connection, covered, bucket, rollups.ALL_RANKS, _SHOWN, together=together(world)
        )
    where = [worker_steps.c.run == run, *reads.within(worker_steps.c.step, span)]
    return connection.execute(_single(where, bucket, together(world))).all()


def _single(where: list[sa.ColumnElement[bool]], bucket: int, grouped: int) -> sa.Select[Any]:
    w = worker_steps.c
    compute, ett, share = (CELLS[name] for name in _SHOWN)
    if bucket == 1 and grouped == 1:
        columns: list[Any] = [w.rank, w.step, compute, ett, share, w.compute_s, w.compute_s]
        return sa.select(*columns).select_from(reads.joined).where(*where)
    cell, row = w.step // bucket, w.rank // grouped
    means = [sa.func.avg(sa.cast(value, sa.Double)) for value in (compute, ett, share)]
    columns = [row, cell * bucket, *means, sa.func.min(w.compute_s), sa.func.max(w.compute_s)]
    query = sa.select(*columns).select_from(reads.joined)
    return query.where(*where).group_by(cell, row)
