"""`lbb`: batch sizes that level the workers' times, changed in small moves or all at once.

LBB: Load Balanced Batching for Efficient Distributed Learning on Heterogeneous GPU Cluster.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any, Literal

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
)
from paceline.policies.predict.estimators import Regressor, predictor_of
from paceline.policies.solve import counts
from paceline.policies.solve.minmax import minmax
from paceline.policies.values import StepTable

# The sets of terms of a cubic, by their powers.
_TERM_SETS = [list(terms) for n in range(1, 5) for terms in combinations(range(4), n)]
# Number of steps of the previous policy from which the first counts are computed.
_BEGIN = 8
# Least slope of a worker's rough model, as a fraction of its last slope or its profile's slope.
_LEAST_SLOPE = 0.5


class _LbbMemory(counts.Counted):
    # First step whose feedback is not used yet.
    next: int
    # Slope of each worker's last rough model (`Line`), in seconds per sample; 0: unknown.
    slope: list[float]  # [W]
    # True for each worker whose slope is of the last measured step, or of the profile.
    measured: list[bool]  # [W]
    # Step since which each worker has had no samples; ignored for workers that have samples.
    idle: list[int]  # [W]
    # First step in which rapid tuning, which recomputes all counts, is allowed again.
    calm_until: int


@dataclass(frozen=True)
class Line:
    """Rough models of the workers (Eq. 1): the time of b samples is T(b) = slope · b + fixed.

    Arrays are [W].
    """

    slope: Floats  # s per sample
    # a0 of the paper.
    fixed: Floats  # s

    def __call__(self, samples: Ints) -> Floats:
        """Return each worker's time for its number of samples, in s, [W]."""
        return np.where(samples > 0, self.slope * samples + self.fixed, 0.0)


@dataclass(frozen=True)
class Cubic:
    """Models of the workers from the profiling phase (Eq. 1): T(b) = a0 + a1·b + a2·b² + a3·b³.

    T(b) is the time of b samples in seconds. `terms` has a0 … a3 of each worker, all ≥ 0.
    """

    terms: Floats  # [W, 4]

    def __call__(self, samples: Ints) -> Floats:
        """Return each worker's time for its number of samples, in s, [W]."""
        time_s = (self.terms * powers(samples)).sum(axis=1)
        return np.where(samples > 0, time_s, 0.0)

    def slope(self, problem: Problem) -> Floats:
        """Return each worker's mean time per sample of an equal share, without a0, in s, [W]."""
        share = max(1, problem.global_batch // problem.world)
        return np.asarray((self.terms * powers(share))[:, 1:].sum(axis=1) / share)


def powers(samples: Any) -> Floats:
    """Return 1, b, b² and b³ of each number of samples b, [..., 4]."""
    return np.asarray(samples, np.float64)[..., None] ** np.arange(4)


def fit_profile(points: list[tuple[int, float]]) -> Floats:
    """Fit the coefficients a0 … a3 of `Cubic`, [4], to a worker's profile (Alg. 1).

    The fit minimises the squares of relative errors. The profile, `points`, has at least one pair
    (samples, seconds). With coefficients ≥ 0 the time never falls as the batch grows, also beyond
    the profiled sizes.
    """
    samples, time_s = np.array(points, np.float64).T
    scale = powers(samples.max())
    # Divide by the measured times, so that errors are relative.
    columns = powers(samples) / scale / time_s[:, None]
    best, least = np.zeros(4), np.inf
    # The solution is the unconstrained fit of some of the four terms. Trying all sets of terms
    # takes less time than importing a library for it, which would delay a run's first plan.
    for terms in _TERM_SETS:
        found = np.linalg.lstsq(columns[:, terms], np.ones(len(points)), rcond=None)[0]
        error = float(((columns[:, terms] @ found - 1) ** 2).sum())
        if error < least and (found >= 0).all():
            best, least = np.zeros(4), error
            best[terms] = found
    return np.asarray(best / scale)


@dataclass(frozen=True)
class LbbAllocator:
    """LBB's coordinator (Alg. 2), which uses the straggler effect SE of the newest step.

    Steps with less than half of a global batch (an epoch's last step) do not count. SE is the
    difference between the slowest and the fastest worker's time, ÷ the mean time. If SE is below
    `fine_threshold` (FT), the counts do not change. If SE is between `fine_threshold` and
    `rapid_threshold` (RT), `step` samples move from the slowest worker to the fastest. (The paper
    takes ⌊step/2⌋ and gives ⌈step/2⌉, which changes the global batch.) If SE is larger, the
    allocator makes rough models of all workers and computes the counts with which the slowest
    worker ends first (Eq. 3, rapid tuning). In the next `window_steps` steps, there is no rapid
    tuning. If no policy has planned before, the first counts solve Eq. 3 for the profiles.
    Otherwise, and without profiles, they have the proportions of the last steps' counts.

    If all samples have one size, as in the paper, a worker's time is its measured time. If sizes
    differ, it is the worker's expected time for typical samples (`counts.typical_s`).

    A worker may get no samples (B_i = 0). It then does not count for SE. In Eq. 3, it still has a
    model: if times are measured, the last model that it had. After `retry_steps` steps it gets
    `step` samples from the worker with most samples, so that its time is measured.
    """

    fine_threshold: float = 0.05
    rapid_threshold: float = 0.3
    step: int = 1
    window_steps: int = 8
    retry_steps: int = 200

    def allocate(self, problem: Problem, models: Models, feedback: Feedback) -> Allocation:
        """See `Allocator.allocate`."""
        profiled = all(problem.profiles) and len(problem.profiles) == problem.world
        cubic = Cubic(np.array([fit_profile(p) for p in problem.profiles])) if profiled else None
        memory = counts.recall(problem, _LbbMemory) or _begin(problem, cubic, feedback)
        rows = StepTable.of(feedback, problem.world, memory.next).large(problem.global_batch)
        fixed = models.b if cubic is None else cubic.terms[:, 0]
        if len(rows):
            newest = rows.newest()
            if counts.one_size(problem) or not models.known:
                before = np.array(memory.slope)
                usual = before if cubic is None else np.minimum(before, cubic.slope(problem))
                least = np.where(memory.measured, _LEAST_SLOPE * usual, 0.0)
                line = rough_models(newest, fixed, before, least)
            else:
                line = typical_models(models, fixed, np.array(memory.counts), problem.sizes)
            memory = replace(
                memory,
                slope=line.slope.tolist(),
                measured=newest.usable[0].tolist(),
                next=int(newest.step[0]) + 1,
            )
            memory = self._tune(memory, problem, line, newest)
        return counts.allocation(self._retry(memory, problem))

    def _tune(
        self, memory: _LbbMemory, problem: Problem, line: Line, newest: StepTable
    ) -> _LbbMemory:
        """Return the state with new counts if the straggler effect is too large.

        This is Alg. 2, lines 7–19. The straggler effect is that of the workers that have samples
        and were measured in the step `newest`.
        """
        current = np.array(memory.counts)
        expected = line(current)
        takes_part = (current > 0) & newest.usable[0]
        if not takes_part.any():
            return memory
        times = expected[takes_part]
        # The straggler effect, times the mean, which may be 0.
        spread, mean = times.max() - times.min(), times.mean()
        if spread <= self.fine_threshold * mean:
            return memory
        if spread < self.rapid_threshold * mean or problem.first_step < memory.calm_until:
            return self._move(memory, problem, line, takes_part)
        _, limits = counts.bounds(problem)
        solved = minmax(line, problem.global_batch, limits)
        if (solved == current).all():
            return memory
        memory = replace(memory, calm_until=problem.first_step + self.window_steps)
        return _changed(memory, problem, solved)

    def _move(
        self, memory: _LbbMemory, problem: Problem, line: Line, takes_part: Any
    ) -> _LbbMemory:
        """Move samples from the slowest worker to the fastest.

        There is no move if the fastest worker would then take at least as long as the slowest did:
        otherwise a sample could move back and forth if workers have few samples.
        """
        changed, (_, limits) = np.array(memory.counts), counts.bounds(problem)
        expected = line(changed)
        slowest = int(np.argmax(np.where(takes_part, expected, -np.inf)))
        fastest = int(np.argmin(np.where(takes_part & (changed < limits), expected, np.inf)))
        samples = min(self.step, changed[slowest], limits[fastest] - changed[fastest])
        changed[slowest] -= samples
        changed[fastest] += samples
        better = line(changed)[fastest] < expected[slowest]
        return _changed(memory, problem, changed) if better else memory

    def _retry(self, memory: _LbbMemory, problem: Problem) -> _LbbMemory:
        changed, (_, limits) = np.array(memory.counts), counts.bounds(problem)
        since = np.where((changed == 0) & (limits > 0), memory.idle, problem.first_step)
        rank, donor = int(np.argmin(since)), int(np.argmax(changed))
        if problem.first_step - since[rank] < self.retry_steps:
            return memory
        samples = min(self.step, changed[donor], limits[rank])
        changed[donor] -= samples
        changed[rank] += samples
        return _changed(memory, problem, changed)


def _begin(problem: Problem, cubic: Cubic | None, feedback: Feedback) -> _LbbMemory:
    low, limits = counts.bounds(problem)
    world = problem.world
    begun = _LbbMemory(
        counts=[],
        next=0,
        slope=[0.0] * world,
        measured=[False] * world,
        idle=[problem.first_step] * world,
        calm_until=0,
    )
    if cubic is not None:
        begun = replace(begun, slope=cubic.slope(problem).tolist(), measured=[True] * world)
        if not problem.follows_plan:
            start = minmax(cubic, problem.global_batch, limits)
            return replace(begun, counts=start.tolist(), next=problem.first_step)
    last = np.unique(feedback.step)[-_BEGIN:]
    first = int(last[0]) if len(last) else 0
    samples, _, _ = StepTable.of(feedback, world, first).sums()
    start = counts.equal(problem)
    if samples.any():
        start = counts.rounded(counts.spread(samples, problem.global_batch, low, limits))
    return replace(begun, counts=start.tolist(), next=first)


def _changed(memory: _LbbMemory, problem: Problem, chosen: Ints) -> _LbbMemory:
    was_idle = (np.array(memory.counts) == 0) & (chosen == 0)
    return replace(
        memory,
        counts=chosen.tolist(),
        next=max(memory.next, problem.first_step),
        idle=np.where(was_idle, memory.idle, problem.first_step).tolist(),
    )


def rough_models(rows: StepTable, fixed: Floats, before: Floats, least: Floats) -> Line:
    """Return rough models T_i(b) = (CT_i − a0_i) / CB_i · b + a0_i of the workers (Alg. 2, line 3).

    T_i(b) is the time of worker i for b samples. CB_i and CT_i are its mean number of samples and
    its mean time in `rows`. `fixed` is a0, the time in seconds that does not depend on b, from the
    profiling phase or the predictor, [W]. `before` has the slopes of earlier models, [W]; 0:
    unknown. Workers without samples keep their slope, or have the mean slope if it is unknown.

    A measured worker's slope below `least`, [W], is raised to it, and a0 lowered accordingly.
    Otherwise one short step, in which CT is near a0, could give a worker most of the batch.
    """
    samples, compute_s, steps = rows.sums()
    known = steps > 0
    times = np.maximum(steps, 1)
    line = _line(samples / times, compute_s / times, fixed, least)
    slope = np.where(known, line.slope, before)
    typical = slope[slope > 0].mean() if slope.any() else 0.0
    return Line(np.where(slope > 0, slope, typical), np.where(known, line.fixed, fixed))


def typical_models(models: Models, fixed: Floats, current: Ints, sizes: Floats) -> Line:
    """Return rough models as `rough_models` does, but from expected times of typical samples.

    CB_i is the present count of worker i, `current`, [W], or an equal share if it has no samples.
    CT_i is the time that `models` forecast for CB_i typical samples. `sizes` has the size λ of each
    sample of the data set, [N]. `fixed` is as for `rough_models`.
    """
    samples = np.where(current > 0, current, max(1, int(current.sum()) // len(current)))
    time_s = counts.typical_s(models, samples, sizes)
    return _line(samples.astype(np.float64), time_s, fixed, np.zeros(len(samples)))


def _line(samples: Floats, time_s: Floats, fixed: Floats, least: Floats) -> Line:
    """Return lines through (samples, seconds), [W] each; see `rough_models`."""
    samples = np.maximum(samples, 1.0)
    slope = (time_s - fixed) / samples
    # Without a least slope, an a0 above the whole time counts as 0.
    slope = np.maximum(slope, np.where((least > 0) | (slope > 0), least, time_s / samples))
    return Line(slope, np.clip(time_s - slope * samples, 0.0, fixed))


class LbbParameters(counts.CountsParameters, frozen=True):
    """Parameters of `lbb`."""

    fine_threshold: Annotated[
        float,
        Meta(
            ge=0,
            le=10,
            description="Batch sizes do not change while the straggler effect is below this value. "
            "Straggler effect: slowest minus fastest rank's time, ÷ the mean time.",
        ),
    ] = 0.05
    rapid_threshold: Annotated[
        float,
        Meta(
            ge=0,
            le=10,
            description="All batch sizes are recomputed if the straggler effect is at least this "
            "value. Straggler effect: slowest minus fastest rank's time, ÷ the mean time.",
        ),
    ] = 0.3
    step: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="Number of samples that move at a time from the slowest to the fastest "
            "rank, when not all batch sizes are recomputed.",
        ),
    ] = 1
    window_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="After all batch sizes were recomputed, they are not recomputed again for "
            "this number of steps; `step` samples at a time may still move between ranks.",
        ),
    ] = 8
    retry_steps: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Number of steps after which a rank without samples gets samples again, so "
            "that its speed is measured.",
        ),
    ] = 200
    regressor: Regressor = "tracking"
    profile: Annotated[
        Literal["auto", "off"],
        Meta(
            description="auto: if the run begins with this policy, each rank times batches of 2, "
            "4, 8, … samples before training, where the script's loop allows it; the first batch "
            "sizes follow from these times. off: batches are equal at first."
        ),
    ] = "auto"


def make(parameters: LbbParameters) -> Policy:
    """Make the policy."""
    allocator = LbbAllocator(
        fine_threshold=parameters.fine_threshold,
        rapid_threshold=parameters.rapid_threshold,
        step=parameters.step,
        window_steps=parameters.window_steps,
        retry_steps=parameters.retry_steps,
    )
    predictor = predictor_of(parameters.regressor, parameters.window)
    made = counts.policy("lbb", allocator, parameters)
    profiles = parameters.profile == "auto"
    return dataclasses.replace(made, predictor=predictor, profiles=profiles)


preset = Preset(
    name="lbb",
    summary="Balances the ranks' times: moves single samples, or recomputes all batch sizes.",
    source="LBB: Load Balanced Batching for Efficient Distributed Learning on Heterogeneous GPU "
    "Cluster",
    make=make,
    combines=True,
    parameters=LbbParameters,
    variants=counts.LEVELLED,
)
