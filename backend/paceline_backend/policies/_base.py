"""The four choices that make a policy, and the values that pass between them.

    predictor     feedback                       → performance models
    scheduler     models, remaining samples      → the next segment
    shuffler      models, placement              → the placement of what remains
    synchroniser  how gradients meet (run by the ranks; named here)

Predictor, scheduler and shuffler are pure: no I/O, no clock, no global random state, no memory
between calls; the same arguments give the same result, on any thread. They return new values and
change no argument. All arrays are NumPy: W workers (ranks), N samples of the data set, F feedback
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Feedback:
    """What ranks reported: F rows, sorted by (step, rank), of steps that all W ranks reported."""

    step: Ints  # [F]
    rank: Ints  # [F]
    samples: Ints  # [F] n
    load: Floats  # [F] Λ, user's size unit
    compute_s: Floats  # [F] T

    @staticmethod
    def empty() -> Feedback:
        """No rows."""
        ints, floats = np.empty(0, np.int64), np.empty(0)
        return Feedback(ints, ints, ints, floats, floats)

    def of(self, rank: int) -> Feedback:
        """The rows of one rank that say something about its speed, oldest first."""
        keep = (self.rank == rank) & usable(self.samples, self.load, self.compute_s)
        return Feedback(
            self.step[keep],
            self.rank[keep],
            self.samples[keep],
            self.load[keep],
            self.compute_s[keep],
        )

    def __len__(self) -> int:
        return len(self.step)


def usable(samples: Any, load: Any, compute_s: Any) -> Any:
    """Whether rows (arrays or numbers) say something about a rank's speed."""
    return (samples > 0) & (load > 0) & (compute_s > 0)


@dataclass(frozen=True)
class Models:
    """Performance models: rank j takes ``a[j]·Λ + c[j]·n + b[j]`` seconds for n samples of load Λ.

    `known` is False until every rank has given feedback: then all ranks count as equal.
    """

    a: Floats  # [W] s per size unit, > 0
    c: Floats  # [W] s per sample
    b: Floats  # [W] s per step
    known: bool = True

    @property
    def world(self) -> int:
        """W."""
        return len(self.a)

    def ett(self, load: Floats, samples: Floats | Ints) -> Floats:
        """Expected compute time of each worker's step, [..., W] s; 0 where it has no samples."""
        return np.where(samples > 0, self.a * load + self.c * samples + self.b, 0.0)

    @staticmethod
    def unknown(world: int) -> Models:
        """All workers equal, one second per size unit: only proportions mean anything."""
        return Models(np.ones(world), np.zeros(world), np.zeros(world), known=False)


@dataclass(frozen=True)
class Problem:
    """All that a plan depends on."""

    sizes: Floats  # [N] λ
    remaining: Ints  # [R] samples not yet used in this epoch, ascending
    placement: Ints  # [N] the worker that holds each sample
    epoch: int
    first_step: int  # global step number of the segment's first step
    steps: int  # how many steps to plan at most; fewer at the epoch's end
    global_batch: int
    world: int
    seed: int
    drop_last: bool = False

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


class Scheduler(Protocol):
    """Chooses which samples each worker gets in the next steps."""

    def schedule(self, problem: Problem, models: Models) -> list[list[Ints]]:
        """Samples [step][rank] for ``problem.batch_sizes()`` steps.

        Step k holds exactly ``problem.batch_sizes()[k]`` samples, all from ``problem.remaining``,
        none twice in the segment. A rank may get none.
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
class Policy:
    """A preset, or an operator's mix: one of each."""

    name: str
    predictor: Predictor
    scheduler: Scheduler
    shuffler: Shuffler
    synchroniser: str = "allreduce"
    balances: bool = True  # False: equal counts by design, and so when the leader coasts


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

    assignments: list[list[Ints]]  # [step][rank]
    ett_s: list[list[float]]  # [step][rank]; empty while the models are unknown
    shares: list[float]  # [W] load shares for coasting; empty: equal counts
    placement: Ints  # [N] after the shuffler, if it ran
    moved: (
        int  # samples that got another holder: from the shuffler, or by being given to another rank
    )
    epoch_end: bool


def plan(policy: Policy, problem: Problem, feedback: Feedback, *, shuffle: bool) -> Plan:
    """Plans the next segment; the one function behind controller, replay, simulator and tests.

    Args:
        policy: what to plan with.
        problem: what to plan.
        feedback: what the predictor may know.
        shuffle: run the shuffler first: at an epoch's start, a switch, or a controller's takeover.
    """
    models = policy.predictor.fit(feedback, problem.world)
    moved = 0
    if shuffle:
        placement = policy.shuffler.shuffle(problem, models)
        moved = int(np.count_nonzero(placement != problem.placement))
        problem = replace(problem, placement=placement)
    assignments = policy.scheduler.schedule(problem, models)
    for step in assignments:
        for rank, part in enumerate(step):
            moved += int(np.count_nonzero(problem.placement[part] != rank))
    ett: list[list[float]] = []
    if models.known:
        load = np.array([[problem.sizes[part].sum() for part in step] for step in assignments])
        count = np.array([[len(part) for part in step] for step in assignments])
        ett = models.ett(load, count).tolist() if len(load) else []
    shares: list[float] = []
    if policy.balances and models.known:
        speed = 1.0 / models.a
        shares = (speed / speed.sum()).tolist()
    return Plan(assignments, ett, shares, problem.placement, moved, problem.reaches_epoch_end)
