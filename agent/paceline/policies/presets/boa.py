"""`boa`: batch sizes that minimise the slowest worker's expected time.

BOA (E. Yang, D.-K. Kang, C.-H. Youn, The Journal of Supercomputing 76, 2020), as described in
CHRONICA (§II, §VI-A): a worker's time is linear in its local batch size, and a min–max integer
program gives the batch sizes of each step. BOA does not use the samples' sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.policies.base import (
    Allocation,
    Feedback,
    Floats,
    Ints,
    KeepPlacement,
    Models,
    Policy,
    Preset,
    Problem,
    usable,
)
from paceline.policies.predict.least_squares import non_negative
from paceline.policies.solve import counts
from paceline.policies.solve.minmax import minmax

# Prior standard deviation of the fraction of a step's time that is independent of n.
_PRIOR_DEVIATION = 0.3
# With at most this number of rows, the noise is estimated from the residuals of T ∝ n, not from the
# residuals of the fitted line.
_FEW_FITTED = 3
# Lower bound of the relative noise of a step's time.
_LEAST_NOISE = 0.01
# `Models.a` ÷ (c + b). Sizes are not used, but `Models.a` must be above 0.
_NO_SIZE = 1e-12


@dataclass(frozen=True)
class BatchSizePredictor:
    """BOA's performance model of a worker, fitted to its last `window` steps.

    The time of n samples of any size is T = c·n + b seconds. The fit is a least squares with c, b ≥
    0. If batch sizes hardly vary, the times cannot determine both c and b. A prior therefore pulls
    b towards 0, the more the noisier the times are.
    """

    window: int = 64

    def fit(self, feedback: Feedback, world: int) -> Models:
        """See `Predictor.fit`."""
        rows = feedback.by_step(world)
        valid = usable(rows.samples, rows.load, rows.compute_s)
        if not valid.any(axis=0).all():
            return Models.unknown(world)
        fits = []
        for rank in range(world):
            recent = np.flatnonzero(valid[:, rank])[-self.window :]
            samples = rows.samples[recent, rank].astype(np.float64)
            fits.append(line(samples, rows.compute_s[recent, rank]))
        c, b = np.array(fits).T
        return Models(_NO_SIZE * (c + b), c, b)


def line(samples: Floats, compute_s: Floats) -> tuple[float, float]:
    """Fit T = c·n + b to the numbers of samples n and the times T of F ≥ 1 steps, [F] each.

    Return c and b; both are at least 0, and one of them is above 0.
    """
    n, t = samples / samples.mean(), compute_s / compute_s.mean()
    rows = np.stack([n, np.ones_like(n)], axis=1)
    noise = (
        non_negative(rows, t)[1] / (len(t) - 2) ** 0.5 if len(t) > _FEW_FITTED else np.std(t - n)
    )
    prior = [0.0, max(noise, _LEAST_NOISE) / _PRIOR_DEVIATION]
    slope, start = non_negative(np.vstack([rows, prior]), np.append(t, 0.0))[0]
    return float(slope * compute_s.mean() / samples.mean()), float(start * compute_s.mean())


@dataclass(frozen=True)
class MinMaxAllocator:
    """BOA's integer program, which chooses each worker's number of samples n_j.

    It minimises the slowest worker's time max_j (c_j·n_j + b_j), subject to Σ n_j = global batch
    and 1 ≤ n_j ≤ limit_j. c_j and b_j are the model of worker j (`BatchSizePredictor`), and limit_j
    its memory limit. Until there is enough feedback for models, the models are fitted to the
    profiling phase (`Problem.profiles`). Without a profiling phase, counts are equal.
    """

    def allocate(self, problem: Problem, models: Models, feedback: Feedback) -> Allocation:
        """See `Allocator.allocate`."""
        if not models.known and problem.profiles:
            models = profiled(problem.profiles)
        if not models.known:
            return Allocation(counts.equal(problem), {})
        return Allocation(solve(models, problem), {}, models=models)


def profiled(profiles: list[list[tuple[int, float]]]) -> Models:
    """Fit models to the profiling phase's pairs (samples, seconds) of each worker."""
    points = [np.array(rank, np.float64).T for rank in profiles]
    c, b = np.array([line(samples, compute_s) for samples, compute_s in points]).T
    return Models(_NO_SIZE * (c + b), c, b)


def solve(models: Models, problem: Problem) -> Ints:
    """Solve BOA's integer program; return each worker's number of samples, [W].

    Each worker gets one sample or more, so that its time stays known.
    """
    low, high = counts.bounds(problem, least=1)

    def times(samples: Ints) -> Floats:
        n = low + samples
        return np.where(n > 0, models.c * n + models.b, 0.0)

    return low + minmax(times, problem.global_batch - int(low.sum()), high - low)


def make(parameters: counts.CountsParameters) -> Policy:
    """Make the policy."""
    return Policy(
        name="boa",
        predictor=BatchSizePredictor(parameters.window),
        scheduler=counts.scheduler(parameters),
        shuffler=KeepPlacement(),
        plain_batches=True,
        allocator=MinMaxAllocator(),
        criteria=counts.criteria(parameters, steps=parameters.window),
    )


preset = Preset(
    name="boa",
    summary="Batch sizes that minimise the slowest rank's expected time, by an integer program.",
    source="BOA: batch orchestration algorithm for straggler mitigation of distributed DL training",
    make=make,
    combines=True,
    parameters=counts.CountsParameters,
    variants=counts.LEVELLED,
)
