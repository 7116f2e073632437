"""Batches of the same step that cost differently."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline_backend.insight.verdict.findings import TimeChange, TimeLoss
from paceline_backend.insight.verdict.observed import Bools, mean_of
from paceline_backend.insight.verdict.slowness import SlownessModel
from paceline_backend.policies.base import Floats

_LARGER = 0.06  # by so much a rank's batches must be larger throughout to name the rank
_SURE = 6.0  # σ
_EVEN = 0.02  # share of a step's computing that is lost, below which batches are alike,
_LEAST = 0.5  # or below this share of what is lost under the policy that loses most


def data_of(model: SlownessModel, others: Sequence[TimeLoss], apart: Bools) -> list[TimeLoss]:
    """The cost of uneven batches.

    Where the plan makes up for slow ranks, each rank's usual share of the work is no fault.

    Args:
        model: of the batches.
        others: other findings.
        apart: steps in which ranks do not wait for each other, [K].
    """
    known, part = model.took_part, model.part
    dealt = [finding.effect.dealt for finding in others if finding.effect.dealt is not None]
    made_up = np.hstack([np.ones((len(part), 1)), *dealt]).min(axis=1) < 1
    ranks: tuple[int, ...] = ()
    if made_up.any():
        even = part / model.usual_part
        part = np.where(made_up[:, None], even / mean_of(even, known, axis=1)[:, None], part)
    else:
        ranks = _larger(part, known)
    # Where ranks do not wait for each other, no batch makes another one wait.
    uneven = np.where(known & ~apart[:, None], part, 1.0)
    since, until = _course(model.policies, 1 - 1 / uneven.max(axis=1))
    effect = TimeChange(np.arange(part.shape[1]), dealt=uneven)
    return [TimeLoss("data", ranks, effect, since=since, until=until)]


def _course(policies: Sequence[slice], lost: Floats) -> tuple[int | None, int | None]:
    """Since when and until when policies left batches uneven; None: throughout, or not over.

    Args:
        policies: the steps of each.
        lost: share of each step's computing for which the mean rank waits, [K].
    """
    by_policy = [max(float(lost[policy].mean()), 0.0) for policy in policies]
    least = min(_EVEN, _LEAST * max(by_policy))
    uneven = [policy for policy, mean in zip(policies, by_policy, strict=True) if mean >= least]
    end = uneven[-1].stop
    return uneven[0].start or None, None if end == len(lost) else end - 1


def _larger(part: Floats, known: Bools) -> tuple[int, ...]:
    """Ranks whose batches are larger throughout."""
    many = np.maximum(known.sum(axis=0), 1)
    mean = mean_of(part, known, axis=0)
    spread = np.sqrt(mean_of((part - mean) ** 2, known, axis=0))
    usual = float(np.sort(mean)[(len(mean) - 1) // 2])
    larger = (mean > usual * (1 + _LARGER)) & (mean - usual > _SURE * spread / np.sqrt(many))
    return tuple(np.flatnonzero(larger).tolist())
