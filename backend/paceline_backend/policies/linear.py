"""Predictors linear in load: what a step costs each worker, learned from its last steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
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

_RECENT = 3  # steps that show a change of speed: their median outvotes one outlier
_LEVEL = 7  # steps whose median corrects a slow drift
_CHANGED = 0.10  # a fit that misses the recent steps by more is of another time
_PRIOR = 0.07  # square root of the ridge on c and b, whose scale is the share of the step's time


@dataclass(frozen=True)
class LinearPredictor:
    """CHRONICA's runtime prophet (Alg. 1), per step: T = a·Λ + c·n + b, a > 0, c ≥ 0, b ≥ 0.

    b is a cost per step, so it is added once, not per sample as in the paper, and c is the cost of
    a sample whatever its size. Least squares of relative errors over the longest window that still
    explains the last three steps: after a change of speed older steps are forgotten within two.
    Rows far off the fit are left out. A weak prior says c = b = 0, so that feedback that cannot
    tell c from b (constant n, as under `bsp`) or a from b (loads too alike) gives a sensible
    forecast for any other n and Λ.

    Args:
        window: steps to look at.
    """

    window: int = 64

    def fit(self, feedback: Feedback, world: int) -> Models:
        """See `Predictor.fit`. Known as soon as each rank has one row."""
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
    compute_s = np.maximum(compute_s, 1e-9)
    load = np.maximum(load, 1e-12)  # samples of size 0 have no rate
    recent = slice(-_RECENT, None)
    rows = len(load)
    while rows > _RECENT:
        last = slice(-rows, None)
        fit = _regress(load[last], samples[last], compute_s[last])
        if fit is not None:
            ratio = compute_s / (np.stack([load, samples, np.ones_like(load)], 1) @ fit)
            if abs(np.median(ratio[recent]) - 1) <= _CHANGED:
                return fit * float(np.median(ratio[-min(rows, _LEVEL) :]))
        rows //= 2
    return np.array([np.median(compute_s[recent] / load[recent]), 0.0, 0.0])


def _regress(load: Floats, samples: Floats, compute_s: Floats) -> Floats | None:
    """Non-negative (a, c, b) with outliers left out; None when load explains nothing of the time.

    Columns are scaled such that the coefficients are shares of a typical step's time, and rows such
    that errors are relative.
    """
    if np.ptp(load) == 0:
        return None
    scale = np.array([load.mean(), samples.mean(), 1.0])
    rate = np.median(compute_s / load)
    design = np.stack([load, samples, np.ones_like(load)], 1) / scale
    weight = load.mean() / load
    target = compute_s / (rate * load.mean())
    prior = np.array([[0.0, _PRIOR, 0.0], [0.0, 0.0, _PRIOR]])

    def solve(keep: np.ndarray[Any, np.dtype[np.bool_]]) -> Floats:
        rows = np.vstack([(design * weight[:, None])[keep], prior])
        return np.asarray(nnls(rows, np.append((target * weight)[keep], [0.0, 0.0]))[0])

    shares = solve(np.ones(len(load), bool))
    error = np.abs(design @ shares / target - 1)
    keep = error <= max(4 * float(np.median(error)), 0.02)
    if not keep.all():
        shares = solve(keep)
    if shares[0] <= 1e-3:
        return None
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
            ratio = float(compute_s.mean() / max(load.mean(), 1e-12))
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
