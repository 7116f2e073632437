"""Probabilities of different costs of a batch, while a run has the records of only a few steps.

`linear` calls `plausible`. Once there are enough rows, `linear` instead compares costs by how well
each forecasts the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.cost import SUM, Cost
from paceline.policies.values import Feedback, Floats, usable

Bools = npt.NDArray[np.bool_]

# If the median rank has at least this many rows, `linear` does not use this module.
YOUNG_ROWS = 24
# Costs with a smaller probability are not returned.
_PLAUSIBLE = 0.02
# Candidates for κ, the weight of the quadratic term of a cost. They are multiples of 1 ÷ (Σλ² ÷
# Σλ), where Σλ² ÷ Σλ is the mean size λ of the samples, weighted by size.
_CURVES = np.exp2(np.arange(-2.0, 7.0))
# Candidates for the fraction of a batch's cost that depends on sizes, if the rest depends on the
# number of samples.
_SIZED = (0.02, 0.05, 0.1, 0.2)
# Candidates for a step's fixed cost, as pairs: the fixed cost ÷ the cost of a mean batch, and its
# prior probability.
_FIXED = ((0.0, 0.4), (0.05, 0.3), (0.2, 0.15), (0.7, 0.1), (2.0, 0.05))
# Candidates for the standard deviation of the logarithm of the noise (`_NOISES`) and of the ranks'
# speeds (`_SPREADS`). All combinations have the same prior probability.
_NOISES = np.array([0.003, 0.01, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0])
_SPREADS = np.array([0.003, 0.05, 0.2, 0.6])
_NOISE, _SPREAD = (grid.ravel()[:, None] for grid in np.meshgrid(_NOISES, _SPREADS))
# Factor of log-likelihoods. It is below 1, because rows are less independent than the model of
# `plausible` assumes.
_LIKELIHOOD_WEIGHT = 0.5


@dataclass(frozen=True)
class Weighed:
    """A cost of a batch that the rows do not rule out, and its probability.

    `noise` is the relative standard deviation of a row's time under this cost. `sized` is the
    fraction of the cost that depends on sizes; the rest is the same for all samples.
    """

    cost: Cost
    probability: float
    noise: float
    sized: float = 1.0


def plausible(rows: Feedback) -> list[Weighed]:
    """Return the costs of a batch that the rows do not rule out, the most probable first.

    `rows` has arrays [S, W] of S steps and W ranks; each rank has a usable row. In the model, a
    row's time is the cost of its batch, times the rank's factor, times noise. The ranks' factors
    vary around a common mean. In the oldest step, the times of all ranks may have an additional
    common factor. The result has at most one cost of each family. One family depends mostly on the
    number of samples. The costs of the other families are linear or quadratic in the sizes, padded
    or not padded.
    """
    valid = usable(rows.samples, rows.load, rows.compute_s)
    # Old records lack `longest` and `squares`, without which costs cannot be compared.
    if (rows.longest[valid] <= 0).any():
        return [Weighed(SUM, 1.0, 0.0)]
    time = np.log(np.where(valid, rows.compute_s, 1.0))
    typical = float(rows.squares[valid].sum() / rows.load[valid].sum())
    alike = rows.samples * float(rows.load[valid].sum() / rows.samples[valid].sum())
    counted = [share * rows.load + (1 - share) * alike for share in _SIZED]
    made = [_weighed(time, valid, counted, sized=_SIZED)]
    for padded in (False, True):
        for curves in ([0.0], (_CURVES / typical).tolist()):
            costs = [Cost(kappa, padded) for kappa in curves]
            made.append(_weighed(time, valid, [cost.load(rows.features) for cost in costs], costs))
    most = max(weighed.probability for weighed in made)
    chances = np.exp([weighed.probability - most for weighed in made])
    chances /= chances.sum()
    made = [replace(w, probability=float(p)) for w, p in zip(made, chances, strict=True)]
    made.sort(key=lambda weighed: -weighed.probability)
    return [weighed for weighed in made if weighed.probability >= _PLAUSIBLE]


def _weighed(
    time: Floats,
    valid: Bools,
    loads: list[Any],
    costs: Sequence[Cost] = (SUM,),
    *,
    sized: Sequence[float] = (),
) -> Weighed:
    """Return the mean of several costs of one family, weighted by their likelihoods.

    The costs differ only in κ, the weight of the quadratic term. If `sized` is given, the cost is
    SUM, and the candidates differ in the fraction of the cost that depends on sizes. The result's
    `probability` is the logarithm of the mean likelihood.

    Args:
        time: logarithm of each row's time, [S, W].
        valid: mask of the usable rows, [S, W].
        loads: for each candidate, the effective loads of the rows, [S, W].
    """
    of = np.array([_likelihood(time, valid, load) for load in loads])
    best = int(of[:, 0].argmax())
    weights = np.exp(of[:, 0] - of[best, 0])
    likely, noise = float(of[best, 0] + np.log(weights.mean())), float(of[best, 1])

    def mean(values: Sequence[float]) -> float:
        return float(np.exp(np.average(np.log(values), weights=weights)))

    if sized:
        return Weighed(SUM, likely, noise, mean(sized))
    cost = costs[0]
    if len(costs) > 1:
        cost = Cost(mean([each.kappa for each in costs]), cost.padded)
    return Weighed(cost, likely, noise)


def _likelihood(time: Floats, valid: Bools, load: Any) -> tuple[float, float]:
    """Return the log-likelihood of a cost, times `_LIKELIHOOD_WEIGHT`, and its most likely noise.

    The noise is a relative standard deviation. `load` has the effective loads of the rows under the
    cost, `time` the logarithms of their times, and `valid` a mask of the usable rows, [S, W].
    """
    load = np.where(valid, load, np.nan)
    mean = float(np.nanmean(load))
    tried = np.concatenate(
        [
            _LIKELIHOOD_WEIGHT * _likely(time - np.log(load + share * mean), valid) + np.log(prior)
            for share, prior in _FIXED
        ]
    )
    best = int(tried.argmax())
    likely = float(tried[best] + np.log(np.exp(tried - tried[best]).sum()))
    return likely, float(_NOISE[best % len(_NOISE), 0])


def _likely(off: Floats, valid: Bools) -> Floats:
    """Return the log-likelihood of residuals for each pair of `_NOISE` and `_SPREAD`, [pairs].

    The mean of the ranks' speeds has a uniform prior. `off` has the residuals, the logarithms of
    time ÷ cost, [S, W]; NaN where a row is not usable (`valid`, [S, W]).
    """
    if len(off) > 1 and valid[0].any() and valid[1:].any():
        off = off.copy()
        off[0] += np.nanmean(off[1:]) - np.nanmean(off[0])
    count = valid.sum(axis=0)
    off, count = off[:, count > 0], count[count > 0]
    mean = np.nanmean(off, axis=0)
    within = float(np.nansum((off - mean) ** 2))
    # Variance of a rank's mean residual: variance of the noise, plus variance between ranks.
    variance = _NOISE**2 / count + _SPREAD**2  # [pairs, W]
    weight = 1 / variance
    middle = (weight * mean).sum(axis=1) / weight.sum(axis=1)
    likely = (count - 1).sum() * np.log(_NOISE[:, 0] ** 2) + within / _NOISE[:, 0] ** 2
    likely += np.log(variance).sum(axis=1) + np.log(weight.sum(axis=1))
    likely += (weight * (mean - middle[:, None]) ** 2).sum(axis=1)
    return np.asarray(-0.5 * likely)
