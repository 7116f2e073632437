"""What a batch costs beside its load: one shape for all ranks, and what the steps leave open of it.

A predictor follows each rank's speed and learns its costs from this rank alone. That suits plans,
which are made again every few steps. A forecast asks what other batches would take. Ranks run the
same script, so all their steps together tell the cost of a sample and of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from paceline_backend.insight.whatif.measured import MeasuredSteps
from paceline_backend.policies import Models
from paceline_backend.policies.base import Floats

_PRIOR = 0.25  # prior standard deviation of the share that samples or steps have in the time
_RANKS = 64  # most ranks that tell the shape
_EXACT = 0.003  # smaller noise counts like this
_WILD = 4.0  # residuals are cut at so many standard deviations
_SIGMA = 1.4826  # σ ÷ median absolute deviation of a normal distribution
_WORSE = 1.1  # ranks keep their own costs if the shape's errors are larger by more

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Shape:
    """A rank's step takes a · (Λ' + sample · n + scaled) + fixed seconds; a is the rank's own.

    Attributes:
        own: the models, fitted rank by rank; their costs are replaced.
        measured: S steps.
        at: (sample, scaled, fixed) of the best fit. One of the last two is 0: a cost per step is
            larger on a slow rank, or the same for all ranks.
        axes: directions in which they are uncertain, with one standard deviation as length; empty:
            ranks keep their own costs.
        faster: divisor of each rank's time, for what a better node would take.
    """

    own: Models
    measured: MeasuredSteps
    at: Floats
    axes: tuple[Floats, ...] = ()
    faster: Floats | float = 1.0

    def models(self, replicate: int = 0) -> Models:
        """The models of a simulation.

        Args:
            replicate: 0: the best fit; 1 and 2: the first axis, up and down; 3 and 4: the second,
                and so on. These are the points of an unscented transform.
        """
        models = self.own
        if self.axes:
            at = self.at
            if replicate:
                axis = self.axes[(replicate - 1) // 2 % len(self.axes)]
                up = 1.0 if replicate % 2 else -1.0
                at = _within(at, up * np.sqrt(len(self.axes)) * axis)
            models = _models(self.own, self.measured, at)
        by = self.faster
        return replace(models, a=models.a / by, c=models.c / by, b=models.b / by)


def shape(models: Models, measured: MeasuredSteps) -> Shape:
    """The shape that explains all ranks' steps best.

    Args:
        models: fitted rank by rank; they tell which cost a batch has, and serve ranks without
            steps.
        measured: S steps of unchanged speeds.
    """
    known = measured.single
    ranks = np.flatnonzero(known.any(axis=0))
    ranks = ranks[np.unique(np.linspace(0, len(ranks) - 1, _RANKS).astype(int))]
    load = models.cost.load(measured.features)[:, ranks]
    samples = measured.features.samples[:, ranks].astype(float)
    compute_s = measured.compute_s[:, ranks]
    known = known[:, ranks] & (load > 0) & (compute_s > 0)
    typical = float(np.mean(load[known]))
    per = np.array([typical / float(np.mean(samples[known])), typical, 0.0])
    second = float(np.median(compute_s[known]))
    by_rank = np.log(_ratio(models.ett(measured.features)[:, ranks], compute_s))
    own_noise = noise = max(_spread(by_rank, known), _EXACT)

    def residuals(share: Floats, same: bool) -> Floats:
        """Errors ÷ noise, cut, and how unlikely the shares are by the prior."""
        off = _off(_at(share, per, second, same), load, samples, compute_s, known)[known]
        return np.concatenate([np.clip(off / noise, -_WILD, _WILD), share / _PRIOR])

    share = np.array([0.05, 0.05])
    for _ in range(2):  # the first fit tells the noise
        fits = [
            least_squares(residuals, share, bounds=(0.0, 0.95), args=(same,))
            for same in (False, True)
        ]
        same = fits[1].cost < fits[0].cost
        best = fits[int(same)]
        at = _at(best.x, per, second, same)
        noise = max(_spread(_off(at, load, samples, compute_s, known), known), _EXACT)
        share = np.clip(best.x, 0.01, 0.9)
    if noise > _WORSE * own_noise:
        return Shape(models, measured, at)
    slopes = np.asarray(best.jac)
    values, vectors = np.linalg.eigh(np.linalg.inv(slopes.T @ slopes))
    axes = [
        _at(vector, per, second, same) * np.sqrt(value)
        for value, vector in sorted(zip(values, vectors.T, strict=True), key=lambda pair: -pair[0])
    ]
    return Shape(models, measured, at, tuple(axes))


def _within(at: Floats, step: Floats) -> Floats:
    """The point that a step leads to; if a cost would be below 0 there, a part of the step.

    Where samples are equally many in all batches, more for a sample is less for a step, and only
    their sum is known. With one of them cut off at 0, the sum would be another. Where the step
    backwards can be longer, it is taken instead. Then both steps along an axis lead to one point,
    and count as two that are equally far.
    """
    forwards, backwards = _room(at, step), _room(at, -step)
    by = -backwards if backwards > forwards else forwards
    return np.asarray(np.maximum(at + by * step, 0.0))


def _room(at: Floats, step: Floats) -> float:
    """The part of a step, up to 1, that leaves all costs at 0 or above."""
    falls = step < 0
    return float(np.min(at[falls] / -step[falls], initial=1.0))


def _at(share: Floats, per: Floats, second: float, same: bool) -> Floats:
    """(sample, scaled, fixed) of shares in a typical step's load, or time."""
    sample, step = share
    return np.array([sample * per[0], 0.0 if same else step * per[1], step * second * same])


def _off(at: Floats, load: Floats, samples: Floats, compute_s: Floats, known: Bools) -> Floats:
    """Log of each step's time ÷ the shape's, at the rank's median speed, [S, W]."""
    sample, scaled, fixed = at
    units = np.where(known, load + sample * samples + scaled, 1.0)
    a = np.where(known, np.maximum(compute_s - fixed, 1e-3 * compute_s) / units, np.nan)
    speeds = np.nanmedian(a, axis=0) if known.any() else np.ones(load.shape[1])
    expected = np.where(known, speeds * units + fixed, 1.0)
    return np.asarray(np.log(np.where(known, compute_s, 1.0) / expected))


def _models(own: Models, measured: MeasuredSteps, at: Floats) -> Models:
    """Models of this shape, with each rank's speed; ranks without steps keep their own."""
    sample, scaled, fixed = at
    known = measured.single & (measured.compute_s > 0)
    seen = np.asarray(known.any(axis=0))
    units = own.cost.load(measured.features) + sample * measured.features.samples + scaled
    speeds = np.ones(len(seen))
    a = np.maximum(measured.compute_s - fixed, 1e-3 * measured.compute_s)
    a = np.where(known, a / np.where(known, units, 1.0), np.nan)
    speeds[seen] = np.nanmedian(a[:, seen], axis=0)
    return replace(
        own,
        a=np.where(seen, speeds, own.a),
        c=np.where(seen, speeds * sample, own.c),
        b=np.where(seen, speeds * scaled + fixed, own.b),
    )


def _ratio(modelled: Floats, compute_s: Floats) -> Floats:
    return np.asarray(np.maximum(compute_s, 1e-300) / np.maximum(modelled, 1e-300))


def _spread(off: Floats, known: Bools) -> float:
    """Robust standard deviation of the residuals within ranks."""
    off = np.where(known, off, np.nan)
    return float(_SIGMA * np.nanmedian(np.abs(off - np.nanmedian(off, axis=0))))
