"""`dynamic-batching`: batch sizes adapted to the workers' iteration times, in a closed loop.

Taming Resource Heterogeneity In Distributed ML Training With Dynamic Batching, §III-C, Eqs. 4–5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from paceline.policies.base import (
    Allocation,
    Feedback,
    Floats,
    Ints,
    Models,
    Policy,
    Preset,
    Problem,
    usable,
)
from paceline.policies.parameters import PerRank
from paceline.policies.presets.static_batching import CAPACITY, counts_of
from paceline.policies.solve import counts
from paceline.policies.values import StepTable

# Function from the number of each worker's samples to the worker's time in seconds; both are [W].
Expected = Callable[[Ints], Floats]


class _BoundMemory(counts.Counted):
    # Counts before rounding.
    target: list[float]  # [W]
    # First step whose time is not in `mean_s` yet.
    next: int
    # Number of measured steps since the last change of counts.
    steps: int
    # μ: moving average of the time in seconds that each worker takes for its `counts` samples; 0:
    # unknown.
    mean_s: list[float]  # [W]
    # Counts before the last change. Empty if there was no change, or if its effect has already been
    # used to learn upper bounds.
    before: list[int]  # [W]
    # Each worker's samples per second before the last change of counts; 0: unknown.
    rate: list[float]  # [W]
    # Learned upper bounds of the counts.
    most: list[int]  # [W]
    # Step in which each bound in `most` was learned.
    learned: list[int]  # [W]
    # First step with the present `counts`.
    since: int


@dataclass(frozen=True)
class DynamicAllocator:
    """An allocator that sets the count of worker k to b_k ← b_k · mean(μ) / μ_k (Eqs. 4–5).

    The counts are then rescaled to the global batch and rounded. If all samples have one size, as
    in the paper, μ_k is the moving average of worker k's iteration times since the counts last
    changed. The average is the mean of these times until it covers 1 / `smoothing` steps; from then
    on, the newest time has the weight `smoothing`. Steps with less than half of a global batch (an
    epoch's last step) do not count. If worker k had another count in a step (such as under the
    previous policy), the time is scaled in proportion. If sizes differ, μ_k is the expected time of
    worker k for typical samples (`counts.typical_s`).

    The first counts are in proportion to `capacity` or, if it is empty, to the nominal speeds of
    the devices. Counts then change at most every `every_steps` steps, and only if some worker's
    batch changes by more than the fraction `dead_band`; see `margin`. Counts are between `b_min`
    and `b_max`; if `b_max` is 0, there is no upper bound. If worker k gets more samples and then
    takes longer per sample, by more than the dead band, its former count becomes its upper bound
    for `forget_steps` steps, or forever if `forget_steps` is 0.
    """

    capacity: tuple[float, ...] = ()
    dead_band: float = 0.05
    smoothing: float = 0.05
    every_steps: int = 4
    b_min: int = 1
    b_max: int = 0
    forget_steps: int = 1000

    def allocate(self, problem: Problem, models: Models, feedback: Feedback) -> Allocation:
        """See `Allocator.allocate`."""
        memory = counts.recall(problem, _BoundMemory) or self._begin(problem)
        memory = self._follow(memory, problem, feedback)
        expected: Expected | None = None
        slowed, band = _slowed(memory), margin(self.dead_band, self.smoothing, memory.steps)
        if models.known and not counts.one_size(problem):
            expected = partial(counts.typical_s, models, sizes=problem.sizes)
            memory = replace(memory, mean_s=expected(np.array(memory.counts)).tolist())
            slowed, band = _slower_than_expected(memory, models, feedback), self.dead_band
        if memory.steps >= self.every_steps:
            memory = self._judge(memory, problem, slowed, band)
            memory = self._adjust(memory, problem, expected, band)
        return counts.allocation(memory)

    def _begin(self, problem: Problem) -> _BoundMemory:
        world = problem.world
        start = counts_of(self.capacity, problem).tolist()
        return _BoundMemory(
            counts=start,
            target=[float(count) for count in start],
            next=0,
            steps=0,
            mean_s=[0.0] * world,
            before=[],
            rate=[0.0] * world,
            most=[problem.global_batch] * world,
            learned=[0] * world,
            since=problem.first_step,
        )

    def _follow(self, memory: _BoundMemory, problem: Problem, feedback: Feedback) -> _BoundMemory:
        """Return the state with the times of the steps since the last call in its averages."""
        rows = StepTable.of(feedback, problem.world, memory.next).large(problem.global_batch)
        current, mean, steps = np.array(memory.counts), np.array(memory.mean_s), memory.steps
        for k in range(len(rows)):
            steps += 1
            says = rows.usable[k] & (current > 0)
            time_s = rows.compute_s[k] * current / np.maximum(rows.samples[k], 1)
            next_ = mean + max(self.smoothing, 1 / steps) * (time_s - mean)
            mean = np.where(says, np.where(mean > 0, next_, time_s), mean)
        following = int(rows.step[-1]) + 1 if len(rows) else memory.next
        return replace(memory, mean_s=mean.tolist(), steps=steps, next=following)

    def _judge(
        self, memory: _BoundMemory, problem: Problem, slowed: Floats, band: float
    ) -> _BoundMemory:
        """Return the state with new upper bounds for workers that the last change made slower.

        `slowed` is each worker's time per sample after the change ÷ before it, [W]; NaN: unknown.
        Workers are slower if their samples per second fell by more than the fraction `band`.
        """
        most, learned = np.array(memory.most), np.array(memory.learned)
        if self.forget_steps:
            most[problem.first_step - learned >= self.forget_steps] = problem.global_batch
        if memory.before:
            before = np.array(memory.before)
            worse = (slowed * (1 - band) > 1) & (np.array(memory.counts) > before)
            most[worse], learned[worse] = before[worse], problem.first_step
        return replace(memory, before=[], most=most.tolist(), learned=learned.tolist())

    def _adjust(
        self, memory: _BoundMemory, problem: Problem, expected: Expected | None, band: float
    ) -> _BoundMemory:
        """Return the state with new counts and empty averages if the counts change enough.

        Otherwise, return `memory`. Some worker's count must change by more than the fraction
        `band`. If `expected` is given, counts change only if the change shortens the expected time
        of a step. If the full change does not shorten it, half of the change is tried: the time of
        a padded batch grows faster than its number of samples, so full changes could oscillate
        forever.
        """
        most = np.minimum(memory.most, self.b_max or problem.global_batch)
        low, high = counts.bounds(problem, self.b_min, most)
        wanted = proportional(np.array(memory.counts), np.array(memory.mean_s))
        target = counts.spread(wanted, problem.global_batch, low, high)
        current, old = np.array(memory.counts), np.array(memory.target)
        # Compare the counts before rounding: otherwise noise would move a sample back and forth.
        if (np.abs(target - old) <= band * old).all():
            return memory
        if expected is not None and not _shortens(expected, current, counts.rounded(target)):
            target = (target + current) / 2
            if not _shortens(expected, current, counts.rounded(target)):
                return memory
        chosen = counts.rounded(target)
        if (chosen == current).all():
            return memory
        return replace(
            memory,
            counts=chosen.tolist(),
            target=target.tolist(),
            next=max(memory.next, problem.first_step),
            steps=0,
            mean_s=[0.0] * problem.world,
            before=memory.counts,
            rate=_rate(memory).tolist(),
            since=problem.first_step,
        )


def margin(dead_band: float, smoothing: float, steps: int) -> float:
    """Return the dead band while moving averages cover `steps` steps since counts last changed.

    Equally noisy steps give a moving average with the weight `smoothing` the noise of a mean over 2
    / `smoothing` − 1 steps. While the average covers fewer steps, it is noisier, and the dead band
    is wider by the same factor: otherwise counts would follow the noise of the first steps.
    """
    settled = 2 / smoothing - 1
    return dead_band * max(1.0, math.sqrt(settled / max(steps, 1)))


def proportional(current: Ints, mean_s: Floats) -> Floats:
    """Return the count that the paper's controller wants for each worker k, [W].

    The count is b_k − X_k (μ_k − mean μ) with X_k = b_k / μ_k (Eqs. 4–5), which equals b_k ·
    mean(μ) / μ_k. b is the present counts, `current`, and μ the workers' times, `mean_s`, [W] each.
    A μ_k of 0 means unknown; b_k then does not change. The sum of the counts changes: (1, 1) with
    times (1, 3) becomes (2, ⅔).
    """
    wanted, known = current.astype(np.float64), mean_s > 0
    if known.any():
        wanted[known] *= mean_s[known].mean() / mean_s[known]
    return wanted


def _shortens(expected: Expected, current: Ints, chosen: Ints) -> bool:
    return bool(expected(chosen).max() < expected(current).max())


def _slowed(memory: _BoundMemory) -> Floats:
    """Return each worker's time per sample since the last change ÷ before it, [W]; NaN: unknown."""
    rate, before = _rate(memory), np.array(memory.rate or [0.0] * len(memory.counts))
    known = (rate > 0) & (before > 0)
    return np.where(known, before / np.where(known, rate, 1.0), np.nan)


def _slower_than_expected(memory: _BoundMemory, models: Models, feedback: Feedback) -> Floats:
    """Return the factor by which each worker became slower with the last change of counts, [W].

    The factor is the median of measured ÷ expected times since the change, ÷ the same median before
    the change; NaN: unknown.
    """
    rows = feedback.by_step(models.world)
    expected_s = models.ett(rows.features)
    says = usable(rows.samples, rows.load, rows.compute_s) & (expected_s > 0)
    ratio = np.where(says, rows.compute_s / np.where(says, expected_s, 1.0), np.nan)
    after = rows.step[:, 0] >= memory.since
    medians = []
    for part in (ratio[~after], ratio[after]):
        known = ~np.isnan(part).all(axis=0)
        medians.append(np.full(models.world, np.nan))
        medians[-1][known] = np.nanmedian(part[:, known], axis=0)
    return np.asarray(medians[1] / medians[0])


def _rate(memory: _BoundMemory) -> Floats:
    """Return each worker's samples per second since the last change, [W]; 0: unknown."""
    mean = np.array(memory.mean_s)
    return np.where(mean > 0, memory.counts / np.where(mean > 0, mean, 1.0), 0.0)


class DynamicBatchingParameters(counts.CountsParameters, frozen=True):
    """Parameters of `dynamic-batching`."""

    capacity: Annotated[
        PerRank, Meta(description=f"{CAPACITY} Only the first batches use it.")
    ] = ()
    dead_band: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Batch sizes change only if some rank's batch size would change by more "
            "than this fraction. In the first steps after a change, while averages of measured "
            "times are noisy, the fraction is larger.",
        ),
    ] = 0.05
    smoothing: Annotated[
        float,
        Meta(
            ge=0.01,
            le=1,
            description="Weight of the newest step in the moving average of a rank's step times. "
            "It only has an effect if all samples have one size; if sizes differ, each rank's "
            "predicted time for typical samples replaces the average.",
            extra_json_schema={counts.ONE_SIZE: True},
        ),
    ] = 0.05
    every_steps: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="Minimum number of measured steps between two changes of the batch sizes.",
        ),
    ] = 4
    b_min: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Minimum number of samples in a rank's batch.")
    ] = 1
    b_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="Maximum number of samples in a rank's batch; 0: no limit.",
        ),
    ] = 0
    forget_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="If a larger batch makes a rank slower per sample, the former batch size "
            "becomes the rank's maximum for this number of steps; 0: forever.",
        ),
    ] = 1000


def make(parameters: DynamicBatchingParameters) -> Policy:
    """Make the policy."""
    allocator = DynamicAllocator(
        capacity=parameters.capacity,
        dead_band=parameters.dead_band,
        smoothing=parameters.smoothing,
        every_steps=parameters.every_steps,
        b_min=parameters.b_min,
        b_max=parameters.b_max,
        forget_steps=parameters.forget_steps,
    )
    return counts.policy("dynamic-batching", allocator, parameters)


preset = Preset(
    name="dynamic-batching",
    summary="Makes batches larger or smaller until all workers take the same time.",
    source="Taming Resource Heterogeneity In Distributed ML Training With Dynamic Batching, "
    "closed loop",
    make=make,
    combines=True,
    parameters=DynamicBatchingParameters,
    variants=counts.LEVELLED,
)
