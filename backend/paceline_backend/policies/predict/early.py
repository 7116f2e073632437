"""Probabilities of different costs of a batch, while a run has the records of only a few steps.

`linear` calls `plausible` until there are enough rows to compare forecasts of the rows instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.cost import SUM, Cost
from paceline_backend.policies.values import Feedback, Floats, usable

Bools = npt.NDArray[np.bool_]

# If the ranks have this many rows (median), `linear` compares forecasts of the rows instead.
YOUNG = 24
# Costs with a smaller probability are not returned.
_PLAUSIBLE = 0.02
# Candidates for κ, the weight of the quadratic cost, in units of 1 ÷ the typical long size.
_CURVES = np.exp2(np.arange(-2.0, 7.0))
# Candidates for the fraction of the cost that depends on sizes, where most of the cost depends on
# the number of samples.
_SIZED = (0.02, 0.05, 0.1, 0.2)
# Candidates for a step's fixed cost, relative to a mean batch's cost, with prior probabilities.
_FIXED = ((0.0, 0.4), (0.05, 0.3), (0.2, 0.15), (0.7, 0.1), (2.0, 0.05))
# Candidates for the standard deviations of two logarithms: of the noise, and of the ranks' speeds.
# All combinations have the same prior probability.
_NOISES = np.array([0.003, 0.01, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0])
_SPREADS = np.array([0.003, 0.05, 0.2, 0.6])
_NOISE, _SPREAD = (grid.ravel()[:, None] for grid in np.meshgrid(_NOISES, _SPREADS))
# Factor of the log-likelihoods. It is below 1, because rows are not as independent as the model
# assumes.
_ALIKE = 0.5


@dataclass(frozen=True)
class Weighed:
    """A cost that the rows do not rule out.

    `noise` is the relative standard deviation of a row's time under this cost. `sized` is the
    fraction of the cost that depends on sizes; the rest is the same for all samples.
    """

    cost: Cost
    probability: float
    noise: float
    sized: float = 1.0


def plausible(rows: Feedback) -> list[Weighed]:
    """Return the costs that the rows do not rule out, the most probable first.

    `rows` are [S, W] arrays of some ranks; each of these ranks has a usable row. In the model, a
    row's time is the cost of its batch, times the rank's speed, times noise. Ranks' speeds vary
    around a common mean. The time of the oldest step may be off by a factor that all ranks share.
    The result has at most one cost of each family. One family depends mostly on the number of
    samples. The others are linear or quadratic in the sizes, padded or not padded.
    """
    valid = usable(rows.samples, rows.load, rows.compute_s)
    # Old records lack `longest` and `squares`.
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
    """Return the mean of costs that differ only in κ, weighted by their likelihoods.

    The result's `probability` is the logarithm of the mean likelihood. `time` has logarithms of
    times, and all arrays are [S, W]; `loads` has one array for each cost. If `sized` is given, the
    cost is SUM, and the loads differ instead in the fraction that depends on sizes, `sized`.
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
    """Return the log-likelihood of a cost, times `_ALIKE`, and the noise that suits it best."""
    load = np.where(valid, load, np.nan)
    mean = float(np.nanmean(load))
    tried = np.concatenate(
        [
            _ALIKE * _likely(time - np.log(load + share * mean), valid) + np.log(prior)
            for share, prior in _FIXED
        ]
    )
    best = int(tried.argmax())
    likely = float(tried[best] + np.log(np.exp(tried - tried[best]).sum()))
    return likely, float(_NOISE[best % len(_NOISE), 0])


def _likely(off: Floats, valid: Bools) -> Floats:
    """Return log-likelihoods of residuals for each pair of `_NOISE` and `_SPREAD`.

    All means of the ranks' speeds have the same prior probability. `off` is the logarithm of time ÷
    cost, [S, W]; NaN where not valid.
    """
    if len(off) > 1 and valid[0].any() and valid[1:].any():
        off = off.copy()
        off[0] += np.nanmean(off[1:]) - np.nanmean(off[0])
    count = valid.sum(axis=0)
    off, count = off[:, count > 0], count[count > 0]
    mean = np.nanmean(off, axis=0)
    within = float(np.nansum((off - mean) ** 2))
    # Variance of a rank's mean: noise, and differences between ranks.
    variance = _NOISE**2 / count + _SPREAD**2  # [pairs, W]
    weight = 1 / variance
    middle = (weight * mean).sum(axis=1) / weight.sum(axis=1)
    likely = (count - 1).sum() * np.log(_NOISE[:, 0] ** 2) + within / _NOISE[:, 0] ** 2
    likely += np.log(variance).sum(axis=1) + np.log(weight.sum(axis=1))
    likely += (weight * (mean - middle[:, None]) ** 2).sum(axis=1)
    return np.asarray(-0.5 * likely)
