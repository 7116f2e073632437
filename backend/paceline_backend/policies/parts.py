"""The parts of a policy, and how a policy is registered; `base` says who calls them when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, runtime_checkable

from paceline.wire.synchronisation import ALLREDUCE, Synchronisation
from paceline_backend.policies.parameters import P, Parameters
from paceline_backend.policies.values import Batches, Feedback, Ints, Models, Problem

# What a policy changes in the training. "nothing": only the order of floating-point sums differs,
# and updates with dropout, bf16 or augmentation, which depend on the samples of a rank's batch.
# "batches": other samples share a global batch. "training": gradients also meet at other times.
Changes = Literal["nothing", "batches", "training"]

# Keys of the memories of the chooser and of regular pauses; all other keys are the allocator's.
CHOOSER, PAUSES = "synchroniser", "pauses"


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


@runtime_checkable
class NodeChooser(Chooser, Protocol):
    """A chooser that also looks at which ranks share a node."""

    def on_nodes(self, nodes: Sequence[int]) -> Chooser:
        """The chooser for a run on several nodes.

        Args:
            nodes: number of each rank's node, [W].
        """
        ...


@runtime_checkable
class StepsChooser(Chooser, Protocol):
    """A chooser that also looks at which steps it chooses for."""

    def on_steps(self, first: int, *, uneven: bool) -> Chooser:
        """The chooser for a segment.

        Args:
            first: the segment's first step.
            uneven: the script lets ranks make different numbers of steps: they may share batches.
        """
        ...


@dataclass(frozen=True)
class Accounts:
    """What a policy takes into account when it divides a global batch among the ranks.

    `insight.fitness` compares it with what a run has measured, and warns before a switch. By
    default a policy takes nothing into account, as plain DDP does, and only the changes of the
    training are said.
    """

    # How the policy adds up the sizes of a batch. None: sizes decide nothing. "sum": their sum.
    # "padded": samples times the longest. "fitted": as the run's batches were found to cost.
    cost: Literal["sum", "padded", "fitted"] | None = None
    speeds: bool = False  # the ranks' measured speeds
    capacity: tuple[float, ...] = ()  # [W] speeds that were given by hand instead
    goes_by_devices: bool = False  # speeds that the ranks' devices promise, instead
    counts: bool = False  # how many samples a rank gets is decided before which ones
    # Counts rest on the times of so many steps, whatever samples ranks had in them. 0: they do not.
    steps: int = 0


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
    foretells: bool = False  # regular pauses of ranks are foretold: see `Models.at`
    homes: bool = False  # its scheduler trains samples on the nodes that have them: see `Storage`
    streams: bool = False  # it can plan streams: speeds alone decide who trains how much
    threads: bool = False  # the policy sets CPU threads, whose effect telemetry does not show
    accounts: Accounts = Accounts()

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

    def choose(
        self,
        feedback: Feedback,
        world: int,
        memory: Mapping[str, Any],
        nodes: Ints | None = None,
        *,
        first_step: int = 0,
        uneven_steps: bool = True,
    ) -> Choice:
        """How gradients meet in the next segment.

        Args:
            feedback: as for the predictor.
            world: W.
            memory: `Problem.memory`, which holds the allocator's memory, too.
            nodes: `Problem.nodes`.
            first_step: of the segment.
            uneven_steps: the script lets ranks make different numbers of steps (`Hello`).

        Raises:
            ValueError: `world` ranks cannot train with the synchroniser that the policy chose.
        """
        if isinstance(self.synchroniser, Synchronisation):
            return Choice(self.synchroniser)
        chooser = self.synchroniser
        if nodes is not None and isinstance(chooser, NodeChooser):
            chooser = chooser.on_nodes(nodes.tolist())
        if isinstance(chooser, StepsChooser):
            chooser = chooser.on_steps(first_step, uneven=uneven_steps)
        choice = chooser.choose(feedback, world, memory.get(CHOOSER, {}))
        if problem := choice.synchroniser.problem(world):
            raise ValueError(f"policy: {self.name} chose what ranks cannot do: {problem}")
        return choice


@dataclass(frozen=True)
class Preset(Generic[P]):
    """How a policy is registered: name, summary, parameters, and how to make the policy.

    `make` gets an instance of the class `parameters`, checked. With `combines`, the presets that
    change how gradients meet can take their batches from this preset: its name is a value of their
    parameter ``batches``. Forecasts try the defaults and each of `variants`.
    """

    name: str
    summary: str
    source: str  # paper or project it comes from
    make: Callable[[P], Policy]
    parameters: type[P] = Parameters  # type: ignore[assignment]  # by default, none
    combines: bool = False  # its policy decides batches, and leaves how gradients meet to others
    variants: tuple[Mapping[str, Any], ...] = ()  # parameters that are often better than defaults
