"""The heat map of a range of steps: greatest times of computing, by row of ranks and column."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline_backend.store.views.digits import rounded

Floats = npt.NDArray[np.float64]

ROWS = 256  # of a heat map, at most
CODES = 254  # steps of the scale from the least to the greatest value; code 0: unknown

_COMPUTE = (("compute_p10", 0.1), ("compute_p50", 0.5), ("compute_p90", 0.9))
_SHARE = (("share_min", 0.0), ("share_p50", 0.5), ("share_p90", 0.9), ("share_max", 1.0))


def together(world: int) -> int:
    """Ranks in one row."""
    return max(1, -(-world // ROWS))


def heat_of(rows: Sequence[Any], world: int) -> dict[str, Any]:
    """The columns of `GET view`'s ``heat``.

    Args:
        rows: row of ranks, first step of the column, mean time of computing (s), expected time,
            share of the load or None, least and greatest time of computing; in any order.
        world: ranks of the run.
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
    """The least and greatest value, and a byte for each cell on a logarithmic scale between them.

    Code 0 is unknown, 1 the least and 255 the greatest value: code k stands for
    low · (high / low) ** ((k - 1) / 254).
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
    """Quantiles over the rows of each column; None where nothing is known."""
    ordered = np.sort(table, axis=0)  # unknown values last
    count = np.count_nonzero(~np.isnan(table), axis=0)
    columns = np.arange(table.shape[1])
    bands = []
    for name, level in levels:
        place = np.rint(level * np.maximum(count - 1, 0)).astype(np.int64)
        values = ordered[place, columns] if len(ordered) else np.full(len(columns), np.nan)
        bands.append((name, rounded([None if np.isnan(value) else value for value in values])))
    return bands
