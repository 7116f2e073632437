"""The choices that make a policy, and the values that pass between them.

    predictor     feedback                        → performance models
    allocator     models, feedback, its memory    → how many samples each worker gets (optional)
    scheduler     models, remaining samples       → the next segment: which samples
    shuffler      models, placement               → the placement of what remains
    synchroniser  how gradients meet (run by the ranks; named here), or who chooses that:
    chooser       feedback, its memory            → the segment's synchroniser (optional)

All are pure: no I/O, no clock, no global random state, no memory between calls but what they
return as such; the same arguments give the same result, on any thread. They return new values and
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

# What a policy changes in the training: nothing but the order of floating-point sums; which samples
# meet in a global batch; or also which gradients meet, and when.
Changes = Literal["nothing", "batches", "training"]

_CHOOSER = "synchroniser"  # where in a segment's memory the chooser's is; the rest: the allocator's


@dataclass(frozen=True)
class Feedback:
    """What ranks reported: F rows, sorted by (step, rank), of steps that all W ranks reported."""

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
        """What the cost of each row's batch depends on."""
        return Features(self.samples, self.load, self.squares, self.longest)

    def by_step(self, world: int) -> Feedback:
        """The same with all arrays as [steps, W]; steps are all complete."""
        return Feedback(*(getattr(self, f.name).reshape(-1, world) for f in fields(self)))

    def of(self, rank: int) -> Feedback:
        """The rows of one rank that say something about its speed, oldest first."""
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

    Λ' is the effective load that `cost` makes of their sizes: Λ itself, unless samples are padded
    or long ones cost more than their length. `known` is False until every rank has given feedback:
    then all ranks count as equal.
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
        """All workers equal, one second per size unit: only proportions mean anything."""
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
    """All that a plan depends on."""

    sizes: Floats  # [N] λ
    remaining: Ints  # [R] samples not yet used in this epoch, ascending
    order: Ints  # [R] the same as the scheduler composed them: each step's samples in a row
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
    memory: Mapping[str, Any] = field(default_factory=dict)  # `Plan.memory` of its last segment

    def batch_sizes(self) -> list[int]:
        """Samples of each planned step: the global batch, less in an epoch's last step."""
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
    """Learns what a step costs each worker."""

    def fit(self, feedback: Feedback, world: int) -> Models:
        """Models of all workers; `Models.unknown` while the feedback does not suffice."""
        ...


@dataclass(frozen=True)
class Allocation:
    """How many samples each worker gets of a whole global batch, until told otherwise."""

    counts: Ints  # [W], their sum is the global batch
    memory: Mapping[str, Any]  # for the next call: strings, numbers, lists and mappings of them
    threads: tuple[int, ...] = ()  # CPU threads of each rank; empty: as they are
    models: Models | None = None  # where it makes ranks faster or knows better: for the ETT


class Allocator(Protocol):
    """Chooses how many samples each worker gets; which ones is the scheduler's business."""

    def allocate(self, problem: Problem, models: Models, feedback: Feedback) -> Allocation:
        """The counts from the problem's first step on.

        ``problem.memory`` is what it returned with the last segment that ran under this policy
        version; empty at first.
        """
        ...


class Scheduler(Protocol):
    """Chooses which samples each worker gets in the next steps."""

    def compose(self, problem: Problem, models: Models) -> Ints:
        """``problem.remaining`` in the order in which steps shall use it up, [R].

        Called when the shuffler is: at an epoch's start, a switch, a controller's takeover. In
        between, ``problem.order`` is what it returned without what was used. So this is the place
        for work on a whole epoch. A scheduler that does not need it returns ``problem.remaining``.
        """
        ...

    def schedule(self, problem: Problem, models: Models) -> Batches:
        """The samples of the next ``problem.batch_sizes()`` steps.

        Step k holds exactly ``problem.batch_sizes()[k]`` samples, all from ``problem.remaining``,
        none twice in the segment. A rank may get none. With ``problem.counts`` ranks get samples
        in that proportion.
        """
        ...


class Shuffler(Protocol):
    """Chooses which worker holds which samples."""

    def shuffle(self, problem: Problem, models: Models) -> Ints:
        """A new placement, [N] ranks. Samples outside ``problem.remaining`` keep theirs."""
        ...


class KeepPlacement:
    """The null shuffler: nothing moves."""

    def shuffle(self, problem: Problem, models: Models) -> Ints:
        """See `Shuffler.shuffle`."""
        return problem.placement


@dataclass(frozen=True)
class Choice:
    """How gradients shall meet in a segment."""

    synchroniser: Synchronisation
    why: str = ""  # for the operator: one sentence; empty: there was no choice
    memory: Mapping[str, Any] = field(default_factory=dict)  # for the next call, as an allocator's


class Chooser(Protocol):
    """Chooses how gradients meet, segment by segment, where that depends on what ranks reported."""

    def choose(self, feedback: Feedback, world: int, memory: Mapping[str, Any]) -> Choice:
        """The next segment's synchroniser.

        It is not told of the segment: how many steps that gets depends on the choice.

        Args:
            feedback: the same as the predictor's.
            world: W.
            memory: what it returned with the last segment that ran under this policy version; empty
                at first.
        """
        ...


@dataclass(frozen=True)
class Policy:
    """A preset, or an operator's mix: one of each."""

    name: str
    predictor: Predictor
    scheduler: Scheduler
    shuffler: Shuffler
    allocator: Allocator | None = None
    synchroniser: Synchronisation | Chooser = ALLREDUCE
    balances: bool = True  # False: equal counts by design, and so when the leader coasts
    recomposes: bool = False  # the order must fit the speeds: anew when these have changed
    plain_batches: bool = False  # each global batch holds the samples that plain DDP gives it
    threads: bool = False  # it sets CPU threads: what that would do shows in no telemetry

    @property
    def relaxed(self) -> bool:
        """Whether there may be steps in which ranks do not wait for all others."""
        return self.synchroniser != ALLREDUCE

    @property
    def changes(self) -> Changes:
        """What it changes in the training, compared with plain DDP of the same seed."""
        if self.relaxed:
            return "training"
        return "nothing" if self.plain_batches else "batches"

    def choose(self, feedback: Feedback, world: int, memory: Mapping[str, Any]) -> Choice:
        """How gradients meet in the next segment; `memory` is `Problem.memory`.

        Raises:
            ValueError: `world` ranks cannot train with what the policy chose.
        """
        if isinstance(self.synchroniser, Synchronisation):
            return Choice(self.synchroniser)
        choice = self.synchroniser.choose(feedback, world, memory.get(_CHOOSER, {}))
        if problem := choice.synchroniser.problem(world):
            raise ValueError(f"policy: {self.name} chose what ranks cannot do: {problem}")
        return choice


@dataclass(frozen=True)
class Preset:
    """How a policy is registered: its name, what it is, its parameters, and how to make it.

    `parameters` is a JSON Schema object's ``properties``; every parameter has a default. `make`
    gets all of them, validated.
    """

    name: str
    summary: str
    source: str  # paper or project it comes from
    make: Any  # Callable[[Mapping[str, Any]], Policy]
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A scheduled segment: the decision, with what was believed when it was taken."""

    batches: Batches
    ett_s: list[list[float]]  # [step][rank]; empty while the models are unknown
    shares: list[float]  # [W] load shares for coasting; empty: equal counts
    placement: Ints  # [N] after the shuffler, if it ran
    order: Ints  # [R] after the scheduler composed it, if it did; this segment's samples included
    moved: (
        int  # samples that got another holder: from the shuffler, or by being given to another rank
    )
    epoch_end: bool
    memory: Mapping[str, Any]  # the allocator's, and the chooser's
    threads: list[int]  # CPU threads of each rank; empty: as they are
    cost: Cost = SUM  # what batches were believed to cost
    synchroniser: Synchronisation = ALLREDUCE
    why: str = ""  # this synchroniser, where it was chosen

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
    """Plans the next segment; the one function behind controller, replay, simulator and tests.

    Args:
        policy: what to plan with.
        problem: what to plan.
        feedback: what predictor, allocator and chooser may know.
        shuffle: run the shuffler, and compose the steps, first: at an epoch's start, a switch, or a
            controller's takeover.
        choice: what `Policy.choose` gave for this feedback and memory, where that was asked before,
            as for how many steps; None: it is asked here.
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
        msgspec.to_builtins(memory),  # as it will be after its way through the bus
        threads,
        models.cost,
        choice.synchroniser,
        choice.why,
    )


def _shares(policy: Policy, problem: Problem, models: Models) -> list[float]:
    """What part of the load each rank shall get while the leader coasts."""
    if not policy.balances:
        return []
    if problem.counts is not None:
        return list((problem.counts / problem.counts.sum()).tolist())
    if models.known:
        speed = 1.0 / models.a
        return list((speed / speed.sum()).tolist())
    return []
