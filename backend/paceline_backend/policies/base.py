"""The parts of a policy, and the values that pass between them.

    predictor     feedback                        → performance models
    allocator     models, feedback, its memory    → how many samples each worker gets (optional)
    scheduler     models, remaining samples       → which samples each worker gets
    shuffler      models, placement               → which worker holds each remaining sample
    synchroniser  how gradients meet; ranks run it, a policy only names it
    chooser       feedback, its memory            → the segment's synchroniser (optional)

For each segment `plan` calls them in this order: ``Predictor.fit``; at an epoch's start, a switch
or a controller's takeover ``Shuffler.shuffle`` and ``Scheduler.compose``; ``Chooser.choose``;
``Allocator.allocate``; ``Scheduler.schedule``.

All parts are pure: no I/O, no clock, no global random state, and no memory except the memory that
they return. The same arguments give the same result, on any thread. Parts return new values and
change no argument. All arrays are NumPy: W workers (ranks), N samples of the data set, F feedback
rows, S steps of the segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.cost import SUM, Cost, Features, features
from paceline.wire.synchronisation import ALLREDUCE, Synchronisation

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# What a policy changes in the training. "nothing": only the order of floating-point sums differs.
# "batches": other samples share a global batch. "training": gradients also meet at other times.
Changes = Literal["nothing", "batches", "training"]

_CHOOSER = "synchroniser"  # key of the chooser's memory; all other keys are the allocator's


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

    def of(self, rank: int) -> Feedback:
        """The usable rows of one rank, oldest first."""
        world = int(np.searchsorted(self.step, self.step[0], "right")) if len(self) else 1
        mine = Feedback(*(getattr(self, f.name)[rank::world] for f in fields(self)))
        keep = usable(mine.samples, mine.load, mine.compute_s)
        return Feedback(*(getattr(mine, f.name)[keep] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.step)


def usable(samples: Any, load: Any, compute_s: Any) -> Any:
    """Whether rows (arrays or numbers) say something about a rank's speed."""
    return (samples > 0) & (load > 0) & (compute_s > 0)


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

    @property
    def world(self) -> int:
        """W."""
        return len(self.a)

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
        """From [step][rank] arrays."""
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
        """As [step][rank] arrays."""
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

    def batch_sizes(self) -> list[int]:
        """Samples of each planned step: the global batch, or less in an epoch's last step."""
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


class Predictor(Protocol):
    """Learns the cost of a step for each worker."""

    def fit(self, feedback: Feedback, world: int) -> Models:
        """Models of all workers; `Models.unknown` while the feedback does not suffice.

        Called first, for every segment, with all feedback in the controller's window.
        """
        ...


@dataclass(frozen=True)
class Allocation:
    """How many samples each worker gets of a whole global batch."""

    counts: Ints  # [W], their sum is the global batch
    memory: Mapping[str, Any]  # for the next call: strings, numbers, lists and mappings of them
    threads: tuple[int, ...] = ()  # CPU threads of each rank; empty: leave them unchanged
    models: Models | None = None  # better models than the predictor's, for the plan's ETT


class Allocator(Protocol):
    """Chooses how many samples each worker gets. The scheduler chooses which samples."""

    def allocate(self, problem: Problem, models: Models, feedback: Feedback) -> Allocation:
        """The counts from the problem's first step on.

        Called for every segment, after the predictor and before `Scheduler.schedule`, which finds
        the counts in ``problem.counts``. ``problem.memory`` is the memory that the allocator
        returned with the last segment under this policy version; empty at first.
        """
        ...


class Scheduler(Protocol):
    """Chooses which samples each worker gets in the next steps."""

    def compose(self, problem: Problem, models: Models) -> Ints:
        """``problem.remaining`` in the order in which steps shall use the samples, [R].

        Called after `Shuffler.shuffle` at an epoch's start, at a switch and at a controller's
        takeover. In between, ``problem.order`` is the returned order without the used samples. Do
        work on a whole epoch here. A scheduler without an order returns ``problem.remaining``.
        """
        ...

    def schedule(self, problem: Problem, models: Models) -> Batches:
        """The samples of the next ``problem.batch_sizes()`` steps.

        Called last, for every segment. Step k holds exactly ``problem.batch_sizes()[k]`` samples,
        all from ``problem.remaining``, none twice in the segment. A rank may get none. If there are
        ``problem.counts``, ranks get samples in this proportion.
        """
        ...


class Shuffler(Protocol):
    """Chooses which worker holds which samples."""

    def shuffle(self, problem: Problem, models: Models) -> Ints:
        """A new placement, [N] ranks. Samples outside ``problem.remaining`` keep their worker.

        Called at an epoch's start, at a switch and at a controller's takeover, after the predictor
        and before `Scheduler.compose`.
        """
        ...


class KeepPlacement:
    """The null shuffler: nothing moves."""

    def shuffle(self, problem: Problem, models: Models) -> Ints:
        """See `Shuffler.shuffle`."""
        return problem.placement


@dataclass(frozen=True)
class Choice:
    """How gradients meet in a segment."""

    synchroniser: Synchronisation
    why: str = ""  # one sentence for the operator; empty: there was no choice
    memory: Mapping[str, Any] = field(default_factory=dict)  # for the next call


class Chooser(Protocol):
    """Chooses how gradients meet, segment by segment, from the ranks' feedback."""

    def choose(self, feedback: Feedback, world: int, memory: Mapping[str, Any]) -> Choice:
        """The next segment's synchroniser.

        Called once for every segment, before the segment's number of steps is known, because this
        number depends on the choice.

        Args:
            feedback: the same as the predictor's.
            world: W.
            memory: the memory that the chooser returned with the last segment under this policy
                version; empty at first.
        """
        ...


@dataclass(frozen=True)
class Policy:
    """One part of each kind, under the name of a preset."""

    name: str
    predictor: Predictor
    scheduler: Scheduler
    shuffler: Shuffler
    allocator: Allocator | None = None
    synchroniser: Synchronisation | Chooser = ALLREDUCE
    balances: bool = True  # False: ranks get equal counts, also while the leader coasts
    recomposes: bool = False  # `compose` is called again when the ranks' speeds have changed
    plain_batches: bool = False  # each global batch holds the same samples as under plain DDP
    threads: bool = False  # the policy sets CPU threads, whose effect telemetry does not show

    @property
    def relaxed(self) -> bool:
        """Whether there may be steps in which ranks do not wait for all others."""
        return self.synchroniser != ALLREDUCE

    @property
    def changes(self) -> Changes:
        """What the policy changes in the training, compared with plain DDP of the same seed."""
        if self.relaxed:
            return "training"
        return "nothing" if self.plain_batches else "batches"

    def choose(self, feedback: Feedback, world: int, memory: Mapping[str, Any]) -> Choice:
        """How gradients meet in the next segment.

        Args:
            feedback: as for the predictor.
            world: W.
            memory: `Problem.memory`, which holds the allocator's memory, too.

        Raises:
            ValueError: `world` ranks cannot train with the synchroniser that the policy chose.
        """
        if isinstance(self.synchroniser, Synchronisation):
            return Choice(self.synchroniser)
        choice = self.synchroniser.choose(feedback, world, memory.get(_CHOOSER, {}))
        if problem := choice.synchroniser.problem(world):
            raise ValueError(f"policy: {self.name} chose what ranks cannot do: {problem}")
        return choice


@dataclass(frozen=True)
class Preset:
    """How a policy is registered: name, summary, parameters, and how to make the policy.

    `parameters` is the ``properties`` of a JSON Schema object. Every parameter has a default.
    `make` gets all parameters, validated. With `combines`, the presets that change how gradients
    meet can take their batches from this preset: its name is a value of their parameter
    ``batches``.
    """

    name: str
    summary: str
    source: str  # paper or project it comes from
    make: Any  # Callable[[Mapping[str, Any]], Policy]
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    combines: bool = False  # its policy decides batches, and leaves how gradients meet to others


@dataclass(frozen=True)
class Plan:
    """The decision on the next segment, with the models' forecast."""

    batches: Batches
    ett_s: list[list[float]]  # [step][rank]; empty while the models are unknown
    shares: list[float]  # [W] load shares for coasting; empty: equal counts
    placement: Ints  # [N] after `shuffle`, if called
    order: Ints  # [R] after `compose`, if called; includes this segment's samples
    moved: int  # samples that another worker holds or trains than before
    epoch_end: bool
    memory: Mapping[str, Any]  # of allocator and chooser
    threads: list[int]  # CPU threads of each rank; empty: leave them unchanged
    cost: Cost = SUM  # cost of batches by the models
    synchroniser: Synchronisation = ALLREDUCE
    why: str = ""  # why this synchroniser was chosen

    @property
    def assignments(self) -> list[list[Ints]]:
        """Samples, [step][rank]."""
        return self.batches.parts


def plan(
    policy: Policy,
    problem: Problem,
    feedback: Feedback,
    *,
    shuffle: bool,
    choice: Choice | None = None,
) -> Plan:
    """Plans the next segment. Controller, replay, simulator and tests all call this function.

    Args:
        policy: to plan with.
        problem: to solve.
        feedback: for predictor, allocator and chooser.
        shuffle: call `shuffle` and `compose` first. True at an epoch's start, at a switch and at a
            controller's takeover.
        choice: result of `Policy.choose` for this feedback and memory, if the caller already has
            it; None: `Policy.choose` is called here.
    """
    models = policy.predictor.fit(feedback, problem.world)
    moved = 0
    if shuffle:
        placement = policy.shuffler.shuffle(problem, models)
        moved = int(np.count_nonzero(placement != problem.placement))
        problem = replace(problem, placement=placement)
        problem = replace(problem, order=policy.scheduler.compose(problem, models))
    if choice is None:
        choice = policy.choose(feedback, problem.world, problem.memory)
    memory: dict[str, Any] = {}
    threads: list[int] = []
    if policy.allocator is not None:
        own = {name: value for name, value in problem.memory.items() if name != _CHOOSER}
        allocation = policy.allocator.allocate(replace(problem, memory=own), models, feedback)
        memory.update(allocation.memory)
        threads = list(allocation.threads)
        problem = replace(problem, counts=allocation.counts)
        models = allocation.models or models
    if choice.memory:
        memory[_CHOOSER] = choice.memory
    batches = policy.scheduler.schedule(problem, models)
    moved += int(np.count_nonzero(problem.placement[batches.samples] != batches.ranks()))
    ett: list[list[float]] = []
    if models.known:
        ett = models.ett(features(problem.sizes[batches.samples], batches.counts)).tolist()
    return Plan(
        batches,
        ett,
        _shares(policy, problem, models),
        problem.placement,
        problem.order,
        moved,
        problem.reaches_epoch_end,
        msgspec.to_builtins(memory),  # plain values, as the bus returns them
        threads,
        models.cost,
        choice.synchroniser,
        choice.why,
    )


def _shares(policy: Policy, problem: Problem, models: Models) -> list[float]:
    """Each rank's share of the load while the leader coasts."""
    if not policy.balances:
        return []
    if problem.counts is not None:
        return list((problem.counts / problem.counts.sum()).tolist())
    if models.known:
        speed = 1.0 / models.a
        return list((speed / speed.sum()).tolist())
    return []
