"""Compiled code that fits each rank's model for `linear.LinearPredictor`.

A rank's steps, called rows, are added to its fit one by one, oldest first.
`linear` calls `fit_ranks` dozens of times for each plan. The functions have many parameters, all
plain arrays and numbers, because Numba determines the types of other arguments, such as named
tuples, in Python at each call. Everywhere, `variance` is the variance of a rank's noise, and
`share` is the relative standard deviation of the prior of c·n and b, one of `SHARES`.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.policies.jit import compiled
from paceline.policies.values import LEAST_USABLE, Floats, Ints

# A residual is the logarithm of a step's measured ÷ forecast time. If two successive residuals have
# the same sign, and the absolute values of both exceed this value, the rank's speed has changed.
_CHANGED = math.log(1.15)
# This multiple of the noise's standard deviation is the threshold instead, if it is larger.
_CHANGE_DEVIATIONS = 3.0
# Prior standard deviation of the noise of a rank's times, and the weight of this prior: it counts
# as much as this number of rows.
_PRIOR_NOISE, _BELIEF = 0.05, 4.0
# Standard deviations of the two priors of c·n and b, relative to a step's time: a wide prior and a
# narrow one. `linear._fit_shares` chooses between them.
SHARES = (0.25, 0.03)
# Minimum ratio of a to c + b.
_LEAST_RATIO = 1e-3
# Filters that follow a drifting speed. Each is a pair: the weight of the newest residual in the
# filter's level, and its weight in the level's slope. The first filter assumes a constant speed.
_GAINS = np.array(
    [
        *((0.0, 0.0), (0.05, 0.0), (0.1, 0.0), (0.2, 0.0), (0.4, 0.0), (0.7, 0.0)),
        *((0.2, 0.015), (0.3, 0.05)),
    ]
)
# Prior odds of the filter for a constant speed against each of the other filters.
_STAYS = 20.0
# The factor by which the weight of a filter's errors decreases at each step.
_FORGETS = 0.97
# Prior standard deviation of the best filter's errors, and the weight of this prior: it counts as
# much as this number of rows.
_LITTLE, _NOISE_ROWS = 0.01, 2.0
# Prior −log-likelihood of a change of speed, and also of an outlier.
_RARE = 8.0
# A difference of two terms that is below this fraction of the terms counts as a rounding error.
_ROUND = 1e-10
# Residuals of rows are clipped to this value when cost functions are compared.
_CAP = 0.3
# Smaller residuals count as this value when fits are compared.
LEAST_RESIDUAL = 0.003
# When cost functions are compared, the residuals of this many first rows of each rank are ignored.
_IGNORED_ROWS = 8

# Indices into the array of a fit, which `_fit_rows` describes.
_ROWS, _BETA, _USUAL = 9, 10, 13


@compiled
def fit_ranks(
    load: Floats,
    samples: Ints,
    compute_s: Floats,
    window: int,
    share: float,
    noise: Floats,
    fits: Floats,
    losses: Floats,
) -> None:
    """Fit each rank's newest `window` rows; write the results into `fits` and `losses`.

    `load`, `samples` and `compute_s` are the effective load, the number of samples and the time of
    each rank in each step, [S, W]. `linear._fit` describes the columns of `fits` and `losses`, [W,
    3] each. `noise` is a lower bound of the standard deviation of each rank's noise, [W].
    """
    steps, world = load.shape
    rows, now, before, trial = np.zeros((window, 3)), np.zeros(16), np.zeros(16), np.zeros(16)
    for rank in range(world):
        step, first, mean_u, mean_v = steps, window, 0.0, 0.0
        while step > 0 and first > 0:
            step -= 1
            u, v, time_s = load[step, rank], float(samples[step, rank]), compute_s[step, rank]
            if v > 0 and min(u, time_s) > LEAST_USABLE:
                first -= 1
                rows[first, 0], rows[first, 1], rows[first, 2] = u, v, time_s
                mean_u += (u - mean_u) / (window - first)
                mean_v += (v - mean_v) / (window - first)
        if first == window:
            continue
        for k in range(first, window):
            rows[k, 0] /= mean_u
            rows[k, 1] /= mean_v
        losses[rank, 0], losses[rank, 1], losses[rank, 2] = _fit_rows(
            rows[first:], share, noise[rank], now, before, trial
        )
        a, c, b = now[_BETA], now[_BETA + 1], now[_BETA + 2]
        losses[rank, 2] += 0.5 * (c * c + b * b) / _square(a + c + b) / _square(share)
        fits[rank, 0], fits[rank, 1], fits[rank, 2] = a / mean_u, c / mean_v, b


@compiled
def _fit_rows(
    rows: Floats, share: float, noise: float, now: Floats, before: Floats, trial: Floats
) -> tuple[float, int, float]:
    """Fit the F rows of one rank, [F, 3]; return a score of how well each row was forecast.

    A row is (u, v, time_s): u is the step's effective load ÷ the rank's mean load, and v its number
    of samples ÷ the mean number. The score is the loss (a sum of squared residuals), the number of
    scored rows, and the sum of ½ log(1 + `_unsure`) over these rows.

    The fit is written to `now`; `before` holds the fit before the last change of speed, and `trial`
    is a buffer for `_reshaped`. A fit is an array of 16 numbers. The first 9 are the normal
    equations. Then come the rows' Σ (time / about_s)² at `_ROWS` (see `_learn`), the coefficients
    (a, c, b) of u, v and 1 at `_BETA`, and the prior's values of a, c and b at `_USUAL`. `noise` is
    a lower bound of the noise's standard deviation.

    Several filters of the residuals (`_GAINS`) follow a drifting speed. The mean of their forecasts
    is weighted by the likelihood of their errors so far. Each row is added to the fit as if it had
    been measured at the speed from which the drift began.
    """
    for fit in (now, before, trial):
        fit.fill(0.0)
    now[_BETA] = rows[0, 2] / rows[0, 0]
    squares, seen, drift, held, held_off = 0.0, 0, 0.0, -1, 0.0
    loss, judged, widths = 0.0, 0, 0.0
    filters = np.zeros((len(_GAINS), 3))
    for k in range(len(rows)):
        least = noise * noise
        variance = max((_PRIOR_NOISE**2 * _BELIEF + squares) / (_BELIEF + seen), least)
        rows[k, 2] *= math.exp(-drift)
        off = _off(now, rows[k])
        if seen >= _IGNORED_ROWS:
            # Variance of the noise, without the prior that `variance` includes.
            counted = max(squares / seen, least, LEAST_RESIDUAL**2)
            wider = 1 + _unsure(now, rows[k], counted, share)
            loss += min(off * off, _CAP**2) / wider
            widths += 0.5 * math.log(wider)
            judged += 1
        if abs(off) <= max(_CHANGED, _CHANGE_DEVIATIONS * math.sqrt(variance)):
            squares += off * off
            later = _follow(filters, off + drift, variance, seen)
            rows[k, 2] *= math.exp(drift - later)
            drift = later
            _learn(now, rows[k], rows[k, 2] if seen == 0 else _forecast(now, rows[k]))
            _solve(now, variance, share)
        # A rank's first step is often slow, so the fit starts again with the second row if this row
        # differs from its forecast.
        else:
            changed = seen == 1 or (held == k - 1 and off * held_off > 0)
            if _reshaped(rows, held, k, changed, variance, share, now, before, trial):
                _copy(trial, now)
                squares += _square(_off(now, rows[k]))
            elif changed:
                _copy(now, before)
                _multiply(now[_BETA:_USUAL], math.exp(off + drift))
                rows[k, 2] *= math.exp(drift)
                now[:_BETA].fill(0.0)
                _copy(now[_BETA:_USUAL], now[_USUAL:])
                _learn(now, rows[k], rows[k, 2])
                _solve(now, variance, share)
                filters[:, :2] = 0.0
                drift = 0.0
            else:
                held, held_off = k, off
                continue
            held = -1
        seen += 1
    _multiply(now[_BETA:_USUAL], math.exp(drift))
    return loss, judged, widths


@compiled
def _follow(filters: Floats, off: float, variance: float, seen: int) -> float:
    """Update the filters with a residual; return their forecast of the next residual.

    `filters` holds level, slope and sum of squared errors of each filter, [filters, 3], and is
    changed in place. `off` is the residual, from which no drift has been subtracted. An error is
    clipped to `_CHANGE_DEVIATIONS` times the noise's standard deviation, √`variance`. `seen` is the
    number of earlier residuals.
    """
    least = math.inf
    for k in range(len(filters)):
        level, slope, errors = filters[k]
        error = off - level - slope
        errors = _FORGETS * errors + min(error * error, _CHANGE_DEVIATIONS**2 * variance)
        level += slope + _GAINS[k, 0] * error
        slope += _GAINS[k, 1] * error
        filters[k, 0], filters[k, 1], filters[k, 2] = level, slope, errors
        least = min(least, errors)
    count = (1 - _power(_FORGETS, seen + 1)) / (1 - _FORGETS)
    noise = max((least + _NOISE_ROWS * _LITTLE**2) / (count + _NOISE_ROWS), _LITTLE**2)
    total, mean = 0.0, 0.0
    for k in range(len(filters)):
        weight = math.exp((least - filters[k, 2]) / (2 * noise))
        if k == 0:
            weight *= _STAYS
        total += weight
        mean += weight * (filters[k, 0] + filters[k, 1])
    return mean / total


@compiled
def _reshaped(
    rows: Floats,
    held: int,
    at: int,
    changed: bool,
    variance: float,
    share: float,
    now: Floats,
    before: Floats,
    trial: Floats,
) -> bool:
    """Return True if other coefficients explain a surprising row better than a new speed does.

    A surprising row is a row whose time differs much from its forecast. Rows with a new load also
    have large residuals, because they show how large b is. Therefore the function tests two
    hypotheses. First: all rows, before and after the last change of speed, have one speed after
    all. Second: the rows since the last change of speed, and the surprising rows `held` and `at`,
    have one speed. The result is True if the rows are more likely under one of these hypotheses
    than with a change of speed or outliers; the fit is then in `trial`.

    `at` is the index of the surprising row in `rows`, and `held` the index of an earlier surprising
    row, or -1 if there is none. `changed` is true if the two rows look like a change of speed. For
    the other arguments see `_fit_rows`.
    """
    likely = _unlikely(now, variance, share)
    if before[_ROWS] > 0:
        _copy(before, trial)
        for k in range(_BETA):
            trial[k] += now[k]
        _learn(trial, rows[at], rows[at, 2])
        _solve(trial, variance, share)
        if (
            _unlikely(trial, variance, share)
            < _unlikely(before, variance, share) + likely + 2 * _RARE
        ):
            before.fill(0.0)
            return True
    if held < 0:
        return False
    odd = _RARE
    if changed:
        odd = min(odd, 0.5 * _square(_off(now, rows[held]) - _off(now, rows[at])) / variance)
    _copy(now, trial)
    _learn(trial, rows[held], rows[held, 2])
    _learn(trial, rows[at], rows[at, 2])
    _solve(trial, variance, share)
    return _unlikely(trial, variance, share) < likely + _RARE + odd


@compiled
def _unlikely(fit: Floats, variance: float, share: float) -> float:
    """Return the −log-likelihood of a fit's rows, plus the −log-likelihood of its c and b.

    The likelihood of c and b is their probability density under the prior.
    """
    a, c, b = fit[_BETA], fit[_BETA + 1], fit[_BETA + 2]
    rest = a * (a * fit[0] + 2 * (c * fit[1] + b * fit[2] - fit[6])) + fit[_ROWS]
    rest += c * (c * fit[3] + 2 * (b * fit[4] - fit[7])) + b * (b * fit[5] - 2 * fit[8])
    drawn = _square(c - fit[_USUAL + 1]) + _square(b - fit[_USUAL + 2])
    drawn /= _square(a + c + b)
    unlikely: float = 0.5 * (max(rest, 0.0) / variance + drawn / _square(share))
    return unlikely


# Python's `**` may round otherwise than compiled code, and plans must not depend on which one runs.
@compiled
def _square(value: float) -> float:
    return value * value


@compiled
def _power(base: float, exponent: int) -> float:
    power = 1.0
    while exponent:
        if exponent & 1:
            power *= base
        exponent >>= 1
        base *= base
    return power


@compiled
def _off(fit: Floats, row: Floats) -> float:
    return math.log(row[2] / _forecast(fit, row))


@compiled
def _unsure(fit: Floats, row: Floats, variance: float, share: float) -> float:
    """Return the variance of a row's forecast that is due to a, c and b, ÷ the noise's `variance`.

    The result is large, for example, for a small last step of an epoch: its time depends mostly on
    c and b, which steps of equal load do not determine.

    Let x be (u, v, 1) of the row ÷ its forecast time, and A the matrix of the normal equations. The
    result is x'(A + ridge)⁻¹x, where `_ridge` returns the ridge.
    """
    forecast = _forecast(fit, row)
    x, y, z = row[0] / forecast, row[1] / forecast, 1 / forecast
    aa, ac, ab = fit[0], fit[1], fit[2]
    if aa <= 0:
        return 0.0
    ridge = _ridge(fit, variance, share)
    cc, cb, bb = fit[3] + ridge, fit[4] - ac * ab / aa, fit[5] + ridge
    # Where rows do not determine c or b, the differences may round to 0.
    cc, bb = max(cc - ac * ac / aa, _ROUND * cc), max(bb - ab * ab / aa, _ROUND * bb)
    det = max(cc * bb - cb * cb, _ROUND * cc * bb)
    y, z = y - ac * x / aa, z - ab * x / aa
    unsure: float = x * x / aa + (y * y * bb - 2 * y * z * cb + z * z * cc) / det
    return unsure


@compiled
def _ridge(fit: Floats, variance: float, share: float) -> float:
    """Return the term that the prior adds to the diagonal elements of c and of b."""
    total = fit[_BETA] + fit[_BETA + 1] + fit[_BETA + 2]
    ridge: float = variance / _square(share) / _square(total)
    return ridge


@compiled
def _forecast(fit: Floats, row: Floats) -> float:
    forecast: float = fit[_BETA] * row[0] + fit[_BETA + 1] * row[1] + fit[_BETA + 2]
    return forecast


@compiled
def _learn(fit: Floats, row: Floats, about_s: float) -> None:
    """Add a row to the normal equations of a fit, which minimises Σ ((forecast − time) / about_s)².

    The first numbers of the array `fit` are the elements aa, ac, ab, cc, cb and bb of the symmetric
    matrix, then a, c and b of the right side, and Σ (time / about_s)². `about_s` is the expected
    time of the row, to which noise is proportional. If errors were divided by the measured time
    instead, rows that were fast by chance would have the largest weight.
    """
    x, y, z, time = row[0] / about_s, row[1] / about_s, 1 / about_s, row[2] / about_s
    fit[0] += x * x
    fit[1] += x * y
    fit[2] += x * z
    fit[3] += y * y
    fit[4] += y * z
    fit[5] += z * z
    fit[6] += x * time
    fit[7] += y * time
    fit[8] += z * time
    fit[_ROWS] += time * time


@compiled
def _multiply(values: Floats, factor: float) -> None:
    for k in range(len(values)):
        values[k] *= factor


@compiled
def _copy(source: Floats, target: Floats) -> None:
    for k in range(len(target)):
        target[k] = source[k]


@compiled
def _solve(fit: Floats, variance: float, share: float) -> None:
    """Solve a fit's normal equations for a > 0, c ≥ 0 and b ≥ 0; store the solution in `fit`.

    A ridge penalty keeps c and b near the prior's values, which `fit` has at `_USUAL`.
    """
    aa, ac, ab = fit[0], fit[1], fit[2]
    # The sums are too small for a float, so keep the previous fit.
    if aa <= 0:
        return
    ridge = _ridge(fit, variance, share)
    cc, cb, bb = fit[3] + ridge, fit[4], fit[5] + ridge
    hc, hb = fit[7] + ridge * fit[_USUAL + 1], fit[8] + ridge * fit[_USUAL + 2]
    c, b = _edged(
        cc,
        cb - ac * ab / aa,
        bb,
        ac * ac / aa,
        ab * ab / aa,
        hc - ac * fit[6] / aa,
        hb - ab * fit[6] / aa,
    )
    a = (fit[6] - ac * c - ab * b) / aa
    # Sizes hardly affect the time, so set a to a small fraction of c + b.
    if a <= _LEAST_RATIO * (c + b):
        c, b = _edged(cc, cb, bb, 0.0, 0.0, hc, hb)
        a = _LEAST_RATIO * (c + b) if c + b > 0 else fit[6] / aa
    fit[_BETA], fit[_BETA + 1], fit[_BETA + 2] = a, c, b


@compiled
def _edged(
    cc: float, cb: float, bb: float, less_c: float, less_b: float, hc: float, hb: float
) -> tuple[float, float]:
    """Solve two normal equations for c ≥ 0 and b ≥ 0; return c and b.

    The matrix has cc − `less_c` and bb − `less_b` on its diagonal, and cb off it; the right side is
    `hc` and `hb`. The result is (0, 0) if the equations do not determine c and b.
    """
    left_c, left_b = cc - less_c, bb - less_b
    det = left_c * left_b - cb * cb
    if left_c <= _ROUND * cc or left_b <= _ROUND * bb or det <= _ROUND * left_c * left_b:
        return 0.0, 0.0
    c, b = (hc * left_b - hb * cb) / det, (hb * left_c - hc * cb) / det
    # One of the two would be negative, so use the better of the edges c = 0 and b = 0.
    if c < 0 or b < 0:
        c, b = max(hc / left_c, 0.0), max(hb / left_b, 0.0)
        if hc * c > hb * b:
            return c, 0.0
        return 0.0, b
    return c, b
