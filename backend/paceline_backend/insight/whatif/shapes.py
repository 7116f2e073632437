"""Fit of the costs per sample and per step, with their uncertainty, to the steps of all ranks.

A predictor learns the speed and the costs of each rank from this rank's steps alone. That is
accurate enough for plans, which are renewed every few steps. A forecast needs the time of batches
unlike those that were trained. All ranks run the same script, so their steps together show the cost
of a sample and of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from paceline.policies import Models
from paceline.policies.base import Floats
from paceline_backend.insight.whatif.measured import MeasuredSteps
from paceline_backend.insight.whatif.thresholds import THRESHOLDS

# σ of a normal distribution ÷ its median absolute deviation.
_SIGMA = 1.4826

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Shape:
    """Model of a rank's computing time in a step: a · (Λ' + sample · n + scaled) + fixed seconds.

    Λ' is the effective load of the rank's batch, n the batch's number of samples, and a the rank's
    time per unit of load. `sample`, `scaled` and `fixed` are the same for all ranks.

    Attributes:
        own: models that were fitted rank by rank. They are used if `axes` is empty, and for ranks
            without measured steps.
        measured: the measured steps to which the shape was fitted.
        at: (sample, scaled, fixed) of the best fit. One of `scaled` and `fixed` is 0: the cost per
            step is either larger on a slow rank (`scaled`), or the same for all ranks (`fixed`).
        axes: directions of uncertainty of `at`; the length of each is one standard deviation. Empty
            if the shape explains the steps clearly worse than `own` does.
        faster: divisor of each rank's time, to simulate a node without slowness.
    """

    own: Models
    measured: MeasuredSteps
    at: Floats
    axes: tuple[Floats, ...] = ()
    faster: Floats | float = 1.0

    def models(self, replicate: int = 0) -> Models:
        """Return the models for one simulation: one of the points of an unscented transform.

        `replicate` 0 is the best fit. 1 and 2 are the best fit moved along the first axis, in
        positive and negative direction; 3 and 4 along the second axis, and so on.
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
    """Fit the costs per sample and per step that all ranks share; return them as a `Shape`.

    The shape is one formula for the computing time of a batch on any rank, from the batch's
    effective load and number of samples. In the formula, ranks differ only in speed. The fit
    minimises the errors over the steps of all ranks, or of `shape_ranks` ranks if there are more.

    `models` were fitted rank by rank. They define the effective load of a batch. `measured` must
    contain only steps in which no rank's speed changed.
    """
    known = measured.single
    ranks = np.flatnonzero(known.any(axis=0))
    ranks = ranks[np.unique(np.linspace(0, len(ranks) - 1, THRESHOLDS.shape_ranks).astype(int))]
    load = models.cost.load(measured.features)[:, ranks]
    samples = measured.features.samples[:, ranks].astype(float)
    compute_s = measured.compute_s[:, ranks]
    known = known[:, ranks] & (load > 0) & (compute_s > 0)
    typical = float(np.mean(load[known]))
    per = np.array([typical / float(np.mean(samples[known])), typical, 0.0])
    second = float(np.median(compute_s[known]))
    by_rank = np.log(_ratio(models.ett(measured.features)[:, ranks], compute_s))
    own_noise = noise = max(_spread(by_rank, known), THRESHOLDS.least_noise)

    def residuals(share: Floats, same: bool) -> Floats:
        """Return each record's clipped error ÷ its σ, followed by `share` ÷ the prior's σ."""
        off = _off(_at(share, per, second, same), load, samples, compute_s, known)[known]
        wild = THRESHOLDS.clipped_sigmas
        return np.concatenate([np.clip(off / noise, -wild, wild), share / THRESHOLDS.shape_prior])

    share = np.array([0.05, 0.05])
    # The first fit provides the noise for the second fit.
    for _ in range(2):
        fits = [
            least_squares(residuals, share, bounds=(0.0, 0.95), args=(same,))
            for same in (False, True)
        ]
        same = fits[1].cost < fits[0].cost
        best = fits[int(same)]
        at = _at(best.x, per, second, same)
        noise = max(
            _spread(_off(at, load, samples, compute_s, known), known), THRESHOLDS.least_noise
        )
        share = np.clip(best.x, 0.01, 0.9)
    if noise > THRESHOLDS.worse_shape * own_noise:
        return Shape(models, measured, at)
    slopes = np.asarray(best.jac)
    values, vectors = np.linalg.eigh(np.linalg.inv(slopes.T @ slopes))
    axes = [
        _at(vector, per, second, same) * np.sqrt(value)
        for value, vector in sorted(zip(values, vectors.T, strict=True), key=lambda pair: -pair[0])
    ]
    return Shape(models, measured, at, tuple(axes))


def _within(at: Floats, step: Floats) -> Floats:
    """Return `at` + `step`; `step` is shortened if a cost would fall below 0.

    If all batches have equally many samples, only the sum of the costs per sample and per step is
    known: if one is higher, the other is lower. Clipping one of the costs at 0 would change the
    sum. If -`step` needs less shortening than `step`, it is added instead. The two points of an
    axis (see `Shape.models`) are then the same point.
    """
    forwards, backwards = _room(at, step), _room(at, -step)
    by = -backwards if backwards > forwards else forwards
    return np.asarray(np.maximum(at + by * step, 0.0))


def _room(at: Floats, step: Floats) -> float:
    """Return the fraction of `step`, up to 1, that can be added without a cost below 0."""
    falls = step < 0
    return float(np.min(at[falls] / -step[falls], initial=1.0))


def _at(share: Floats, per: Floats, second: float, same: bool) -> Floats:
    """Return (sample, scaled, fixed), given the costs as fractions of a typical step.

    `share` holds the cost per sample and the cost per step as fractions of the typical step's time.
    `per` holds the typical step's load per sample and its load, and `second` is its time in
    seconds. If `same` is true, the cost per step is the same for all ranks (`fixed`).
    """
    sample, step = share
    return np.array([sample * per[0], 0.0 if same else step * per[1], step * second * same])


def _off(at: Floats, load: Floats, samples: Floats, compute_s: Floats, known: Bools) -> Floats:
    """Return log(measured ÷ modelled time) of each step, at the rank's median speed, [S, W]."""
    sample, scaled, fixed = at
    units = np.where(known, load + sample * samples + scaled, 1.0)
    a = np.where(known, np.maximum(compute_s - fixed, 1e-3 * compute_s) / units, np.nan)
    speeds = np.nanmedian(a, axis=0) if known.any() else np.ones(load.shape[1])
    expected = np.where(known, speeds * units + fixed, 1.0)
    return np.asarray(np.log(np.where(known, compute_s, 1.0) / expected))


def _models(own: Models, measured: MeasuredSteps, at: Floats) -> Models:
    """Return models with the costs `at`, and each rank's speed at these costs.

    A rank without measured steps keeps its model of `own`.
    """
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
    off = np.where(known, off, np.nan)
    return float(_SIGMA * np.nanmedian(np.abs(off - np.nanmedian(off, axis=0))))
