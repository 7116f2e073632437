"""Batches of the same step that cost differently."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline_backend.insight.verdict.findings import Effect, Finding
from paceline_backend.insight.verdict.slowness import Model
from paceline_backend.policies.base import Floats

_LARGER = 0.06  # by so much a rank's batches must be larger throughout to name the rank
_SURE = 6.0  # σ


def data_of(model: Model, others: Sequence[Finding]) -> list[Finding]:
    """The cost of uneven batches.

    Where the plan makes up for slow ranks, each rank's usual share of the work is no fault.
    """
    cost = np.where(model.took_part, model.typical, np.nan)
    part = cost / np.nanmean(cost, axis=1, keepdims=True)
    ranks: tuple[int, ...] = ()
    if any(finding.hidden for finding in others):
        part = part / np.nanmean(part, axis=0)
        part = part / np.nanmean(part, axis=1, keepdims=True)
    else:
        ranks = _larger(part)
    slower = np.where(model.took_part, part, 1.0)
    return [Finding("data", ranks, Effect(np.arange(part.shape[1]), slower=slower))]


def _larger(part: Floats) -> tuple[int, ...]:
    """Ranks whose batches are larger throughout."""
    many = np.maximum((~np.isnan(part)).sum(axis=0), 1)
    mean, spread = np.nanmean(part, axis=0), np.nanstd(part, axis=0)
    usual = float(np.sort(mean)[(len(mean) - 1) // 2])
    larger = (mean / usual - 1 > _LARGER) & (mean - usual > _SURE * spread / np.sqrt(many))
    return tuple(np.flatnonzero(larger).tolist())
