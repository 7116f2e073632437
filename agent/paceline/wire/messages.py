"""The typed messages between ranks, node agents and the control plane.

`codec` converts messages to and from entries of the bus; `streams` lists the writers and readers of
each message.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.wire.asking import Answer, Ask
from paceline.wire.metrics import Evaluation, MetricBatch
from paceline.wire.plan import Plan
from paceline.wire.shards import Shards
from paceline.wire.states import State

# Policy name of a run whose script divides its batches itself; Paceline only observes such a run.
OBSERVED = "observed"
# Maximum number of gradient ages that `RoundRecord.staleness` distinguishes.
AGES = 16
# Maximum number of characters of `Fallback.why`.
MOST_WHY = 500
# Start of `RunState.message` if a launcher lost the rendezvous.
RENDEZVOUS_GONE = "the rendezvous at "
# Start of `RunState.message` if a launcher's ranks failed because ranks of another node failed.
FAILED_ELSEWHERE = "the run failed on "
# Maximum number of a rank's gradients that wait for a partial round. If more wait, the rank calls
# the round itself.
MOST_PENDING = 4
# Maximum number of characters of a device's kind or name.
MOST_DEVICE_NAME = 200


class Phase(StrEnum):
    """A phase of a step, or of the time between two steps. A step's phases follow in this order."""

    # The rank waits for the next segment of the plan, which rank 0 stores.
    PLAN = "plan"
    # The rank waits for its batch.
    DATA = "data"
    # The rank is in the loop's body, before the last gradient or after the reduction.
    COMPUTE = "compute"
    # The rank is in the reduction of the gradients, which waits for all ranks.
    SYNC = "sync"
    # The rank saves a checkpoint between two steps. All ranks do that and wait for each other.
    CHECKPOINT = "checkpoint"
    # The rank is in the script's code outside of the loop, such as an evaluation.
    SCRIPT = "script"


class RankDevice(msgspec.Struct, frozen=True):
    """A rank's device, as the rank itself found or emulates it."""

    # PyTorch's device type: "cpu", "cuda", …
    kind: str
    # The model of the processor or accelerator.
    name: str
    # CPU cores that the rank's process may use, by its affinity and its quota.
    cores: int
    # Memory of the accelerator, or of the machine if the device is a CPU.
    memory_bytes: int
    # CPU threads with which the script computes; 0: as many as cores.
    threads: int = 0
    # Floating-point operations per second, measured in a trial; None: there was no trial.
    flops: float | None = None
    # True if the rank only behaves as if it had this device.
    emulated: bool = False

    @property
    def used_cores(self) -> int:
        """Number of cores that the rank computes with, which `threads` may limit."""
        return min(self.cores, self.threads or self.cores)

    def defect(self) -> str | None:
        """Return the first defect, which begins with the field's name; None if there is none."""
        for field, text in (("kind", self.kind), ("name", self.name)):
            if not 0 < len(text) <= MOST_DEVICE_NAME or not text.isprintable():
                value = repr(text[:MOST_DEVICE_NAME])
                return f"{field} = {value}: give 1 to {MOST_DEVICE_NAME} printable characters"
        if not 1 <= self.cores < 2**31:
            return f"cores = {self.cores}: give a whole number ≥ 1"
        for field, number in (("memory_bytes", self.memory_bytes), ("threads", self.threads)):
            if not 0 <= number < 2**62:
                return f"{field} = {number}: give a whole number ≥ 0"
        if self.flops is not None and not 0 < self.flops < math.inf:
            return f"flops = {self.flops}: give a number above 0"
        return None


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One rank's measurements of one step. `load` and sizes are in the user's size unit.

    Args:
        attempt: number of times that all ranks were started before.
        rank: the rank that measured.
        seq: number of the record among this rank's records of the attempt, from 0. A gap means
            that a record was lost.
        step: global step of the run, from 0, across epochs and attempts.
        epoch: the step's epoch.
        segment: `Plan.seq` of the plan that the step followed.
        samples: n_j, samples of this rank's local batch.
        load: Λ_j, sum of these samples' sizes.
        data_s: seconds of waiting for the data loader.
        compute_s: T_j, seconds of the forward and backward passes, without waits or communication.
        sync_s: seconds from the last gradient to the end of the reduction, which include waiting
            and communication.
        step_s: seconds from this step's start to the start of the next step.
        ended_at: Unix time of the step's end.
        ett_s: the plan's forecast of `compute_s`, in seconds.
        loss: the loss that the script reported.
        memory_bytes: peak memory of the device, or resident set of the process on a CPU.
        squares: Σλ² over the local batch, where λ is a sample's size.
        longest: largest size of a sample in the local batch.
        recompiles: how often torch.compile recompiled a function in this step.
    """

    attempt: int
    rank: int
    seq: int
    step: int
    epoch: int
    segment: int
    samples: int
    load: float
    data_s: float
    compute_s: float
    sync_s: float
    step_s: float
    ended_at: float
    ett_s: float | None = None
    loss: float | None = None
    memory_bytes: int = 0
    squares: float = 0.0
    longest: float = 0.0
    recompiles: int = 0


class StepBatch(msgspec.Struct, frozen=True, tag="steps"):
    """Step records that one rank's telemetry thread sends together."""

    records: list[StepRecord]


class RoundRecord(msgspec.Struct, frozen=True, array_like=True):
    """One exchange of relaxed synchronisation: a partial reduction, or a mean of replicas.

    Only one of the participating ranks reports the exchange. All of them would report the same
    values, except for the times.
    """

    attempt: int
    # The rank that reports.
    rank: int
    # Number of the record among this rank's round records of the attempt, from 0.
    seq: int
    # The segment's number, `Plan.seq`.
    segment: int
    # Number of the round in its segment, from 0.
    number: int
    # The step that the rank was in.
    step: int
    # Number of ranks that could contribute: all ranks, the ranks of a group, or the two of a pair.
    world: int
    # Number of ranks that contributed gradients or a replica.
    contributors: int
    # Number of contributed gradients by age in rounds. For a mean of two replicas: number of
    # replicas by age in steps, where the newer replica has age 0. The last entry counts its own
    # age and all higher ages.
    staleness: list[int]
    # Number of samples whose gradients were dropped because they were too old.
    dropped: int
    # For a partial round: seconds from the end of the previous round until this round was called.
    # For a mean of two replicas: from the rank's request until the other rank receives it. For a
    # mean of all replicas: 0. Ranks compute meanwhile.
    waited_s: float
    # Seconds from the end of `waited_s` until the result arrived. For a mean of all replicas: the
    # whole exchange, including the wait for the slowest rank.
    reduced_s: float
    # Number of bytes that the rank contributed.
    bytes: int
    ended_at: float  # Unix time
    # Seconds for copying the rank's contribution from its device to one vector on the CPU.
    copied_s: float


class RoundBatch(msgspec.Struct, frozen=True, tag="rounds"):
    """Round records that one rank's telemetry thread sends together."""

    records: list[RoundRecord]


class Adopted(msgspec.Struct, frozen=True, tag="adopted"):
    """The leader's record of a segment that ranks train.

    No other message proves which plan the ranks follow.
    """

    attempt: int
    plan: Plan
    adopted_at: float


class Fallback(msgspec.Struct, frozen=True, tag="fallback"):
    """Rank 0's notice that ranks all-reduce gradients in a segment planned as relaxed.

    Either the script does not suit the planned synchronisation, or it has not yet shown that it
    does.
    """

    attempt: int
    # The segment's number, `Plan.seq`.
    segment: int
    # For the operator: a clause without a full stop, of at most `MOST_WHY` characters.
    why: str


class LongPhase(msgspec.Struct, frozen=True, tag="long-phase"):
    """A rank's notice that it has been in the same phase for several seconds.

    The rank repeats the notice while the phase continues.
    """

    attempt: int
    rank: int
    # The rank's current step, or its last one; -1: before its first step.
    step: int
    phase: Phase
    # Seconds that the rank has been in this phase.
    since_s: float
    at: float  # Unix time


class DataEpoch(msgspec.Struct, frozen=True, tag="data-epoch"):
    """Movements of samples to a rank's node for an epoch, and the rank's reads from the source.

    Each rank sends the message at the epoch's end. Only the first rank of each node fills in the
    fields about movements.
    """

    attempt: int
    rank: int
    epoch: int
    node: str
    # Bytes that the plan moves to the node for this epoch, without those that the node has already.
    planned_bytes: int
    # Part of `planned_bytes` that was fetched before a step needed it.
    moved_bytes: int
    # Number of samples that were fetched before a step needed them.
    moved: int
    # Seconds from the arrival of the plan until the last of these samples was stored.
    moved_s: float
    # Bytes that the rank's steps read from the source because the node did not have them.
    read_bytes: int
    # Number of samples that the rank's steps read from the source.
    read: int
    # Number of steps of the rank that had to wait for reads from the source.
    waits: int
    # Seconds that the rank's steps waited for reads from the source.
    waited_s: float
    # Bytes in the node's directory at the epoch's end.
    held_bytes: int
    at: float  # Unix time


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The leader's description of an attempt, sent once: all that planning needs to know."""

    attempt: int
    world: int
    global_batch: int
    seed: int
    # Sizes of the samples: little-endian float64, one per sample.
    sizes: bytes
    # "samples" or "size": the script's loss is a mean over samples or over their total size.
    # "ranks": the loss is already scaled for the mean over ranks.
    loss_mean: str
    drop_last: bool
    # Number of epochs of the run; None: unknown.
    epochs: int | None
    # Number of steps that data loader workers fetch ahead of training.
    lookahead: int
    started_at: float
    # Versions of Paceline and PyTorch.
    paceline: str
    torch: str
    # "cpu" or the accelerator's name. If the ranks' devices differ: each device name once.
    device: str
    # Position at which this attempt starts: epoch, first step, and the samples of the epoch that
    # were used before, packed as in `Plan.indices`.
    epoch: int = 0
    step: int = 0
    used: bytes = b""
    # Emulated device speeds: an `Emulation` as plain data.
    emulated: dict[str, Any] | None = None
    # For each rank, a list of pairs: number of samples and seconds of each trial step of the
    # profiling phase. Empty: there was no profiling phase.
    profiles: list[list[tuple[int, float]]] = []
    # Number of samples that fit into each rank's memory; empty: unknown.
    limits: list[int] = []
    # The name of each rank's node; empty: unknown.
    placement: list[str] = []
    # True if ranks may make different numbers of steps; see `Session`.
    uneven_steps: bool = False
    # The device of each rank; empty: unknown.
    devices: list[RankDevice] = []
    # `Session(shapes=…)`: each rank's number of samples in a step is a multiple of `grid`, and
    # padded lengths are multiples of `length_grid`; 0: any length.
    grid: int = 1
    length_grid: float = 0.0
    # Data that is stored on nodes; None: each rank reads all data from the source.
    shards: Shards | None = None
    # `Session(token_budget=…)`: maximum total size of a step's samples, which are taken in the
    # epoch's order; `global_batch` is then the mean number of samples of a step. None: each step
    # has `global_batch` samples.
    token_budget: float | None = None
    # Maximum total size of each rank's local batch with a token budget; empty: no limits.
    token_limits: list[float] = []
    # Number of steps per epoch, given only with a token budget; epochs differ by a few steps.
    steps_per_epoch: int | None = None
    # True if the data is a stream: `sizes` is empty, and the length is unknown.
    stream: bool = False
    # Size in bytes of all gradients of a rank; None: unknown.
    gradient_bytes: int | None = None

    def sizes_array(self) -> npt.NDArray[np.float64]:
        """Return the size λ of every sample."""
        return np.frombuffer(self.sizes, dtype="<f8").astype(np.float64)

    @property
    def samples(self) -> int | None:
        """Number of samples in the data set; None for a stream."""
        return None if self.stream else len(self.sizes) // 8


class HelloPart(msgspec.Struct, frozen=True, tag="hello_part"):
    """A part of a `Hello` that is too large for one entry; see `parts`."""

    attempt: int
    # `parts.digest` of the whole Hello as MessagePack.
    hello: bytes
    # Number of this part, from 0.
    number: int
    # Total number of parts.
    of: int
    data: bytes


class RunState(msgspec.Struct, frozen=True, tag="run_state"):
    """A change of a run's state, from its agent, `paceline run` or `paceline observe`.

    The sender repeats the last change every few seconds until the run ends, as a sign of life.
    """

    state: State
    at: float
    node: str
    attempt: int = 0
    exit_code: int | None = None
    # The reason of a failure. First line: rank, exception and the path of the log. Then the last
    # lines of that log.
    message: str | None = None
    # Number of telemetry records that ranks have lost, for example because the spool was full.
    dropped: int = 0
    # For a run that starts on several nodes: address at which this node could serve the rendezvous.
    address: str = ""
    port: int = 0
    # True if the node's launcher has joined the rendezvous and waits for the other launchers.
    arrived: bool = False


class NodeCheck(msgspec.Struct, frozen=True):
    """A machine's speed, which its agent measured while no training ran there."""

    # Speed of one core while all cores work, in 10⁹ operations per second.
    compute_gflops: float
    # Speed at which one core copies memory, in GB/s.
    memory_gbps: float
    # Speed of writing to the disk of the data directory, in 10⁶ bytes per second; None: unknown.
    disk_mbps: float | None
    at: float  # Unix time


class GpuState(msgspec.Struct, frozen=True):
    """The state of a GPU. A field is None if the GPU does not report the value."""

    # Current and highest clock of the GPU's processors.
    sm_mhz: int | None = None
    most_sm_mhz: int | None = None
    # Reasons why the clock is reduced, in words; empty: it is not reduced.
    throttled_by: list[str] = []
    temperature_c: int | None = None
    power_w: float | None = None
    # Number of uncorrected memory errors since the driver was loaded.
    ecc_errors: int | None = None


class NodeState(msgspec.Struct, frozen=True, tag="node_state"):
    """An agent's registration and heartbeat."""

    node: str
    hostname: str
    cores: int
    memory_bytes: int
    gpus: list[str]
    at: float
    paceline: str
    runs: list[str] = []
    # True if the agent is shutting down.
    left: bool = False
    # The newest check; None: there is none yet.
    check: NodeCheck | None = None
    # The state of each GPU, in the driver's order; empty: unknown.
    gpu_states: list[GpuState] = []


class Proposal(msgspec.Struct, frozen=True, tag="proposal"):
    """A plan that the controller offers.

    A proposal supersedes earlier proposals for the same `plan.seq`.
    """

    attempt: int
    plan: Plan
    # The id of the controller that made the plan.
    controller: str
    # The policy's parameters that are not the defaults. If controllers are away, rank 0 plans on
    # with the last proposal's policy.
    parameters: dict[str, Any] = {}


class _Order(msgspec.Struct, frozen=True):
    reason: str
    # The first attempt of the launch to which this order applies.
    first_attempt: int

    def meant(self, first_attempt: int) -> bool:
        """Return True if a launch with this first attempt must obey the order.

        A launch that began after the intended launch does not obey.
        """
        return self.first_attempt >= first_attempt


class StopTraining(_Order, frozen=True, tag="stop_training"):
    """An order to end the run at the next segment.

    Data loaders yield no more batches, and the script continues to its last line.
    """


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """An order to start a run on this node."""

    script: str
    args: list[str]
    nproc: int
    env: dict[str, str]
    cwd: str | None = None
    max_restarts: int = 0
    # Number of the first attempt: above 0 for a resumed run.
    attempt: int = 0
    # `sealing.Secrets` encrypted for this node; then `env` is empty.
    sealed: bytes = b""
    # Bounds on the number of nodes, with `nproc` ranks on each. On several nodes, the launchers use
    # the rendezvous that a `JoinRendezvous` names.
    nodes_min: int = 1
    nodes_max: int = 1


class Kill(_Order, frozen=True, tag="kill"):
    """An order to end a run's processes now (SIGTERM, then SIGKILL)."""

    # True if the run continues on the other nodes: then all ranks first end after the same step.
    leaves: bool = False


class CheckNode(msgspec.Struct, frozen=True, tag="check_node"):
    """An order to measure the machine again as soon as no rank trains there; see `NodeCheck`."""


class EndRanks(msgspec.Struct, frozen=True, tag="end_ranks"):
    """An order, obeyed once per attempt, to kill ranks that block a run.

    All ranks then restart, or the run fails.
    """

    attempt: int
    # Ranks to kill. Some may be on other nodes; a node ignores those.
    ranks: list[int]
    # One or more sentences for logs and messages.
    reason: str


class JoinRendezvous(msgspec.Struct, frozen=True, tag="join_rendezvous"):
    """The address of the rendezvous for the launchers of a run on several nodes.

    One of the nodes serves the rendezvous.
    """

    address: str
    port: int
    # The first attempt of the launch to which this message applies.
    first_attempt: int


class RunChanged(msgspec.Struct, frozen=True, tag="run_changed"):
    """Notice that a run has a new state, policy or Hello, which the database contains."""


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """Messages of a run that ingest stored together, in their order, each encoded as it arrived."""

    messages: list[msgspec.Raw]


Message = (
    StepBatch
    | MetricBatch
    | Evaluation
    | RoundBatch
    | Adopted
    | Fallback
    | LongPhase
    | DataEpoch
    | Hello
    | HelloPart
    | RunState
    | NodeState
    | Proposal
    | StopTraining
    | Launch
    | Kill
    | EndRanks
    | CheckNode
    | JoinRendezvous
    | RunChanged
    | Committed
    | Ask
    | Answer
)
