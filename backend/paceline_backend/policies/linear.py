"""Predictors linear in load: what a step costs each worker, learned from its last steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from scipy.optimize import nnls
from sklearn.linear_model import LinearRegression

from paceline_backend.policies._base import Feedback, Floats, Models

WINDOW: Mapping[str, Any] = {
    "type": "integer",
    "minimum": 4,
    "maximum": 64,
    "default": 64,
    "description": "Steps of feedback that the predictor looks at.",
}

_CHANGED = 0.15  # two steps in a row off by more: the speed has changed
_LEVEL = 7  # steps whose median is the usual rate, and corrects a slow drift
_FEW = 4  # rows below which no regression is tried
_LEAST = 1e-3  # share of the time that load must explain
_PRIOR = 0.12  # square root of the ridge on c and b, as shares of the step's time


@dataclass(frozen=True)
class LinearPredictor:
    """CHRONICA's runtime prophet (Alg. 1), per step: T = a·Λ + c·n + b, a > 0, c ≥ 0, b ≥ 0.

    b is a cost per step, so it is added once, not per sample as in the paper, and c is the cost of
    a sample whatever its size. Least squares of relative errors over the steps since the speed last
    changed: that two steps in a row are off by more than 15 % in the same direction is such a
    change, so it is noticed at the second. Single rows far off are left out. A weak prior says
    c = b = 0, so that feedback that cannot tell c from b (constant n, as under `bsp`) or a from b
    (loads too alike) gives a sensible forecast for any other n and Λ.

    Args:
        window: steps to look at.
    """

    window: int = 64

    def fit(self, feedback: Feedback, world: int) -> Models:
        """See `Predictor.fit`. Known as soon as each rank has one usable row."""
        fits = []
        for rank in range(world):
            rows = feedback.of(rank)
            if not len(rows):
                return Models.unknown(world)
            recent = slice(-self.window, None)
            fits.append(
                _fit_rank(
                    rows.load[recent],
                    rows.samples[recent].astype(np.float64),
                    rows.compute_s[recent],
                )
            )
        a, c, b = np.array(fits).T
        return Models(a, c, b)


def _fit_rank(load: Floats, samples: Floats, compute_s: Floats) -> Floats:
    """(a, c, b) of one worker from F ≥ 1 rows, oldest first."""
    start = 0
    for row in _suspects(compute_s / load):
        before, after = slice(start, row), slice(row, row + 2)
        if row > start:
            fit = _regress(load[before], samples[before], compute_s[before])
            if _same_side(compute_s[after] / _forecast(fit, load[after], samples[after])):
                start = row
    load, samples, compute_s = load[start:], samples[start:], compute_s[start:]
    fit = _regress(load, samples, compute_s)
    ratio = compute_s / _forecast(fit, load, samples)
    return fit * float(np.median(ratio[-_LEVEL:]))


def _suspects(rate: Floats) -> list[int]:
    """Rows from which on the speed may be another: it and the next have another rate than before.

    Only a hint: with a cost per step, T/Λ depends on Λ too.
    """
    if len(rate) < 3:
        return []
    padded = np.concatenate([np.full(_LEVEL - 1, rate[0]), rate])
    usual = np.median(sliding_window_view(padded, _LEVEL), axis=1)  # of the rows up to each
    pairs = np.stack([rate[1:-1], rate[2:]], 1) / usual[:-2, None]
    return [row + 1 for row in range(len(pairs)) if _same_side(pairs[row])]


def _same_side(ratios: Floats) -> bool:
    """Whether all are off by so much, in the same direction, that it is no accident."""
    return bool((ratios > 1 + _CHANGED).all() or (ratios < 1 / (1 + _CHANGED)).all())


def _forecast(fit: Floats, load: Floats, samples: Floats) -> Floats:
    forecast: Floats = fit[0] * load + fit[1] * samples + fit[2]
    return forecast


def _regress(load: Floats, samples: Floats, compute_s: Floats) -> Floats:
    """Non-negative (a, c, b), outliers left out; T/Λ alone if rows are few or loads alike.

    Columns are scaled such that the coefficients are shares of a typical step's time, and rows such
    that errors are relative.
    """
    rate = float(np.median(compute_s / load))
    proportional = np.array([rate, 0.0, 0.0])
    if len(load) < _FEW or np.ptp(load) == 0:
        return proportional
    scale = np.array([load.mean(), samples.mean(), 1.0])
    design = np.stack([load, samples, np.ones_like(load)], 1) / scale
    weight = load.mean() / load
    target = compute_s / (rate * load.mean())
    prior = np.array([[0.0, _PRIOR, 0.0], [0.0, 0.0, _PRIOR]])

    def solve(keep: npt.NDArray[np.bool_]) -> Floats:
        rows = np.vstack([(design * weight[:, None])[keep], prior])
        return np.asarray(nnls(rows, np.append((target * weight)[keep], [0.0, 0.0]))[0])

    shares = solve(np.ones(len(load), bool))
    error = np.abs(design @ shares / target - 1)
    keep = error <= max(4 * float(np.median(error)), 0.02)
    if not keep.all():
        shares = solve(keep)
    if shares[0] <= _LEAST:
        return proportional
    fit: Floats = shares * rate * load.mean() / scale
    return fit


@dataclass(frozen=True)
class PerSamplePredictor:
    """CHRONICA's runtime prophet as printed (Alg. 1): OLS of T on Λ, ETT(sample) = a·λ + b.

    Its sum over a batch counts b once per sample; `Models.c` therefore holds the paper's b.

    Args:
        window: steps to look at.
    """

    window: int = 64

    def fit(self, feedback: Feedback, world: int) -> Models:
        """See `Predictor.fit`. With fewer than two distinct Λ, a is the mean of T/Λ and b is 0."""
        fits = []
        for rank in range(world):
            rows = feedback.of(rank)
            if not len(rows):
                return Models.unknown(world)
            load, compute_s = rows.load[-self.window :], rows.compute_s[-self.window :]
            ratio = float(compute_s.mean() / load.mean())
            if len(np.unique(load)) < 2:
                fits.append((ratio, 0.0))
                continue
            line = LinearRegression().fit(load[:, None], compute_s)
            if line.coef_[0] > 0:
                fits.append((float(line.coef_[0]), float(line.intercept_)))
            else:
                fits.append((ratio, 0.0))
        a, c = np.array(fits).T
        return Models(a, c, np.zeros(world))
