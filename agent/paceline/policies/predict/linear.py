"""Predictors of the time that each worker takes for a step; the time is linear in the load.

The fit of one rank's rows is compiled code in `regression`. This module selects the cost of a batch
("auto") and the prior of each rank, and pulls the fits of ranks of similar speed together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from paceline.core.cost import SUM, Cost
from paceline.policies.predict.early import YOUNG_ROWS, Weighed, plausible
from paceline.policies.predict.regression import LEAST_RESIDUAL, SHARES, fit_ranks
from paceline.policies.values import LEAST_USABLE, Feedback, Floats, Ints, Models, usable

WindowSteps = Annotated[
    int,
    Meta(
        ge=4, le=64, description="Number of newest steps from which each rank's speed is computed."
    ),
]
CostModel = Annotated[
    Literal["auto", "sum", "padded"],
    Meta(
        description="Cost of a batch, on which its compute time depends. sum: sum of the samples' "
        "sizes. padded: number of samples times the largest size. auto: of these two and their "
        "quadratic forms, the cost that fits the measured times best."
    ),
]

Bools = npt.NDArray[np.bool_]

# All ranks have the same cost of a batch. It is selected by how well it forecasts the times of at
# most this many ranks.
_COST_RANKS = 16
# Candidates for κ, the weight of the quadratic term of a cost. They are multiples of 1 ÷ (Σλ² ÷
# Σλ), where Σλ² ÷ Σλ is the mean size λ of the samples, weighted by size.
_CURVES = 2.0 ** np.arange(-3, 7)
# The best candidate for κ is multiplied and divided by each of these factors in turn, and the best
# of the three values is kept.
_FINER = (2.0 ** (0.5 ** np.arange(1, 6))).tolist()
# If the log-likelihoods of padded and unpadded costs differ by at most this margin,
# `_expects_padded` chooses between them. A cost with κ > 0 must be better than the cost with κ = 0
# by this margin.
_PADDING_MARGIN = 12.0
# A rank's noise is estimated from at least `_FEW_DIFFERENCES` differences between rows. If the
# noise is at least `_NOISY`, the rank's rows are fitted a second time.
_FEW_DIFFERENCES, _NOISY = 8, 0.1
# Differences between consecutive residuals are clipped to this value.
_JUMP = 0.9
# Batches count as padded if `plausible` gives a padded cost at least this probability.
_SURE = 0.98
# If the largest ratio of a row's padded load to its load is less than this many times the smallest
# ratio, the rows cannot show whether batches are padded. Then `plausible`, which takes 10 ms, is
# not called.
_ALIKE_PADDING = 1.05
# Samples count as grouped by size if the padded loads of most steps are below this fraction of what
# they would be if all ranks had equal counts and the same longest samples.
_HALF = 0.5
# The wide prior of c and b is used only if its log-likelihood exceeds the log-likelihood of the
# narrow prior by more than this value.
_CLEARLY = 3.0
# Ratio of a fit's error to the error of a plain mean of the same rows. The fit's error is larger,
# because it has three coefficients and follows changes of speed.
_DOUBT = 1.5
# Number of iterations of the mean shift in `_peaks`. Where all levels are similar, each iteration
# reduces a level's distance from its density peak to a third.
_SHIFTS = 30
# Minimum number of ranks that may get a common fit: in a large run, fewer ranks may have similar
# times by chance.
_ALIKE_RANKS = 4
# A rank gets a common fit only if the common fit's forecasts of half and of twice the usual batch
# differ from the rank's own forecasts by at most this multiple of the difference that is allowed
# for the usual batch.
_SHAPES = 2


@dataclass(frozen=True)
class LinearPredictor:
    """CHRONICA's runtime prophet (Alg. 1), which predicts times of steps: T = a·Λ' + c·n + b.

    T is the time of a step in seconds, Λ' the effective load of its batch, and n the number of its
    samples; a > 0, c ≥ 0 and b ≥ 0. b is a cost per step and is added once, not per sample as in
    the paper. c is the cost of a sample of any size. The fit is a least squares of relative errors,
    row by row, oldest first.

    A row whose time differs from its forecast by more than 15 % (or three standard deviations of
    the noise, if this is more) is left out. If the next row differs with the same sign, the rank's
    speed has changed: a, c and b change by the same factor, which is computed from the newest row.
    The fit also follows gradual changes of speed once they are larger than the noise.

    A weak prior pulls c and b towards 0. So forecasts for other n and Λ' are sensible even if the
    feedback cannot separate c from b (constant n, as under `bsp`) or a from b (loads that hardly
    differ).

    Args:
        window: the number of newest steps that the fit uses. Steps in which a rank had no samples
            are not counted.
        cost: "sum": Λ' is the sum of the sizes λ of the batch. "padded": Λ' is n times the largest
            λ. "auto": the cost that forecasts all ranks' steps best, of these two and their
            quadratic forms; "sum" unless another is clearly better.
        shrink: true if ranks whose differences may be noise alone get a common fit, or fits that
            are pulled together.
    """

    window: int = 64
    cost: str = "sum"
    shrink: bool = True

    def fit(self, feedback: Feedback, world: int) -> Models:
        """See `Predictor.fit`."""
        rows = feedback.by_step(world)
        if self.cost == "padded":
            return self._models(rows, Cost(padded=True))
        if self.cost == "sum":
            return self._models(rows, SUM)
        some = _some(rows)
        valid = usable(some.samples, some.load, some.compute_s)
        if not valid.any(axis=0).all():
            rival = replace(Models.unknown(world), cost=Cost(padded=True))
            return replace(Models.unknown(world), rivals=((0.5, rival),))
        if np.median(valid.sum(axis=0)) >= min(YOUNG_ROWS, self.window):
            return self._models(rows, _choose(some, self.window))
        best, *rest = ((each.probability, self._weighed(rows, each)) for each in plausible(some))
        return replace(best[1], rivals=tuple(rest)) if best[1].known else best[1]

    def _weighed(self, rows: Feedback, of: Weighed) -> Models:
        if of.sized == 1:
            return self._models(rows, of.cost, of.noise)
        mean = float(rows.load.sum() / rows.samples.sum())
        load = of.sized * rows.load + (1 - of.sized) * mean * rows.samples
        mixed = self._models(replace(rows, load=load), SUM, of.noise)
        return replace(mixed, a=of.sized * mixed.a, c=mixed.c + (1 - of.sized) * mean * mixed.a)

    def _models(self, rows: Feedback, cost: Cost, noise: float = 0.0) -> Models:
        """Fit all ranks' models under a cost.

        `noise` is the relative noise of ranks that have too few rows to estimate it.
        """
        world = rows.load.shape[1]
        fits, errors = _fit_shares(rows, cost, self.window, noise)
        fits = _shrunk(fits, errors, rows, cost) if self.shrink else fits
        if not len(rows) or (fits[:, 0] <= 0).any():
            return Models.unknown(world)
        a, c, b = fits.T.copy()
        return Models(a, c, b, cost=cost)


def _fit_shares(
    rows: Feedback, cost: Cost, window: int, unknown: float = 0.0
) -> tuple[Floats, Floats]:
    """Fit each rank with the more likely of two priors of c and b.

    Return a, c and b of each rank, [W, 3], and the relative error of each rank's forecast time that
    noise alone may cause, [W]. `unknown` is the relative noise of ranks that have too few rows to
    estimate it.

    If a rank's speed drifts and plans adapt its load, its times stay the same although its load
    changes, as if b were large. But from one step to the next, a speed hardly drifts. So the fit
    uses the wide prior, which allows a large b, only if it explains the differences between
    successive steps clearly better than the narrow prior.
    """
    wide, narrow = (_fit(rows, cost, window, share)[0] for share in SHARES)
    load, samples = cost.load(rows.features), rows.samples
    valid = usable(samples, load, rows.compute_s)
    valid &= np.cumsum(valid[::-1], axis=0)[::-1] <= window
    pairs = valid[1:] & valid[:-1]
    count = pairs.sum(axis=0)

    def jumps(fits: Floats) -> Floats:
        """Return absolute differences of successive residuals, [S - 1, W]; NaN where unknown."""
        a, c, b = fits.T
        forecast = a * load + c * samples + b
        fine = valid & (forecast > 0)
        ratio = np.divide(rows.compute_s, forecast, out=np.ones_like(forecast), where=fine)
        off = np.log(np.maximum(ratio, LEAST_USABLE))
        return np.where(pairs, np.minimum(np.abs(np.diff(off, axis=0)), _JUMP), np.nan)

    def error(jump: Floats) -> Floats:
        return np.asarray(np.nansum(jump**2, axis=0) + count * LEAST_RESIDUAL**2)

    by_wide, by_narrow = jumps(wide), jumps(narrow)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = 0.5 * count * np.log(error(by_narrow) / error(by_wide))
    is_wide = gain > _CLEARLY
    fits = np.where(is_wide[:, None], wide, narrow)
    noise = _noise(np.where(is_wide, by_wide, by_narrow))
    fits = _again_where_noisy(rows, cost, window, fits, is_wide, noise)
    errors = _DOUBT * noise / np.sqrt(np.maximum(count, 1))
    young = _DOUBT * unknown / np.sqrt(np.maximum(valid.sum(axis=0), 1))
    return fits, np.where(noise > 0, errors, young)


def _noise(jumps: Floats) -> Floats:
    """Return the standard deviation σ of each rank's noise, [W]; 0: unknown.

    `jumps` has absolute differences of successive residuals, [S - 1, W], whose median is 0.954 σ.
    """
    enough = (~np.isnan(jumps)).sum(axis=0) >= _FEW_DIFFERENCES
    noise = np.zeros(jumps.shape[1])
    if enough.any():
        noise[enough] = np.nanmedian(jumps[:, enough], axis=0) / 0.954
    return noise


def _shrunk(fits: Floats, errors: Floats, rows: Feedback, cost: Cost) -> Floats:
    """Pull together the fits of ranks that may be equally fast; return all fits, [W, 3].

    A rank's level is the logarithm of its time for a usual batch (mean load, mean number of
    samples). Ranks around one peak of the levels' density get a common fit if noise alone may
    explain their differences. The fit of each other rank is pulled towards the mean of the ranks
    near it; a near rank's weight is the likelihood that noise alone explains the difference. Ranks
    without noise keep their fits. `fits` has a, c and b of each rank, [W, 3]; `errors` the relative
    errors of the fits that noise may cause, [W].
    """
    known = (fits[:, 0] > 0) & (errors > 0)
    if known.sum() < 2:
        return fits
    valid = usable(rows.samples, rows.load, rows.compute_s)
    batch = np.array(
        [float(np.mean(cost.load(rows.features)[valid])), float(np.mean(rows.samples[valid])), 1.0]
    )
    level = np.log(fits[known] @ batch)
    ranks = np.flatnonzero(known)[np.argsort(level)]
    level, error = np.sort(level), errors[ranks]
    drawn = _drawn(level, error**2)
    shrunk = fits.copy()
    shrunk[ranks] *= np.exp(drawn - level)[:, None]
    equal, common = _common(fits[ranks], level, error, _peaks(level, drawn, error), batch)
    shrunk[ranks[equal]] = common[equal]
    return shrunk


def _common(
    fits: Floats, level: Floats, error: Floats, first: Ints, batch: Floats
) -> tuple[Bools, Floats]:
    """Compute common fits of ranks whose levels are around the same density peak.

    Return a mask of the ranks that should get the common fit of their peak, [n], and the common fit
    (a, c, b) for each rank, [n, 3]. A rank is not in the mask if its distance from the peak's
    median is more than noise alone would cause, or if its forecast of half or twice the usual batch
    differs too much from the common forecast. Peaks with few ranks, and peaks whose ranks differ by
    more than noise alone would cause, have no ranks in the mask.

    The ranks are sorted by `level`, the logarithm of their time for the usual batch, [n]. `fits`
    has their a, c and b, [n, 3]. `error` is the relative error of each fit that noise may cause,
    [n]. `first` is the index of the first rank of each peak, ascending. `batch` is the usual batch:
    its effective load, its number of samples, and 1.
    """
    count = np.diff(first, append=len(level))
    peak = np.repeat(np.arange(len(first)), count)
    limit = (1 + np.sqrt(2 * np.log(count)))[peak] * error
    near = np.abs(level - level[first + count // 2][peak]) <= limit
    weight = near / error**2
    total = np.maximum(np.add.reduceat(weight, first), LEAST_USABLE)
    mean = (np.add.reduceat(weight * level, first) / total)[peak]
    weighted_fits = weight[:, None] * fits / np.exp(level)[:, None]
    common = (np.add.reduceat(weighted_fits, first) / total[:, None])[peak]
    common *= np.exp(mean)[:, None]
    for times in (0.5, 2.0):
        other = batch * [times, times, 1.0]
        off = np.abs(np.log((fits @ other) / np.maximum(common @ other, LEAST_USABLE)))
        near &= off <= _SHAPES * limit
    # For N normal values, the sum of the squared distances from their mean, in standard errors, has
    # the mean N - 1 and the standard deviation √(2 (N - 1)).
    number = np.add.reduceat(near.astype(np.float64), first)
    free = np.maximum(number - 1, 0.0)
    apart = np.add.reduceat(near * ((level - mean) / error) ** 2, first)
    alike = (number >= min(_ALIKE_RANKS, len(level))) & (apart <= free + np.sqrt(2 * free))
    return near & alike[peak], common


def _drawn(level: Floats, variance: Floats) -> Floats:
    """Return, for each of the sorted levels, the weighted mean of the levels near it, [n].

    `variance` is the variance of each level, [n]. A weight is the likelihood that noise alone
    explains the difference of the two levels.
    """
    made = np.empty_like(level)
    # Levels that are far away have no weight.
    for at in range(len(level)):
        near = slice(
            np.searchsorted(level, level[at] - 5 * np.sqrt(2 * variance[at])),
            np.searchsorted(level, level[at] + 5 * np.sqrt(2 * variance[at]), "right"),
        )
        both = variance[near] + variance[at]
        weight = np.exp(-0.5 * (level[near] - level[at]) ** 2 / both)
        made[at] = np.average(level[near], weights=weight)
    return made


def _peaks(level: Floats, drawn: Floats, error: Floats) -> Ints:
    """Divide the sorted levels among the peaks of their density; return each peak's first index.

    The method is mean shift (Fukunaga and Hostetler, "The estimation of the gradient of a density
    function", IEEE Trans. Inf. Theory 21, 1975). `drawn` is the first iteration of the mean shift:
    for each level, the mean of the levels near it, [n]. `error` is the standard deviation of each
    level, [n].
    """
    drawn = at = np.maximum.accumulate(drawn)
    for _ in range(_SHIFTS):
        at = np.interp(at, level, drawn)
    apart = np.diff(at) > 0.5 * np.maximum(error[1:], error[:-1])
    return np.concatenate([[0], np.flatnonzero(apart) + 1])


def _again_where_noisy(
    rows: Feedback, cost: Cost, window: int, fits: Floats, is_wide: Bools, noise: Floats
) -> Floats:
    """Fit the noisy ranks a second time, now with known noise; return all ranks' fits, [W, 3].

    The first fit, `fits`, mistakes chance deviations of noisy ranks for changes of speed. `noise`
    is the standard deviation of each rank's noise, [W]; `is_wide` is a mask of the ranks with the
    wide prior, [W].
    """
    noise = np.where(noise < _NOISY, 0.0, noise)
    for share, mine in zip(SHARES, (is_wide, ~is_wide), strict=True):
        if (noisy := mine & (noise > 0)).any():
            again = _fit(rows, cost, window, share, noise)[0]
            fits = np.where(noisy[:, None], again, fits)
    return fits


def _fit(
    rows: Feedback,
    cost: Cost,
    window: int,
    share: float = SHARES[0],
    noise: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Fit each rank's newest `window` rows under a cost; return fits and scores.

    The fits are a, c and b of each rank, [W, 3]; for a rank without rows, a is 0. The scores of the
    ranks' forecasts are [W, 3]: the sum of clipped and weighted squared residuals, the number of
    rows that were forecast, and a term to add to the −log-likelihood of the rows. The term accounts
    for the prior, and for forecasts of which the fit was unsure. `share` is the prior's standard
    deviation, one of `SHARES`. `noise` is a lower bound of each rank's noise, [W]; None: 0.
    """
    world = rows.load.shape[1]
    fits, losses = np.zeros((world, 3)), np.zeros((world, 3))
    load = np.ascontiguousarray(cost.load(rows.features), np.float64)
    samples, compute_s = np.ascontiguousarray(rows.samples), np.ascontiguousarray(rows.compute_s)
    noise = np.zeros(world) if noise is None else noise
    fit_ranks(load, samples, compute_s, window, share, noise, fits, losses)
    return fits, losses


def _some(rows: Feedback) -> Feedback:
    some = np.unique(np.linspace(0, rows.load.shape[1] - 1, _COST_RANKS).astype(np.int64))
    return Feedback(*(getattr(rows, field.name)[:, some] for field in fields(rows)))


def _choose(rows: Feedback, window: int) -> Cost:
    valid = usable(rows.samples, rows.load, rows.compute_s)
    # Old records lack `longest` and `squares`, without which costs cannot be compared.
    if not valid.any() or (rows.longest[valid] <= 0).any():
        return SUM
    typical = float(rows.squares[valid].sum() / rows.load[valid].sum())

    def score(cost: Cost) -> float:
        loss, count, unlikely = _fit(rows, cost, window)[1].sum(axis=0)
        score = 0.5 * count * math.log(loss / max(count, 1) + LEAST_RESIDUAL**2) + unlikely
        if cost.kappa > 0:
            score += _PADDING_MARGIN + 0.5 * math.log(cost.kappa * typical) ** 2
        return float(score)

    costs = [Cost(k, p) for p in (False, True) for k in (0.0, *(_CURVES / typical).tolist())]
    tried = {cost: score(cost) for cost in costs}
    padded, other = (min(tried[cost] for cost in costs if cost.padded is p) for p in (True, False))
    if abs(padded - other) <= _PADDING_MARGIN:
        expected = _expects_padded(rows, valid)
        costs = [cost for cost in costs if cost.padded is expected]
    best = min(costs, key=lambda cost: tried[cost])
    for factor in _FINER if best.kappa > 0 else ():
        near = [Cost(kappa, best.padded) for kappa in (best.kappa * factor, best.kappa / factor)]
        tried |= {cost: score(cost) for cost in near}
        best = min((best, *near), key=lambda cost: tried[cost])
    return best


def _expects_padded(rows: Feedback, valid: Bools) -> bool:
    """Return True if batches should count as padded when padded and other costs score alike.

    A run's first steps distinguish padded and other costs best, because their batches have equal
    counts. The scores omit the first steps, because a fit needs some rows before it can forecast,
    but `plausible` includes them.
    """
    if _grouped(rows, valid):
        return True
    padding = rows.samples[valid] * rows.longest[valid] / rows.load[valid]
    if padding.max() < _ALIKE_PADDING * padding.min():
        return False
    first = plausible(rows)[0]
    return first.cost.padded and first.probability >= _SURE


def _grouped(rows: Feedback, valid: Bools) -> bool:
    """Return True if the scheduler grouped samples by size because it expected padded batches.

    One of two signs is enough. First, the sizes within a batch vary less than the mean sizes of the
    batches. Second, where a few sizes are huge, the longest sample of a batch with many samples is
    much shorter than the longest sample of a batch with few samples. The times of grouped batches
    hardly show whether the batches are padded.
    """
    several = valid & (rows.samples > 1)
    if not several.any():
        return False
    n, mean = rows.samples[several], rows.load[several] / rows.samples[several]
    within = (rows.squares[several] / n - mean**2) * n / (n - 1)
    if mean.var() > within.mean():
        return True
    longest = np.where(valid, rows.longest, 0.0)
    padded = (rows.samples * longest).sum(axis=1)
    alike = rows.samples.sum(axis=1) * longest.mean(axis=1)
    return bool(np.median(padded / np.maximum(alike, LEAST_USABLE)) < _HALF)


@dataclass(frozen=True)
class PerSamplePredictor:
    """CHRONICA's runtime prophet as in the paper (Alg. 1).

    The paper fits the line T = a·Λ + b to the times T and loads Λ of a worker's steps by ordinary
    least squares. The expected time of a sample of size λ is then a·λ + b, so `Models.c` holds the
    paper's b. The fit uses the last `window` steps.
    """

    window: int = 64

    def fit(self, feedback: Feedback, world: int) -> Models:
        """See `Predictor.fit`.

        If a rank's rows do not give a > 0, a is its mean time ÷ its mean load, and b is 0.
        """
        rows = feedback.by_step(world)
        valid = usable(rows.samples, rows.load, rows.compute_s)
        if not valid.any(axis=0).all():
            return Models.unknown(world)
        # Number of usable rows from each row to the newest one.
        later = np.cumsum(valid[::-1], axis=0)[::-1]
        weight = (valid & (later <= self.window)) / np.minimum(later[0], self.window)
        load, compute_s = (weight * rows.load).sum(axis=0), (weight * rows.compute_s).sum(axis=0)
        x, y = rows.load - load, rows.compute_s - compute_s
        with np.errstate(divide="ignore", invalid="ignore"):
            a = (weight * x * y).sum(axis=0) / (weight * x**2).sum(axis=0)
        most = np.where(weight > 0, rows.load, 0.0).max(axis=0)
        least = np.where(weight > 0, rows.load, np.inf).min(axis=0)
        slope_known = (most > least) & (a > 0)
        a = np.where(slope_known, a, compute_s / load)
        return Models(a, np.where(slope_known, compute_s - a * load, 0.0), np.zeros(world))


def warm_up() -> None:
    """See `policies.warm_up`."""
    rows = Feedback.empty().by_step(1)
    _fit(rows, SUM, 1)
