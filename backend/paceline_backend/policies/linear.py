"""Predictors linear in load: what a step costs each worker, learned from its last steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from sklearn.linear_model import LinearRegression

from paceline.cost import SUM, Cost
from paceline_backend.policies._base import Feedback, Floats, Ints, Models, usable
from paceline_backend.policies._jit import compiled

WINDOW: Mapping[str, Any] = {
    "type": "integer",
    "minimum": 4,
    "maximum": 64,
    "default": 64,
    "description": "Steps of feedback that the predictor looks at.",
}
COST: Mapping[str, Any] = {
    "type": "string",
    "enum": ["auto", "sum", "padded"],
    "default": "auto",
    "description": "What a batch's time is linear in: the sum of its sizes, its padded size "
    "(samples times the longest), or whichever of these, quadratic in length or not, fits best.",
}

# Residuals are logarithms of a step's time over its forecast.
_CHANGED = math.log(1.15)  # two steps in a row off by more, to the same side: another speed
_WILD = 3.0  # but not while so many standard deviations of the noise are more than that
_NOISE, _BELIEF = 0.05, 4.0  # the standard deviation at first, believed like so many rows
_SHARE = 0.25  # how much of a step's time may well be c·n, and b: the prior's standard deviation
_LEAST = 1e-3  # share of the time that load must explain
_FAST = 0.2  # weight of the newest in the mean of residuals, which tells a drift,
_DRIFT = 2.0  # and of its standard deviations: from so many on
_ROUND = 1e-10  # relative to the terms of a difference: less is rounding
_CAP = 0.3  # residual that a row counts with at most when costs are compared,
_BLIND = 8  # a rank's first rows not at all: what they are off tells little of the cost

_RANKS = 16  # whose rows decide what a batch costs: the same model on all
_CURVES = 2.0 ** np.arange(-3, 7)  # κ to try, over one by the typical long size
_FINER = (2.0 ** (0.5 ** np.arange(1, 6))).tolist()  # and then around the best of them
_MARGIN = 12.0  # what a cost other than the sum must gain in log-likelihood, and κ as much again
_EXACT = 0.003  # residuals so small tell nothing


@dataclass(frozen=True)
class LinearPredictor:
    """CHRONICA's runtime prophet (Alg. 1), per step: T = a·Λ' + c·n + b, a > 0, c ≥ 0, b ≥ 0.

    b is a cost per step, so it is added once, not per sample as in the paper, and c is the cost of
    a sample whatever its size. Relative least squares, row by row, oldest first. A row that is off
    its forecast by more than 15 % is kept out; when the next one is off to the same side, the
    rank's speed has changed: all three costs by the same factor, which the newest row tells. Slower
    changes are followed once they stand out from the noise. A weak prior says c = b = 0, so that
    feedback that cannot tell c from b (constant n, as under `bsp`) or a from b (loads too alike)
    gives a sensible forecast for any other n and Λ'.

    Args:
        window: steps to look at, of those in which a rank had samples.
        cost: "sum", Λ' = Λ; "padded", Λ' = n · max λ; "auto": one of these, plain or quadratic in
            length, whichever forecasts all ranks' steps best; the sum unless the others are clearly
            better.
    """

    window: int = 64
    cost: str = "sum"

    def fit(self, feedback: Feedback, world: int) -> Models:
        """See `Predictor.fit`. Known as soon as each rank has one usable row."""
        rows = feedback.by_step(world)
        cost = Cost(padded=True) if self.cost == "padded" else SUM
        if self.cost == "auto":
            cost = _choose(rows, self.window)
        fits, _ = _fit(rows, cost, self.window)
        if not len(rows) or (fits[:, 0] <= 0).any():
            return Models.unknown(world)
        a, c, b = fits.T.copy()
        return Models(a, c, b, cost=cost)


def _fit(rows: Feedback, cost: Cost, window: int) -> tuple[Floats, Floats]:
    """(a, c, b) of each rank, a = 0 where there is no row; its loss, rows, and unlikeliness."""
    world = rows.load.shape[1]
    fits, losses = np.zeros((world, 3)), np.zeros((world, 3))
    load = np.ascontiguousarray(cost.load(rows.features), np.float64)
    samples, compute_s = np.ascontiguousarray(rows.samples), np.ascontiguousarray(rows.compute_s)
    _fit_ranks(load, samples, compute_s, window, fits, losses)
    return fits, losses


def _choose(rows: Feedback, window: int) -> Cost:
    """What a batch costs: how well would each cost have forecast the steps so far?"""
    some = np.unique(np.linspace(0, rows.load.shape[1] - 1, _RANKS).astype(np.int64))
    rows = Feedback(*(getattr(rows, field.name)[:, some] for field in fields(rows)))
    told = usable(rows.samples, rows.load, rows.compute_s)
    if not told.any() or (rows.longest[told] <= 0).any():  # recorded before longest and squares
        return SUM
    typical = float(rows.squares[told].sum() / rows.load[told].sum())
    expected = _grouped(rows.samples[told], rows.load[told], rows.squares[told])

    def score(cost: Cost) -> float:
        loss, count, unlikely = _fit(rows, cost, window)[1].sum(axis=0)
        score = 0.5 * count * math.log(loss / max(count, 1) + _EXACT**2) + unlikely
        if cost.padded != expected:
            score += _MARGIN
        if cost.kappa > 0:
            score += _MARGIN + 0.5 * math.log(cost.kappa * typical) ** 2
        return float(score)

    costs = [Cost(k, p) for p in (False, True) for k in (0.0, *(_CURVES / typical).tolist())]
    tried = {cost: score(cost) for cost in costs}
    best = min(tried, key=lambda cost: tried[cost])
    for factor in _FINER if best.kappa > 0 else ():
        for kappa in (best.kappa * factor, best.kappa / factor):
            near = Cost(kappa, best.padded)
            tried[near] = score(near)
        best = min(tried, key=lambda cost: tried[cost])
    return best


def _grouped(samples: Ints, load: Floats, squares: Floats) -> bool:
    """Whether samples of a batch are more alike than batches are.

    Then the scheduler has grouped them by size, believing that they are padded, and its batches
    hardly tell any more whether that is so: it is believed until they say otherwise.
    """
    several = samples > 1
    if not several.any():
        return False
    n, mean = samples[several], load[several] / samples[several]
    within = (squares[several] / n - mean**2) * n / (n - 1)
    return bool(mean.var() > within.mean())


@compiled
def _fit_ranks(
    load: Floats, samples: Ints, compute_s: Floats, window: int, fits: Floats, losses: Floats
) -> None:
    """Fits each rank's rows of [S, W] arrays; fills `fits` and `losses`, [W, 3].

    `beta` is (a, c, b) for load and samples over their means: what each costs in a typical step.
    """
    steps, world = load.shape
    g, h, beta, usual = np.zeros(6), np.zeros(3), np.zeros(3), np.zeros(3)
    for rank in range(world):
        first, count, mean_u, mean_v = steps, 0, 0.0, 0.0
        while first > 0 and count < window:
            first -= 1
            if min(load[first, rank], samples[first, rank], compute_s[first, rank]) > 0:
                count += 1
                mean_u += (load[first, rank] - mean_u) / count
                mean_v += (samples[first, rank] - mean_v) / count
        for values in (g, h, beta, usual):
            values.fill(0.0)
        squares, seen, recent, drift, held = 0.0, 0, 0.0, 0.0, 0.0
        loss, judged = 0.0, 0
        for step in range(first, steps):
            if min(load[step, rank], samples[step, rank], compute_s[step, rank]) <= 0:
                continue
            u, v = load[step, rank] / mean_u, samples[step, rank] / mean_v
            time_s = compute_s[step, rank]
            if seen == 0:
                beta[0] = time_s / u
            variance = (_NOISE**2 * _BELIEF + squares) / (_BELIEF + seen)
            off = math.log(time_s / (beta[0] * u + beta[1] * v + beta[2])) - drift
            if seen >= _BLIND:
                loss += min(off * off, _CAP**2)
                judged += 1
            if abs(off) <= max(_CHANGED, _WILD * math.sqrt(variance)):
                squares += off * off
            elif seen == 1 or off * held > 0:  # a first step is often slow: the second is believed
                _multiply(beta, math.exp(off + drift))
                for values in (g, h):
                    values.fill(0.0)
                for k in range(3):
                    usual[k] = beta[k]
                recent, drift = 0.0, 0.0
            else:
                held = off
                continue
            held = 0.0
            seen += 1
            _learn(g, h, u, v, time_s)
            _solve(g, h, variance / _SHARE**2, usual, beta)
            rest = math.log(time_s / (beta[0] * u + beta[1] * v + beta[2]))
            recent += _FAST * (rest - recent)
            drift = _significant(recent, variance)
            if drift != 0:  # what was learned is, little by little, taken to the new speed
                recent -= _FAST * drift
                factor = math.exp(_FAST * drift)
                _multiply(g, 1 / factor**2)
                _multiply(h, 1 / factor)
                _multiply(usual, factor)
                _multiply(beta, factor)
                drift -= _FAST * drift
        if count > 0:
            _multiply(beta, math.exp(drift))
            fits[rank, 0] = beta[0] / mean_u
            fits[rank, 1] = beta[1] / mean_v
            fits[rank, 2] = beta[2]
            losses[rank, 0] = loss
            losses[rank, 1] = judged
            shares = (beta[1] ** 2 + beta[2] ** 2) / (beta[0] + beta[1] + beta[2]) ** 2
            losses[rank, 2] = 0.5 * shares / _SHARE**2


@compiled
def _significant(mean: float, variance: float) -> float:
    """A mean of residuals, shrunk to 0 as far as noise alone explains it (garrote)."""
    noise = _DRIFT**2 * variance * _FAST / (2 - _FAST)
    return mean * (1 - noise / mean**2) if mean**2 > noise else 0.0


@compiled
def _learn(g: Floats, h: Floats, u: float, v: float, time_s: float) -> None:
    """Adds a row to the normal equations of Σ (forecast / time − 1)².

    `g` holds their matrix as aa, ac, ab, cc, cb, bb.
    """
    x, y, z = u / time_s, v / time_s, 1 / time_s
    g[0] += x * x
    g[1] += x * y
    g[2] += x * z
    g[3] += y * y
    g[4] += y * z
    g[5] += z * z
    h[0] += x
    h[1] += y
    h[2] += z


@compiled
def _multiply(values: Floats, factor: float) -> None:
    """In place. Array expressions would take seconds to compile."""
    for k in range(len(values)):
        values[k] *= factor


@compiled
def _solve(g: Floats, h: Floats, ridge: float, usual: Floats, beta: Floats) -> None:
    """The least squares with c, b ≥ 0 and a ridge to the usual ones, as shares of a step's time."""
    aa, ac, ab = g[0], g[1], g[2]
    if aa <= 0:  # too small for a float: what was known will do
        return
    ridge /= (beta[0] + beta[1] + beta[2]) ** 2
    # With a, which is free, eliminated.
    cc, cb, bb = g[3] + ridge, g[4] - ac * ab / aa, g[5] + ridge
    left_c, left_b = cc - ac * ac / aa, bb - ab * ab / aa
    hc = h[1] + ridge * usual[1] - ac * h[0] / aa
    hb = h[2] + ridge * usual[2] - ab * h[0] / aa
    det = left_c * left_b - cb * cb
    c, b = 0.0, 0.0
    if left_c > _ROUND * cc and left_b > _ROUND * bb and det > _ROUND * left_c * left_b:
        c, b = (hc * left_b - hb * cb) / det, (hb * left_c - hc * cb) / det
        if c < 0 or b < 0:  # the better of the two edges
            c, b = max(hc / left_c, 0.0), max(hb / left_b, 0.0)
            if hc * c > hb * b:
                b = 0.0
            else:
                c = 0.0
    a = (h[0] - ac * c - ab * b) / aa
    if a <= _LEAST * (c + b):
        a, c, b = h[0] / aa, 0.0, 0.0
    beta[0], beta[1], beta[2] = a, c, b


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
