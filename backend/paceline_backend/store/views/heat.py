"""Encode the heat map of a range of steps: maximum compute time, by row of ranks and column."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline_backend.store.views.digits import rounded

Floats = npt.NDArray[np.float64]

# Maximum number of rows of a heat map.
ROWS = 256
# Steps of the scale from the minimum to the maximum; code 0 means unknown.
CODES = 254

_COMPUTE = (("compute_p10", 0.1), ("compute_p50", 0.5), ("compute_p90", 0.9))
_SHARE = (("share_min", 0.0), ("share_p50", 0.5), ("share_p90", 0.9), ("share_max", 1.0))


def together(world: int) -> int:
    """Return the number of ranks in one row."""
    return max(1, -(-world // ROWS))


def heat_of(rows: Sequence[Any], world: int) -> dict[str, Any]:
    """Return the columns of ``heat`` in the response of `GET view`.

    Args:
        rows: row of ranks, first step of the column, mean compute time (s), expected time, share of
            the load or None, minimum and maximum compute time; in any order.
        world: number of ranks of the run.
    """
    columns: list[Any] = list(zip(*rows, strict=True)) or [()] * 7
    of_rank, of_step = (np.array(column, dtype=np.int64) for column in columns[:2])
    mean, share, top = (np.array(columns[k], dtype=float) for k in (2, 4, 6))
    step, at = np.unique(of_step, return_inverse=True)
    height = -(-world // together(world))

    def grid(values: Floats) -> Floats:
        table = np.full((height, len(step)), np.nan)
        inside = of_rank < height
        table[of_rank[inside], at[inside]] = values[inside]
        return table

    low, high, cells = coded(grid(top))
    bands = [*_bands(grid(mean), _COMPUTE), *_bands(grid(share), _SHARE)]
    return {
        "world": world,
        "together": together(world),
        "rows": height,
        "step": step.tolist(),
        "low": low,
        "high": high,
        "cells": base64.b64encode(cells.tobytes()).decode(),
        **dict(bands),
    }


def coded(table: Floats) -> tuple[float, float, npt.NDArray[np.uint8]]:
    """Return minimum, maximum, and a byte for each cell on a logarithmic scale between them.

    Code 0 is unknown, 1 the minimum and 255 the maximum: code k is low · (high / low) ** ((k - 1) /
    254).
    """
    known = table > 0
    if not known.any():
        return 0.0, 0.0, np.where(np.isnan(table), 0, 1).astype(np.uint8)
    low, high = float(table[known].min()), float(table[known].max())
    scale = CODES / np.log(high / low) if high > low else 0.0
    place = np.log(np.where(known, table, low) / low) * scale
    return low, high, np.where(np.isnan(table), 0, 1 + np.rint(place)).astype(np.uint8)


def _bands(
    table: Floats, levels: Sequence[tuple[str, float]]
) -> list[tuple[str, list[float | None]]]:
    """Return quantiles over the rows of each column; None where nothing is known."""
    # Unknown values (NaN) are sorted last.
    ordered = np.sort(table, axis=0)
    count = np.count_nonzero(~np.isnan(table), axis=0)
    columns = np.arange(table.shape[1])
    bands = []
    for name, level in levels:
        place = np.rint(level * np.maximum(count - 1, 0)).astype(np.int64)
        values = ordered[place, columns] if len(ordered) else np.full(len(columns), np.nan)
        bands.append((name, rounded([None if np.isnan(value) else value for value in values])))
    return bands
