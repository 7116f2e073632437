"""Data of a range of steps for charts, of bounded size for any number of steps and ranks.

A view's heat map has at most 512 columns of steps and at most 256 rows of ranks. A cell that
combines several steps or ranks shows their greatest compute time, so no spike is lost. The database
combines steps, using roll-ups where they exist. The heat map is encoded as one byte per cell, and
numbers are rounded to the precision that a chart needs.

    view = chart_views.view(connection, key, world=1024, span=(None, None))
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from paceline_backend.store import reads
from paceline_backend.store.rollups import reading as rollups
from paceline_backend.store.rollups.metrics import BLOCK, CELLS
from paceline_backend.store.schema import steps, worker_steps

# Maximum number of points of each rank's line, and of columns of the heat map.
CHART_COLUMNS = 512
# Default maximum number of points in a chart of complete steps.
POINTS = 1_000
# If a run has more ranks than this, a view has no lines of ranks, only the heat map.
LINES = 16

_SHOWN = ("compute_s", "ett_s", "share")
# If a range has more records than this, each point or column covers at least one block of 100
# steps, so that roll-ups are read instead of records.
_MOST_SINGLE = 200_000
# Maximum number of records that are read individually for the first response to a page of the
# dashboard. It is small, because the page shows its charts only after this response.
_MOST_NEWEST = 80_000
# In the first response to a page, lines and heat map show at least this many of the newest steps,
# even if the run has so many ranks that `_MOST_NEWEST` is exceeded.
_LEAST_SHOWN = 20
# `_MOST_SINGLE` is ignored if a range has fewer blocks than this, because a chart with one column
# per block would show too little.
_FEW_BLOCKS = 4

Floats = npt.NDArray[np.float64]

_HEAT_ROWS = 256
# The heat map's scale divides the range from the minimum to the maximum into this many intervals.
# The minimum has code 1; code 0 means unknown.
_CODES = 254

_COMPUTE = (("compute_p10", 0.1), ("compute_p50", 0.5), ("compute_p90", 0.9))
_SHARE = (("share_min", 0.0), ("share_p50", 0.5), ("share_p90", 0.9), ("share_max", 1.0))

# Number of significant digits of the numbers in a chart. The rounding error is below one pixel.
_DIGITS = 5


def view(
    connection: sa.Connection,
    run: int,
    world: int,
    span: reads.Range = (None, None),
    points: int = POINTS,
    columns: int = CHART_COLUMNS,
) -> dict[str, Any]:
    """Return chart data of a range of steps: metrics of steps, a line per rank, and a heat map.

    `points` is the maximum number of points in a chart of complete steps. `columns` is the maximum
    number of points of a rank's line, and of columns of the heat map.
    """
    return {
        "steps": _shortened(reads.step_columns(connection, run, span, points)),
        **_ranks(connection, run, world, span, columns),
        "coasts": reads.coasts(connection, run, span, points),
    }


def newest(
    connection: sa.Connection, run: int, world: int, last: int, columns: int = CHART_COLUMNS
) -> dict[str, Any]:
    """Return a `view` of the newest `last` steps, each a point of its own.

    If there are many ranks, lines and heat map show fewer steps, because the records of these steps
    are read individually.
    """
    end = reads.bounds(connection, steps, run, (None, None))[1]
    newest_step = -1 if end is None else end
    span = (max(0, newest_step - last + 1), newest_step)
    shown = min(last, columns - 1, max(_LEAST_SHOWN, _MOST_NEWEST // max(1, world)))
    return {
        "steps": _shortened(reads.step_columns(connection, run, span, last + 1)),
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
        "worker_steps": _shortened({**extent, **_lines(rows, world)}),
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
    """Return a row for each cell, with the columns that `heat_of` expects in its `rows`."""
    covered = rollups.cover(connection, run, *span) if bucket >= BLOCK else None
    if covered is not None:
        return rollups.rank_buckets(
            connection, covered, bucket, rollups.ALL_RANKS, _SHOWN, together=_together(world)
        )
    where = [worker_steps.c.run == run, *reads.within(worker_steps.c.step, span)]
    return connection.execute(_single(where, bucket, _together(world))).all()


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


def _together(world: int) -> int:
    """Return the number of ranks that share one row of the heat map."""
    return max(1, -(-world // _HEAT_ROWS))


def heat_of(rows: Sequence[Any], world: int) -> dict[str, Any]:
    """Return a heat map in the form of the field ``heat`` of GET /runs/{run}/view.

    Args:
        rows: one row per cell of the heat map, in any order. Each has the index of the cell's row
            in the heat map, the first step of the cell's column, the means of compute time (s),
            expected compute time (s) and the rank's fraction of the load of a step (None: unknown),
            and the minimum and maximum compute time.
    """
    columns: list[Any] = list(zip(*rows, strict=True)) or [()] * 7
    of_rank, of_step = (np.array(column, dtype=np.int64) for column in columns[:2])
    mean, share, top = (np.array(columns[k], dtype=float) for k in (2, 4, 6))
    step, at = np.unique(of_step, return_inverse=True)
    height = -(-world // _together(world))

    def grid(values: Floats) -> Floats:
        table = np.full((height, len(step)), np.nan)
        inside = of_rank < height
        table[of_rank[inside], at[inside]] = values[inside]
        return table

    low, high, cells = _coded(grid(top))
    bands = [*_bands(grid(mean), _COMPUTE), *_bands(grid(share), _SHARE)]
    return {
        "world": world,
        "together": _together(world),
        "rows": height,
        "step": step.tolist(),
        "low": low,
        "high": high,
        "cells": base64.b64encode(cells.tobytes()).decode(),
        **dict(bands),
    }


def _coded(table: Floats) -> tuple[float, float, npt.NDArray[np.uint8]]:
    """Return minimum, maximum, and a byte for each cell on a logarithmic scale between them.

    Code 0 is unknown, 1 the minimum and 255 the maximum: code k is low · (high / low) ** ((k - 1) /
    254).
    """
    known = table > 0
    if not known.any():
        return 0.0, 0.0, np.where(np.isnan(table), 0, 1).astype(np.uint8)
    low, high = float(table[known].min()), float(table[known].max())
    scale = _CODES / np.log(high / low) if high > low else 0.0
    place = np.log(np.where(known, table, low) / low) * scale
    return low, high, np.where(np.isnan(table), 0, 1 + np.rint(place)).astype(np.uint8)


def _bands(
    table: Floats, levels: Sequence[tuple[str, float]]
) -> list[tuple[str, list[float | None]]]:
    """Return quantiles of each column over its rows; None for columns without known values."""
    # Unknown values (NaN) are sorted last.
    ordered = np.sort(table, axis=0)
    count = np.count_nonzero(~np.isnan(table), axis=0)
    columns = np.arange(table.shape[1])
    bands = []
    for name, level in levels:
        place = np.rint(level * np.maximum(count - 1, 0)).astype(np.int64)
        values = ordered[place, columns] if len(ordered) else np.full(len(columns), np.nan)
        bands.append((name, _rounded([None if np.isnan(value) else value for value in values])))
    return bands


def _rounded(column: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.{_DIGITS}g}") for value in column]


def _shortened(columns: dict[str, Any]) -> dict[str, Any]:
    """Round columns of floating-point numbers; Unix times keep their milliseconds."""
    return {name: _short_column(name, value) for name, value in columns.items()}


def _short_column(name: str, value: Any) -> Any:
    if name == "ended_at":
        return [round(at, 3) for at in value]
    if not isinstance(value, list) or not value:
        return value
    if isinstance(value[0], list):
        return [_short_column(name, each) for each in value]
    if any(isinstance(each, float) for each in value):
        return _rounded(value)
    return value
