"""What travels between ranks, agents and control plane: typed messages.

Messages are values: nobody changes one after making it. `codec` makes bus entries of them,
`streams` says who writes and reads which.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.wire.asking import Answer, Ask
from paceline.wire.devices import RankDevice
from paceline.wire.metrics import Evaluation, MetricBatch
from paceline.wire.phases import Phase
from paceline.wire.segment import Segment
from paceline.wire.shards import Shards
from paceline.wire.states import State

OBSERVED = "observed"  # in place of a policy: the script divides its batches itself
AGES = 16  # of gradients that `RoundRecord.staleness` tells apart at most
MOST_WHY = 500  # characters of `Fallback.why`
RENDEZVOUS_GONE = "the rendezvous at "  # begins `RunState.message` of a launcher that lost it
# Begins `RunState.message` of a launcher whose ranks failed because another node's did.
FAILED_ELSEWHERE = "the run failed on "
MOST_PENDING = 4  # gradients of a rank for the same partial round, before it calls it itself


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One rank's step. Times in seconds; `load` in the user's size unit."""

    attempt: int  # how often all ranks were started before
    rank: int
    seq: int  # counts this rank's records of this attempt from 0: a gap is a lost record
    step: int  # counts global steps of the run from 0, across epochs
    epoch: int
    segment: int  # `Segment.seq` of the plan that the step followed
    samples: int  # n_j: samples of this rank's local batch
    load: float  # Λ_j: sum of their sizes
    data_s: float  # waiting for the data loader
    compute_s: float  # T_j: forward + backward, without waiting or communication
    sync_s: float  # from the last gradient to the end of the reduction: wait + communication
    step_s: float  # from this step's start to the next one's
    ended_at: float  # Unix time
    ett_s: float | None = None  # what the plan expected compute_s to be
    loss: float | None = None
    memory_bytes: int = 0  # peak of the device, or resident set of the process on CPU
    squares: float = 0.0  # Σλ² of the local batch
    longest: float = 0.0  # max λ of it
    recompiles: int = 0  # how often torch.compile compiled a function again in it


class StepBatch(msgspec.Struct, frozen=True, tag="steps"):
    """What one rank's telemetry thread flushes at once."""

    records: list[StepRecord]


class RoundRecord(msgspec.Struct, frozen=True, array_like=True):
    """One exchange of a relaxed synchroniser: a partial reduction, or a mean of replicas.

    One of its ranks tells it; what it tells is the same on all, but for the times.
    """

    attempt: int
    rank: int  # that tells it
    seq: int  # counts this rank's records of rounds of this attempt from 0
    segment: int  # `Segment.seq`
    number: int  # of the round in its segment, from 0
    step: int  # that the rank was in
    world: int  # ranks that took part, with something to give or with nothing
    contributors: int  # that gave something: gradients, or a replica
    # Gradients that went in, by how many rounds old (of two replicas: by how many steps behind the
    # other); the last: or older.
    staleness: list[int]
    dropped: int  # samples whose gradients were too old
    # Response time: from the end of the previous round until this one was called; of a mean of two
    # replicas: from the question until the other rank has it; of a mean of all: 0. Ranks compute
    # meanwhile.
    waited_s: float
    reduced_s: float  # from then until the result was there; of a mean of all: all of it, and waits
    bytes: int  # that the rank gave to it
    ended_at: float  # Unix time
    copied_s: float  # copying what the rank gave from its device to one vector on the CPU


class RoundBatch(msgspec.Struct, frozen=True, tag="rounds"):
    """What one rank's telemetry thread flushes at once."""

    records: list[RoundRecord]


class Adopted(msgspec.Struct, frozen=True, tag="adopted"):
    """The leader's record of a segment that the ranks follow: the truth about what ran."""

    attempt: int
    segment: Segment
    adopted_at: float


class Fallback(msgspec.Struct, frozen=True, tag="fallback"):
    """Ranks all-reduce gradients in a segment in spite of its synchroniser. Rank 0 sends it.

    The script does not suit the synchroniser, or has not shown yet that it does.
    """

    attempt: int
    segment: int  # `Segment.seq`
    why: str  # for the operator: a clause without a full stop, of at most `MOST_WHY` characters


class LongPhase(msgspec.Struct, frozen=True, tag="long-phase"):
    """A rank has been doing the same for seconds. It says so again while that goes on."""

    attempt: int
    rank: int
    step: int  # that it is in, or its last before; -1: before its first
    phase: Phase
    since_s: float  # how long it has been doing this
    at: float  # Unix time


class DataEpoch(msgspec.Struct, frozen=True, tag="data-epoch"):
    """What moved to a rank's node for an epoch, and how the rank's steps found their samples in it.

    Each rank sends it at the epoch's end. What moved is told by the first rank of each node.
    """

    attempt: int
    rank: int
    epoch: int
    node: str
    planned_bytes: int  # that the plan moves to the node for this epoch, less what it has still
    moved_bytes: int  # of these, what was fetched ahead
    moved: int  # and how many samples that were
    moved_s: float  # from the plan until the last of them was there
    read_bytes: int  # that the rank's steps read from the source, as the node did not have them
    read: int  # and how many samples that were
    waits: int  # steps of the rank that had to wait for such reads
    waited_s: float  # and for how long
    held_bytes: int  # in the node's directory at the epoch's end
    at: float  # Unix time


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The leader's introduction, once per attempt: all that planning needs to know."""

    attempt: int
    world: int
    global_batch: int
    seed: int
    sizes: bytes  # little-endian float64, one per sample
    loss_mean: str  # "samples", "size" or "ranks": which mean the user's loss takes
    drop_last: bool
    epochs: int | None  # None: unknown
    lookahead: int  # steps that data loader workers fetch ahead of training
    started_at: float
    paceline: str  # versions
    torch: str
    device: str  # "cpu" or the accelerator's name; of ranks that differ: each once
    epoch: int = 0  # where this attempt starts: a resumed run's epoch,
    step: int = 0  # its first step,
    used: bytes = b""  # and the samples used in that epoch before (as `Segment.indices`)
    emulated: dict[str, Any] | None = None  # device speeds: an `Emulation`
    # Of each rank, from the profiling phase if there was one: samples and seconds of trial steps,
    profiles: list[list[tuple[int, float]]] = []
    limits: list[int] = []  # and how many samples fit into its memory; empty: unknown
    placement: list[str] = []  # each rank's node, by its name; empty: unknown
    uneven_steps: bool = False  # ranks may make different numbers of steps; see `Session`
    devices: list[RankDevice] = []  # of each rank; empty: unknown
    # `Session(shapes=…)`: the grid of each rank's number of samples in a step,
    grid: int = 1
    length_grid: float = 0.0  # and that of padded lengths; 0: none
    shards: Shards | None = None  # data that lives on nodes; None: each rank reads everything
    # `Session(token_budget=…)`: what a step holds, in the unit of the sizes, in the epoch's order;
    # then `global_batch` is a step's mean number of samples. None: each has `global_batch` samples.
    token_budget: float | None = None
    token_limits: list[float] = []  # what each rank's part of a step may hold; empty: no limits
    steps_per_epoch: int | None = None  # with a token budget; epochs differ by a few steps
    stream: bool = False  # the data is a stream: `sizes` is empty, and nobody knows its length
    gradient_bytes: int | None = None  # of all gradients of a rank; None: unknown

    def sizes_array(self) -> npt.NDArray[np.float64]:
        """λ of every sample, shape [N]."""
        return np.frombuffer(self.sizes, dtype="<f8").astype(np.float64)

    @property
    def samples(self) -> int | None:
        """How many samples the data set has; None: it is a stream."""
        return None if self.stream else len(self.sizes) // 8


class HelloPart(msgspec.Struct, frozen=True, tag="hello_part"):
    """A part of a `Hello` that is too large for one entry; see `parts`."""

    attempt: int
    hello: bytes  # `parts.digest` of the whole Hello as MessagePack
    number: int  # of the part, from 0
    of: int  # how many parts there are
    data: bytes


class RunState(msgspec.Struct, frozen=True, tag="run_state"):
    """A change of a run's life: from the agent that supervises it, or from `paceline run`.

    The last one is repeated every few seconds until the run ends, as a sign of life.
    """

    state: State
    at: float
    node: str
    attempt: int = 0
    exit_code: int | None = None
    # Of a failure. First line: rank, exception and where its log is; then the log's last lines.
    message: str | None = None
    dropped: int = 0  # telemetry records that did not fit into the bounded spool
    # Of a run on several nodes that starts: where this node would serve the rendezvous.
    address: str = ""
    port: int = 0
    arrived: bool = False  # its launcher is where they meet, and waits for the others


class NodeCheck(msgspec.Struct, frozen=True):
    """How fast a machine is, as its agent measured while nothing trained there."""

    compute_gflops: float  # 10⁹ operations in a second of one core, while all cores work
    memory_gbps: float  # how fast one core copies memory, GB/s
    disk_mbps: float | None  # 10⁶ bytes in a second that its data directory takes; None: unknown
    at: float  # Unix time


class GpuState(msgspec.Struct, frozen=True):
    """The state of a GPU; None: it does not say."""

    sm_mhz: int | None = None  # clock of its processors at present,
    most_sm_mhz: int | None = None  # and at most
    throttled_by: list[str] = []  # why the clock is lower, in words; empty: nothing lowers it
    temperature_c: int | None = None
    power_w: float | None = None
    ecc_errors: int | None = None  # of memory, not corrected, since the driver was loaded


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
    left: bool = False  # the agent says goodbye
    check: NodeCheck | None = None  # the newest; None: there is none yet
    gpu_states: list[GpuState] = []  # of each GPU, in the driver's order; empty: unknown


class SwitchRequested(msgspec.Struct, frozen=True, tag="switch_requested"):
    """Somebody asked for another policy; it takes effect with the first segment of this version."""

    version: int
    policy: str
    at: float


class Proposal(msgspec.Struct, frozen=True, tag="proposal"):
    """A plan that the controller offers; a later one of its `segment.seq` supersedes it."""

    attempt: int
    segment: Segment
    controller: str  # who planned: shows in logs when two controllers meet


class _Order(msgspec.Struct, frozen=True):
    reason: str
    first_attempt: int  # of the launch that is meant

    def meant(self, first_attempt: int) -> bool:
        """Whether a launch with this first attempt obeys: a later one than was meant does not."""
        return self.first_attempt >= first_attempt


class StopTraining(_Order, frozen=True, tag="stop_training"):
    """End the run at the next segment: loaders run dry, the script goes on to its last lines."""


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """Start a run on this node."""

    script: str
    args: list[str]
    nproc: int
    env: dict[str, str]
    cwd: str | None = None
    max_restarts: int = 0
    attempt: int = 0  # number of the first one: a run that goes on had others before
    sealed: bytes = b""  # `sealing.Secrets` for this node; then `env` is empty
    # On how many nodes the run trains; `nproc` ranks on each. With several, their launchers meet
    # where a `Meet` says.
    nodes_min: int = 1
    nodes_max: int = 1


class Kill(_Order, frozen=True, tag="kill"):
    """End a run's processes now (SIGTERM, then SIGKILL)."""

    leaves: bool = False  # the other nodes go on: all ranks end after the same step first


class CheckNode(msgspec.Struct, frozen=True, tag="check_node"):
    """Measure the machine again, as soon as no rank trains there; see `NodeCheck`."""


class EndRanks(msgspec.Struct, frozen=True, tag="end_ranks"):
    """Kill ranks that hold up a run: all start again, or the run fails. Obeyed once an attempt."""

    attempt: int
    ranks: list[int]  # those that another node has are left out there
    reason: str  # for logs and messages: a sentence or more


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """Where the launchers of a run on several nodes meet: at the rendezvous of one of them."""

    address: str
    port: int
    first_attempt: int  # of the launch that is meant


class RunChanged(msgspec.Struct, frozen=True, tag="run_changed"):
    """The control plane changed a run's row: its state, or a large Hello of a new attempt."""


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """Messages of a run that ingest stored together, in order, each encoded as it came."""

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
    | SwitchRequested
    | Proposal
    | StopTraining
    | Launch
    | Kill
    | EndRanks
    | CheckNode
    | Meet
    | RunChanged
    | Committed
    | Ask
    | Answer
)
