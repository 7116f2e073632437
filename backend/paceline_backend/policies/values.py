"""The values that pass between a policy's parts: feedback, models, the problem, the batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.amounts.budget import Budget
from paceline.core.cost import SUM, Cost, Features, PaddedCost
from paceline.wire import RankDevice

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Feedback:
    """Records of steps that all W ranks reported: F rows, sorted by (step, rank)."""

    step: Ints  # [F]
    rank: Ints  # [F]
    samples: Ints  # [F] n
    load: Floats  # [F] Λ, user's size unit
    compute_s: Floats  # [F] T
    squares: Floats  # [F] Σλ²
    longest: Floats  # [F] max λ
    # For choosers; of zeros if not given.
    sync_s: Floats = field(default_factory=lambda: np.empty(0))  # [F] wait and communication
    step_s: Floats = field(default_factory=lambda: np.empty(0))  # [F] wall time; NaN: unknown

    def __post_init__(self) -> None:
        for name in ("sync_s", "step_s"):
            if getattr(self, name).shape != self.step.shape:
                object.__setattr__(self, name, np.zeros(self.step.shape))

    @staticmethod
    def empty() -> Feedback:
        """No rows."""
        ints, floats = np.empty(0, np.int64), np.empty(0)
        return Feedback(ints, ints, ints, floats, floats, floats, floats)

    @property
    def features(self) -> Features:
        """The features of each row's batch, from which its cost is computed."""
        return Features(self.samples, self.load, self.squares, self.longest)

    def by_step(self, world: int) -> Feedback:
        """The feedback with all arrays as [steps, W]; every step is complete."""
        return Feedback(*(getattr(self, f.name).reshape(-1, world) for f in fields(self)))

    def batches(self, world: int, count: int) -> Feedback:
        """Each rank's newest batches side by side, oldest first: all arrays as [count, W].

        A rank may have had them in other steps than its neighbours, where ranks share batches. If a
        rank has had fewer, some stand there several times; if it has had none, it has zeros. Rows
        that say nothing about a rank's speed do not count: see `usable`.

        Args:
            world: ranks.
            count: batches of each rank.
        """
        rows = self.by_step(world)
        steps, worked = len(rows.samples), usable(rows.samples, rows.load, rows.compute_s)
        order = np.argsort(worked, axis=0, kind="stable")  # usable ones last
        known = np.clip(worked.sum(axis=0), 1, count)
        at = steps - known + np.arange(count)[:, None] * known // count
        at = np.take_along_axis(order, at, axis=0)
        return Feedback(
            *(np.take_along_axis(getattr(rows, field.name), at, axis=0) for field in fields(rows))
        )

    def of(self, rank: int) -> Feedback:
        """The usable rows of one rank, oldest first."""
        world = int(np.searchsorted(self.step, self.step[0], "right")) if len(self) else 1
        mine = Feedback(*(getattr(self, f.name)[rank::world] for f in fields(self)))
        keep = usable(mine.samples, mine.load, mine.compute_s)
        return Feedback(*(getattr(mine, f.name)[keep] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.step)


LEAST = 1e-100  # s, and size units: the squares of much smaller numbers are 0


def usable(samples: Any, load: Any, compute_s: Any) -> Any:
    """Whether rows (arrays or numbers) say something about a rank's speed."""
    return (samples > 0) & (load > LEAST) & (compute_s > LEAST)


@dataclass(frozen=True)
class Models:
    """Performance models: rank j takes ``a[j]·Λ' + c[j]·n + b[j]`` s for n samples.

    Λ' is the effective load, which `cost` computes from the sizes. Λ' is Λ, unless samples are
    padded or the cost of a sample grows faster than its length. `known` is False until every rank
    has given feedback. Until then all ranks count as equal.
    """

    a: Floats  # [W] s per size unit, > 0
    c: Floats  # [W] s per sample
    b: Floats  # [W] s per step
    known: bool = True
    cost: Cost = SUM
    # Models of other costs that may be right, too, each with its probability.
    rivals: tuple[tuple[float, Models], ...] = ()
    # How many times as long each rank takes in each planned step, [S, W]; None: always as long.
    factors: Floats | None = None

    @property
    def world(self) -> int:
        """W."""
        return len(self.a)

    def weighed(self) -> list[tuple[float, Models]]:
        """These models and their rivals, each with its probability and without rivals."""
        rest = 1.0 - sum(chance for chance, _ in self.rivals)
        return [(rest, replace(self, rivals=())), *self.rivals]

    def at(self, step: int) -> Models:
        """The models in a planned step, numbered from 0, of which a rank may be slower."""
        if self.factors is None or (self.factors[step] == 1).all():
            return self
        of = self.factors[step]
        rivals = tuple((chance, rival._slower(of)) for chance, rival in self.rivals)
        return replace(self._slower(of), rivals=rivals)

    def _slower(self, factor: Floats) -> Models:
        """The models if ranks take so many times as long, [W]."""
        return replace(self, a=self.a * factor, c=self.c * factor, b=self.b * factor, factors=None)

    def padded_to(self, grid: float) -> Models:
        """The models where batches are padded to a multiple of `grid`; 0: to their longest."""
        if not grid:
            return self
        rivals = tuple((chance, rival.padded_to(grid)) for chance, rival in self.rivals)
        cost = PaddedCost(self.cost.kappa, True, grid) if self.cost.padded else self.cost
        return replace(self, cost=cost, rivals=rivals)

    @property
    def cautious(self) -> Models:
        """Those of these models and their rivals for which steps are best composed.

        If batches may be padded, these are models of padded batches: samples of about one size suit
        each other under any cost.
        """
        padded = [entry for entry in self.weighed() if entry[1].cost.padded]
        return max(padded, key=lambda entry: entry[0])[1] if padded else replace(self, rivals=())

    def ett(self, of: Features) -> Floats:
        """Expected compute time of each worker's step, [..., W] s; 0 where it has no samples."""
        time_s = self.a * self.cost.load(of) + self.c * of.samples + self.b
        return np.where(of.samples > 0, time_s, 0.0)

    @staticmethod
    def unknown(world: int) -> Models:
        """Equal models for all workers. One second per size unit: only proportions are right."""
        return Models(np.ones(world), np.zeros(world), np.zeros(world), known=False)


@dataclass(frozen=True)
class Batches:
    """Which samples each worker gets in each step of a segment."""

    counts: Ints  # [S, W]
    samples: Ints  # [counts.sum()] step by step, in each rank by rank

    @staticmethod
    def of(parts: list[list[Ints]], world: int) -> Batches:
        """From ``[step][rank]`` arrays."""
        counts = np.array([[len(part) for part in step] for step in parts], np.int64)
        flat = [part for step in parts for part in step]
        samples = np.concatenate(flat) if flat else np.empty(0, np.int64)
        return Batches(counts.reshape(-1, world), samples)

    @staticmethod
    def joined(counts: list[Ints], samples: list[Ints], world: int) -> Batches:
        """From each step's counts, [W], and samples, rank by rank."""
        flat = np.concatenate(samples) if samples else np.empty(0, np.int64)
        return Batches(np.array(counts, np.int64).reshape(-1, world), flat)

    @cached_property
    def parts(self) -> list[list[Ints]]:
        """As ``[step][rank]`` arrays."""
        ends = np.cumsum(self.counts)
        flat = np.split(self.samples, ends[:-1]) if len(ends) else []
        world = self.counts.shape[1]
        return [flat[at : at + world] for at in range(0, len(flat), world)]

    def ranks(self) -> Ints:
        """The rank of each of `samples`."""
        world = self.counts.shape[1]
        ranks = np.tile(np.arange(world), len(self.counts))
        return np.repeat(ranks, self.counts.ravel())


@dataclass(frozen=True)
class Storage:
    """Where data lives on nodes: what they have room for, and which samples may change their node.

    Samples that may not are trained on the node that has them.
    """

    room: Ints  # [nodes] bytes of samples that the plan may place on each node
    lengths: Ints  # [N] bytes of each sample
    loose: npt.NDArray[np.bool_]  # [N] samples that no node has so far: they may go anywhere
    ahead: bool = False  # the placement is the next epoch's: each sample may move

    @property
    def settled(self) -> Storage:
        """The same, once it is decided who holds what: no sample may go anywhere else."""
        return replace(self, loose=np.zeros_like(self.loose))

    def keeps(self, remaining: Ints) -> bool:
        """Whether some of these samples must be trained where they are."""
        return not bool(self.loose[remaining].all())


@dataclass(frozen=True)
class Problem:
    """Everything that a plan depends on, besides feedback."""

    sizes: Floats  # [N] λ
    remaining: Ints  # [R] samples not yet used in this epoch, ascending
    order: Ints  # [R] `remaining` in the order of `Scheduler.compose`: step after step
    placement: Ints  # [N] the worker that holds each sample
    epoch: int
    first_step: int  # global step number of the segment's first step
    steps: int  # how many steps to plan at most; fewer at the epoch's end
    global_batch: int
    world: int
    seed: int
    drop_last: bool = False
    counts: Ints | None = None  # [W] samples of a whole global batch, if there is an allocator
    limits: Ints | None = None  # [W] most samples that fit into a worker's memory, if known
    profiles: list[list[tuple[int, float]]] = field(default_factory=list)  # [W]: (samples, s)
    memory: Mapping[str, Any] = field(default_factory=dict)  # `Plan.memory` of the last segment
    nodes: Ints | None = None  # [W] number of each rank's node; None: one node, or unknown
    uneven_steps: bool = True  # the script lets ranks make different numbers of steps
    devices: Sequence[RankDevice] = ()  # [W]; empty: unknown
    # `plan` puts the scheduler's numbers of samples on this grid,
    grid: int = 1
    length_grid: float = 0.0  # and padded lengths on this one; 0: none
    storage: Storage | None = None  # with `nodes`; None: each rank reads every sample
    # What a step holds, in the unit of the sizes: steps take the samples of `order` in turn. Then
    # `global_batch` is a mean. None: each step has `global_batch` samples.
    token_budget: float | None = None
    token_limits: Floats | None = None  # [W] what each worker's part of a step may hold, with it

    def across(self, before: Ints, after: Ints) -> int:
        """How many samples get to another node.

        Args:
            before: rank of each sample, [K].
            after: the same later.
        """
        if self.nodes is None:
            return 0
        return int(np.count_nonzero(self.nodes[before] != self.nodes[after]))

    def batch_sizes(self) -> list[int]:
        """Samples of each planned step: the global batch, or less in an epoch's last step.

        With a token budget: as many of `order` as it holds.
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
        """Whether the planned steps use up the epoch."""
        left = len(self.remaining) - sum(self.batch_sizes())
        return left == 0 or (self.drop_last and left < self.global_batch)

    def rng(self, salt: int = 0) -> np.random.Generator:
        """A generator that depends on the problem's seed, epoch and first step alone."""
        return np.random.default_rng([self.seed, self.epoch, self.first_step, salt])
