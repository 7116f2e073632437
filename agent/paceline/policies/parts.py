"""Protocols of a policy's parts, the policy itself, and its registration as a preset.

Third parties implement the protocols; `base` describes the order in which `plan` calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, runtime_checkable

from paceline.policies.parameters import P, Parameters
from paceline.policies.values import Feedback, Ints, Models, Problem
from paceline.wire import Assignment
from paceline.wire.synchronisation import ALLREDUCE, Synchronisation

# Kind of change that a policy makes to the training, compared with plain DDP. "nothing": the only
# differences are the order of floating-point sums, and effects of dropout, bf16 or augmentation,
# which depend on how a global batch is divided. "batches": in addition, global batches contain
# other samples. "training": in addition, gradients are synchronised at other times.
Changes = Literal["nothing", "batches", "training"]

# Keys of `Plan.memory`, the state of a policy between two plans: the state of the chooser, and the
# record of regular pauses (module `pauses`). All other keys are the state of the allocator.
CHOOSER, PAUSES = "synchroniser", "pauses"


class Predictor(Protocol):
    """A part that learns, from feedback, how long each worker takes for a batch."""

    def fit(self, feedback: Feedback, world: int) -> Models:
        """Return the models of all workers; `Models.unknown` while the feedback does not suffice.

        Called first, for every segment, with feedback of the newest steps.
        """
        ...


@dataclass(frozen=True)
class Allocation:
    """Division of a full global batch: the number of samples that each worker gets."""

    # Number of samples of each worker; the sum is the global batch.
    counts: Ints  # [W]
    # State of the allocator, which the next call gets in ``problem.memory``. It may contain
    # strings, numbers, and lists and mappings of these.
    memory: Mapping[str, Any]
    # CPU threads of each rank; empty: leave them unchanged.
    threads: tuple[int, ...] = ()
    # Models that `plan` uses after the allocator: for the scheduler and the expected times (ETT).
    # None: the models that the predictor returned.
    models: Models | None = None


class Allocator(Protocol):
    """A part that chooses how many samples each worker gets; the scheduler picks the samples."""

    def allocate(self, problem: Problem, models: Models, feedback: Feedback) -> Allocation:
        """Return each worker's number of samples in a full global batch of the next segment.

        Called for every segment, after the predictor and before `Scheduler.schedule`, which finds
        the counts in ``problem.counts``. ``problem.memory`` is the state (`Allocation.memory`) that
        the allocator returned with the last segment under this policy version; empty at first.
        """
        ...


class Scheduler(Protocol):
    """A part that chooses which samples each worker gets in the next steps."""

    def compose(self, problem: Problem, models: Models) -> Ints:
        """Return ``problem.remaining`` in the order in which steps should use the samples, [R].

        Called after `Shuffler.shuffle` at an epoch's start, at a switch and at a controller's
        takeover. Between two calls, ``problem.order`` is the returned order without the used
        samples. Computations over a whole epoch belong in this method. A scheduler that needs no
        order returns ``problem.remaining``.
        """
        ...

    def schedule(self, problem: Problem, models: Models) -> Assignment:
        """Return the samples of the next ``problem.batch_sizes()`` steps.

        Called last, for every segment. Step k holds exactly ``problem.batch_sizes()[k]`` samples,
        all from ``problem.remaining``, and no sample twice in the segment. A rank may get no
        samples. If ``problem.counts`` is set, ranks get samples in this proportion.
        """
        ...


class Shuffler(Protocol):
    """A part that chooses the worker to which each sample belongs: see `Problem.placement`."""

    def shuffle(self, problem: Problem, models: Models) -> Ints:
        """Return a new placement: the rank to which each sample belongs, [N].

        Samples that are not in ``problem.remaining`` keep their rank. Called at an epoch's start,
        at a switch and at a controller's takeover, after the predictor and before
        `Scheduler.compose`.
        """
        ...


class KeepPlacement:
    """A shuffler that never moves a sample."""

    def shuffle(self, problem: Problem, models: Models) -> Ints:
        """Return the placement unchanged."""
        return problem.placement


@dataclass(frozen=True)
class Choice:
    """The synchronisation that a chooser picks for a segment."""

    synchroniser: Synchronisation
    # Reason for the choice, as one sentence for the operator. Empty: there was no alternative.
    why: str = ""
    # State of the chooser, which its next call gets as `memory`.
    memory: Mapping[str, Any] = field(default_factory=dict)


class Chooser(Protocol):
    """A part that chooses each segment's synchronisation from the ranks' feedback."""

    def choose(self, feedback: Feedback, world: int, memory: Mapping[str, Any]) -> Choice:
        """Return the next segment's synchronisation.

        Called once for every segment, before the segment's number of steps is known, because this
        number depends on the choice. `memory` is the state (`Choice.memory`) that the chooser
        returned with the last segment under this policy version; empty at first.
        """
        ...


@runtime_checkable
class NodeChooser(Chooser, Protocol):
    """A chooser that also considers which ranks share a node."""

    def on_nodes(self, nodes: Sequence[int]) -> Chooser:
        """Return the chooser for several nodes; `nodes` has the index of each rank's node, [W]."""
        ...


@runtime_checkable
class StepsChooser(Chooser, Protocol):
    """A chooser that also considers the arguments of `on_steps`."""

    def on_steps(self, first: int, *, uneven: bool) -> Chooser:
        """Return the chooser for a segment that begins with step `first`.

        `uneven` is true if the script allows ranks to run different numbers of steps, so that fast
        ranks may take over batches of slow ranks.
        """
        ...


@dataclass(frozen=True)
class Criteria:
    """The properties of a run that a policy considers when it divides a global batch.

    Before a switch to a policy, `insight.fitness` compares these properties with the run's
    measurements, and warns if the policy ignores a property that matters. By default a policy
    considers no property, like plain DDP.
    """

    # The cost that the policy computes from the sizes of a batch. None: the policy ignores sizes.
    # "sum": sum of the sizes. "padded": number of samples times the longest size. "fitted": a cost
    # fitted to the run's batches.
    cost: Literal["sum", "padded", "fitted"] | None = None
    # True if the policy uses the ranks' measured speeds.
    speeds: bool = False
    # Speeds that an operator gave, used instead of measured speeds.
    capacity: tuple[float, ...] = ()  # [W]
    # True if the policy uses the nominal speeds of the ranks' devices instead of measured speeds.
    goes_by_devices: bool = False
    # True if the policy chooses the number of a rank's samples before it picks the samples.
    counts: bool = False
    # Number of newest steps from whose times the policy computes the counts, without considering
    # that these times also depend on the sizes of the steps' samples. 0: the policy does not
    # compute counts from the times of single steps.
    steps: int = 0

    @property
    def by_cost_and_speed(self) -> bool:
        """True if costs of samples and measured speeds decide which rank gets which samples."""
        return self.cost is not None and self.speeds and not self.counts


@dataclass(frozen=True)
class Policy:
    """A complete policy: one part of each kind, and the name of its preset."""

    name: str
    predictor: Predictor
    scheduler: Scheduler
    shuffler: Shuffler
    allocator: Allocator | None = None
    synchroniser: Synchronisation | Chooser = ALLREDUCE
    # False: ranks get equal counts, also while the leader plans without a controller.
    balances: bool = True
    # True if `Scheduler.compose` is also called within an epoch, when the ranks' speeds or the cost
    # of a batch have changed.
    recomposes: bool = False
    # True if each global batch holds the same samples as under plain DDP.
    plain_batches: bool = False
    # True if plans forecast regular pauses of ranks: see `Models.at`.
    foretells: bool = False
    # True if the scheduler assigns samples to ranks of the nodes that store them: see `Storage`.
    homes: bool = False
    # True if the policy can plan streams.
    streams: bool = False
    # True if the policy sets the ranks' numbers of CPU threads. A what-if cannot simulate a switch
    # to such a policy, because telemetry does not show the effect of threads.
    threads: bool = False
    # True if the ranks of a run that begins with the policy are profiled before the first step, if
    # the script allows it; see `Problem.profiles`.
    profiles: bool = False
    criteria: Criteria = Criteria()

    @property
    def relaxed(self) -> bool:
        """True if there may be steps in which ranks do not wait for all others."""
        return self.synchroniser != ALLREDUCE

    @property
    def changes(self) -> Changes:
        """The policy's changes to the training, compared with plain DDP with the same seed."""
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
        """Return the next segment's synchronisation and the reason for it.

        For `memory`, `nodes` and `uneven_steps` see `Problem`.

        Raises:
            ValueError: `world` ranks cannot train with the synchronisation that the policy chose.
        """
        if isinstance(self.synchroniser, Synchronisation):
            return Choice(self.synchroniser)
        chooser = self.synchroniser
        if nodes is not None and isinstance(chooser, NodeChooser):
            chooser = chooser.on_nodes(nodes.tolist())
        if isinstance(chooser, StepsChooser):
            chooser = chooser.on_steps(first_step, uneven=uneven_steps)
        choice = chooser.choose(feedback, world, memory.get(CHOOSER, {}))
        if defect := choice.synchroniser.defect(world):
            raise ValueError(
                f"policy: {self.name} chose a synchronisation that {world} ranks cannot run: "
                f"{defect}"
            )
        return choice


@dataclass(frozen=True)
class Preset(Generic[P]):
    """A registered policy: name, summary, parameters, and a function that makes the policy.

    `make` gets a checked instance of the class `parameters`. If `combines` is True, the policy
    divides the samples among the ranks, and presets that relax synchronisation can use this
    division: the preset's name is then a legal value of their parameter ``batches``. `source` is
    the paper or project that the policy comes from. `variants` are sets of parameters that are
    often better than the defaults; forecasts try the defaults and each variant.
    """

    name: str
    summary: str
    source: str
    make: Callable[[P], Policy]
    parameters: type[P] = Parameters  # type: ignore[assignment]
    combines: bool = False
    variants: tuple[Mapping[str, Any], ...] = ()
