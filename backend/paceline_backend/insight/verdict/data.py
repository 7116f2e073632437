"""Detection of time lost because the batches of a step differ in cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline_backend.insight.verdict.findings import TimeChange, TimeLoss
from paceline_backend.insight.verdict.observed import Bools, mean_of
from paceline_backend.insight.verdict.slowness import SlownessModel
from paceline_backend.policies.base import Floats

# A rank is named only if its batches are larger by this much throughout.
_LARGER = 0.06  # relative
_SURE = 6.0  # σ
# A policy's batches are uneven if at least this share of its computing time is lost.
_EVEN = 0.02
# They are also uneven from this fraction of the loss under the worst policy on.
_LEAST = 0.5


def data_of(model: SlownessModel, others: Sequence[TimeLoss], apart: Bools) -> list[TimeLoss]:
    """Return the time lost to uneven batches as one finding.

    Where the plan compensates for the slow ranks of `others`, a rank's usual share of the work is
    not counted as uneven. `apart` is a mask of the steps in which ranks do not wait for each other,
    [K].
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
    """Return the first and last step of uneven batches; None: from the start, or to the end.

    `lost` is the share of each step's computing time for which the mean rank waits, [K].
    """
    by_policy = [max(float(lost[policy].mean()), 0.0) for policy in policies]
    least = min(_EVEN, _LEAST * max(by_policy))
    uneven = [policy for policy, mean in zip(policies, by_policy, strict=True) if mean >= least]
    end = uneven[-1].stop
    return uneven[0].start or None, None if end == len(lost) else end - 1


def _larger(part: Floats, known: Bools) -> tuple[int, ...]:
    many = np.maximum(known.sum(axis=0), 1)
    mean = mean_of(part, known, axis=0)
    spread = np.sqrt(mean_of((part - mean) ** 2, known, axis=0))
    usual = float(np.sort(mean)[(len(mean) - 1) // 2])
    larger = (mean > usual * (1 + _LARGER)) & (mean - usual > _SURE * spread / np.sqrt(many))
    return tuple(np.flatnonzero(larger).tolist())
