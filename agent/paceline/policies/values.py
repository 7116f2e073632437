"""Values that pass between a policy's parts: feedback, models and problem.

`planning` builds `Feedback` and `Problem` from a run's history; predictors return `Models`.
`StepTable` is feedback as a table of steps and workers, for allocators. Arrays use the letters of
`base`: W workers, N samples, F feedback rows, S steps; R is the number of remaining samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.batch_limits.budget import Budget
from paceline.core.cost import SUM, Cost, Features, PaddedCost
from paceline.wire import RankDevice

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Feedback:
    """Records of steps that all W ranks reported: F rows, sorted by (step, rank).

    `load` is in the user's size unit. `sync_s` is the time spent on waiting and communication, and
    `step_s` the wall time of the step, NaN where unknown. Only choosers use `sync_s` and `step_s`;
    both are zeros if not given.
    """

    step: Ints  # [F]
    rank: Ints  # [F]
    # The following five arrays describe each row's batch: number of samples n, load Λ (sum of the
    # sizes λ), compute time T, sum of the squared sizes Σλ², and largest size max λ.
    samples: Ints  # [F]
    load: Floats  # [F]
    compute_s: Floats  # [F]
    squares: Floats  # [F]
    longest: Floats  # [F]
    sync_s: Floats = field(default_factory=lambda: np.empty(0))  # [F]
    step_s: Floats = field(default_factory=lambda: np.empty(0))  # [F]

    def __post_init__(self) -> None:
        for name in ("sync_s", "step_s"):
            if getattr(self, name).shape != self.step.shape:
                object.__setattr__(self, name, np.zeros(self.step.shape))

    @staticmethod
    def empty() -> Feedback:
        """Return feedback without rows."""
        ints, floats = np.empty(0, np.int64), np.empty(0)
        return Feedback(ints, ints, ints, floats, floats, floats, floats)

    @property
    def features(self) -> Features:
        """Features of each row's batch, from which `Cost.load` computes its effective load."""
        return Features(self.samples, self.load, self.squares, self.longest)

    def by_step(self, world: int) -> Feedback:
        """Return the feedback with each array in the shape [steps, W], one row per step."""
        return Feedback(*(getattr(self, f.name).reshape(-1, world) for f in fields(self)))

    def batches(self, world: int, count: int) -> Feedback:
        """Return the newest `count` usable rows of each rank, oldest first.

        Each array of the result is [count, W]. Its values in one row may be from different steps,
        because a rank has no usable row in some steps: see `usable`. If a rank has fewer than
        `count` usable rows, some appear several times; if it has none, its newest row appears
        `count` times.
        """
        rows = self.by_step(world)
        steps, worked = len(rows.samples), usable(rows.samples, rows.load, rows.compute_s)
        # Usable rows come last.
        order = np.argsort(worked, axis=0, kind="stable")
        known = np.clip(worked.sum(axis=0), 1, count)
        at = steps - known + np.arange(count)[:, None] * known // count
        at = np.take_along_axis(order, at, axis=0)
        return Feedback(
            *(np.take_along_axis(getattr(rows, field.name), at, axis=0) for field in fields(rows))
        )

    def of(self, rank: int) -> Feedback:
        """Return the usable rows of one rank, oldest first."""
        world = int(np.searchsorted(self.step, self.step[0], "right")) if len(self) else 1
        mine = Feedback(*(getattr(self, f.name)[rank::world] for f in fields(self)))
        keep = usable(mine.samples, mine.load, mine.compute_s)
        return Feedback(*(getattr(mine, f.name)[keep] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.step)


# Rows with a smaller time (in seconds) or load are not usable: the squares of much smaller numbers
# would underflow to 0.
LEAST_USABLE = 1e-100


def usable(samples: Any, load: Any, compute_s: Any) -> Any:
    """Return True where rows can be used to measure a rank's speed.

    The arguments are arrays or numbers.
    """
    return (samples > 0) & (load > LEAST_USABLE) & (compute_s > LEAST_USABLE)


@dataclass(frozen=True)
class StepTable:
    """Records of all workers in several steps. Arrays are [steps, W], oldest step first.

    `usable` is a bool array: True where the record shows the worker's speed.
    """

    step: Ints  # [steps]
    samples: Ints
    compute_s: Floats
    usable: Any

    @staticmethod
    def of(feedback: Feedback, world: int, first: int) -> StepTable:
        """Make the table of `world` workers from the feedback of step `first` and later steps."""
        late = feedback.step >= first
        rows = Feedback(*(getattr(feedback, f.name)[late] for f in fields(feedback)))
        rows = rows.by_step(world)
        says = usable(rows.samples, rows.load, rows.compute_s)
        return StepTable(rows.step[:, 0], rows.samples, rows.compute_s, says)

    def __len__(self) -> int:
        return len(self.step)

    def large(self, global_batch: int) -> StepTable:
        """Return the table of the steps with at least half of a global batch.

        An epoch's last step can be smaller. Its time is mostly overhead, and its whole counts are
        far from the proportions of a full step's.
        """
        large = 2 * self.samples.sum(axis=1) >= global_batch
        return StepTable(*(values[large] for values in vars(self).values()))

    def newest(self) -> StepTable:
        """Return the table of the newest step; the table must not be empty."""
        return StepTable(*(values[-1:] for values in vars(self).values()))

    def sums(self) -> tuple[Floats, Floats, Ints]:
        """Return sums over the steps in which a worker's record is usable, [W] each.

        The three results are the worker's number of samples, its compute time in seconds, and the
        number of these steps.
        """
        samples = np.where(self.usable, self.samples, 0).sum(axis=0).astype(np.float64)
        compute_s = np.where(self.usable, self.compute_s, 0.0).sum(axis=0)
        return samples, compute_s, self.usable.sum(axis=0)


@dataclass(frozen=True)
class Models:
    """Performance models: rank j takes ``a[j]·Λ' + c[j]·n + b[j]`` seconds for n samples.

    Λ' is the effective load, which `cost` computes from the sizes. Λ' is the load Λ, unless samples
    are padded or the cost of a sample grows faster than its length. `known` is False until every
    rank has given feedback. Until then all ranks count as equal.
    """

    a: Floats  # [W] s per size unit, > 0
    c: Floats  # [W] s per sample
    b: Floats  # [W] s per step
    known: bool = True
    cost: Cost = SUM
    # Models under other plausible costs of a batch, as pairs (probability, models).
    rivals: tuple[tuple[float, Models], ...] = ()
    # The factor by which a pause prolongs each rank's planned steps; None: no pauses.
    factors: Floats | None = None  # [S, W]

    @property
    def world(self) -> int:
        """Number of workers, W."""
        return len(self.a)

    def weighed(self) -> list[tuple[float, Models]]:
        """Return pairs (probability, models): one for these models, and one for each rival.

        The returned models have no rivals themselves.
        """
        rest = 1.0 - sum(chance for chance, _ in self.rivals)
        return [(rest, replace(self, rivals=())), *self.rivals]

    def at(self, step: int) -> Models:
        """Return the models for a step of the planned segment, with the forecast pauses.

        `step` counts from 0 at the segment's first step.
        """
        if self.factors is None or (self.factors[step] == 1).all():
            return self
        of = self.factors[step]
        rivals = tuple((chance, rival._slower(of)) for chance, rival in self.rivals)
        return replace(self._slower(of), rivals=rivals)

    def _slower(self, factor: Floats) -> Models:
        return replace(self, a=self.a * factor, c=self.c * factor, b=self.b * factor, factors=None)

    def padded_to(self, grid: float) -> Models:
        """Return models for batches whose padded length is rounded up to a multiple of `grid`.

        With `grid` 0, batches are padded to their longest sample.
        """
        if not grid:
            return self
        rivals = tuple((chance, rival.padded_to(grid)) for chance, rival in self.rivals)
        cost = PaddedCost(self.cost.kappa, True, grid) if self.cost.padded else self.cost
        return replace(self, cost=cost, rivals=rivals)

    @property
    def cautious(self) -> Models:
        """Return the models that should be used to compose steps: these models, or a rival.

        If batches may be padded, return the most probable models with a padded cost. With these
        models, a batch gets samples of similar size, and such batches are good under any cost.
        """
        padded = [entry for entry in self.weighed() if entry[1].cost.padded]
        return max(padded, key=lambda entry: entry[0])[1] if padded else replace(self, rivals=())

    def ett(self, of: Features) -> Floats:
        """Return the time that each worker is expected to compute for its batch, [..., W] s.

        `of` has the features of the batches, [..., W]. The time of an empty batch is 0.
        """
        time_s = self.a * self.cost.load(of) + self.c * of.samples + self.b
        return np.where(of.samples > 0, time_s, 0.0)

    @staticmethod
    def unknown(world: int) -> Models:
        """Return equal models for `world` ranks whose speeds are unknown.

        Each rank takes 1 s per size unit, so only ratios of the expected times are useful.
        """
        return Models(np.ones(world), np.zeros(world), np.zeros(world), known=False)


@dataclass(frozen=True)
class Storage:
    """Storage of the nodes of a run whose data lives on the nodes.

    A sample may move to another node only if `loose` is True for it, or if `ahead` is True. All
    other samples are trained on the node that has them.
    """

    # Number of bytes of samples that the plan may place on each node.
    room: Ints  # [nodes]
    # Number of bytes of each sample.
    lengths: Ints  # [N]
    # True for samples that no node stores yet; the plan may place them on any node.
    loose: npt.NDArray[np.bool_]  # [N]
    # True if the placement of the next epoch is being planned, for which each sample may move.
    ahead: bool = False

    @property
    def settled(self) -> Storage:
        """Storage without `loose` samples, for plans after each sample's rank is decided."""
        return replace(self, loose=np.zeros_like(self.loose))

    def keeps(self, remaining: Ints) -> bool:
        """Return True if some of these samples must be trained on the node that has them."""
        return not bool(self.loose[remaining].all())


@dataclass(frozen=True)
class Problem:
    """All inputs of a plan, except for feedback."""

    # Size λ of each sample.
    sizes: Floats  # [N]
    # Samples not yet used in this epoch, ascending.
    remaining: Ints  # [R]
    # `remaining` in the order in which the steps use the samples: see `Scheduler.compose`.
    order: Ints  # [R]
    # The worker that holds each sample: the last worker that trained it, or the worker that the
    # shuffler chose.
    placement: Ints  # [N]
    epoch: int
    # Global step number of the segment's first step.
    first_step: int
    # Maximum number of steps to plan; at the epoch's end, there can be fewer.
    steps: int
    global_batch: int
    world: int
    seed: int
    drop_last: bool = False
    # Number of samples of each worker in a full global batch, as the allocator chose it; None: the
    # policy has no allocator.
    counts: Ints | None = None  # [W]
    # Maximum number of samples that fit into each worker's memory; None: unknown.
    limits: Ints | None = None  # [W]
    # Result of the profiling phase before training, for each worker: pairs of a number of samples
    # and the time in seconds that the worker takes for this number.
    profiles: list[list[tuple[int, float]]] = field(default_factory=list)  # [W]
    # True if a policy has planned an earlier segment of the run. False: the ranks have not trained
    # yet, or the leader has divided steps without a plan.
    follows_plan: bool = False
    # `Plan.memory` of the last segment.
    memory: Mapping[str, Any] = field(default_factory=dict)
    # Index of each rank's node; None: one node, or unknown.
    nodes: Ints | None = None  # [W]
    # True if the script allows ranks to run different numbers of steps.
    uneven_steps: bool = True
    # Devices of the ranks; empty: unknown.
    devices: Sequence[RankDevice] = ()  # [W]
    # `plan` makes the counts of samples multiples of `grid`, except for a remainder. Padded lengths
    # are rounded up to multiples of `length_grid`; 0: they are not rounded.
    grid: int = 1
    length_grid: float = 0.0
    # Storage of the nodes; if it is set, so is `nodes`. None: each rank can read every sample.
    storage: Storage | None = None
    # Maximum total size of a step's samples, in the unit of the sizes: a step uses the next samples
    # of `order` that fit, on average `global_batch`. None: steps have `global_batch` samples.
    token_budget: float | None = None
    # Maximum total size of each worker's local batch, in the unit of the sizes.
    token_limits: Floats | None = None  # [W]
    # The number of the segment to plan, and the version of its policy. `plan` only copies both into
    # the `Plan`.
    seq: int = 0
    version: int = 0

    def across(self, before: Ints, after: Ints) -> int:
        """Return how many of K samples move to another node when their ranks change.

        `before` and `after` are the samples' ranks before and after the change, [K].
        """
        if self.nodes is None:
            return 0
        return int(np.count_nonzero(self.nodes[before] != self.nodes[after]))

    def batch_sizes(self) -> list[int]:
        """Return the number of samples of each planned step.

        Without a token budget, this is the global batch, or less in an epoch's last step. With one,
        a step has as many of the next samples of `order` as fit into the budget.
        """
        if self.token_budget is not None:
            counts = Budget(self.token_budget, self.sizes).counts(self.order, self.steps)
            return [int(count) for count in counts]
        full, rest = divmod(len(self.remaining), self.global_batch)
        batches = [self.global_batch] * full
        if rest and not self.drop_last:
            batches.append(rest)
        return batches[: self.steps]

    @property
    def reaches_epoch_end(self) -> bool:
        """True if the epoch has no steps after the planned ones."""
        left = len(self.remaining) - sum(self.batch_sizes())
        return left == 0 or (self.drop_last and left < self.global_batch)

    def rng(self, salt: int = 0) -> np.random.Generator:
        """Return a random generator seeded by the problem's seed, epoch, first step, and `salt`."""
        return np.random.default_rng([self.seed, self.epoch, self.first_step, salt])
