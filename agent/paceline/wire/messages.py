"""What travels between ranks, agents and control plane: typed messages and their streams.

Every bus entry is one message: the fields ``v`` (protocol version), ``run`` (public run id, empty
for node messages) and ``data`` (MessagePack, tagged with its type). A receiver refuses another
version and counts it; it never guesses. Messages are values: nobody changes one after making it.

Streams, and who writes and reads each:

========================  =========================  ===========================================
stream                    writer → reader            messages
========================  =========================  ===========================================
``TELEMETRY``             ranks, agents → ingest     `Hello`, `StepBatch`, `RoundBatch`,
                                                     `Adopted`, `RunState`, `NodeState`
``live(run)``             ingest → controllers, web  the same but rounds, once committed
                          web, worker → the same     `SwitchRequested`, `RunChanged`
``control(run)``          controller → leader        `Proposal`
                          web → leader               `StopTraining`
``commands(node)``        web → agent                `Launch`, `Kill`
========================  =========================  ===========================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.wire.synchronisation import ALLREDUCE, Synchronisation

PROTOCOL_VERSION = 1

TELEMETRY = "paceline:telemetry"
INGEST_GROUP = "ingest"


def live(run: str) -> str:
    """The stream of what is committed about a run; bounded, for controllers and open pages."""
    return f"paceline:run:{run}:live"


def control(run: str) -> str:
    """The stream from a run's controller to its leader."""
    return f"paceline:run:{run}:control"


def commands(node: str) -> str:
    """The stream of commands to a node's agent."""
    return f"paceline:node:{node}:commands"


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One rank's step. Times in seconds; `load` in the user's size unit."""

    attempt: int  # how often TorchElastic restarted the ranks before
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
    waited_s: float  # response time: from the end of the round before until this one was called
    reduced_s: float  # from then until its sum was there
    bytes: int  # that the rank gave to it
    ended_at: float  # Unix time
    copied_s: float = 0.0  # copying what the rank gave from its device to one vector on the CPU


class RoundBatch(msgspec.Struct, frozen=True, tag="rounds"):
    """What one rank's telemetry thread flushes at once."""

    records: list[RoundRecord]


AGES = 16  # of gradients that `RoundRecord.staleness` tells apart at most
MOST_WAITING = 4  # gradients of a rank for the same partial round, before it calls it itself


class Segment(msgspec.Struct, frozen=True):
    """The plan of steps [first_step, first_step + len(counts)), all in one epoch, and its origin.

    With the run's sizes and the feedback rows of `feedback`, the same policy code gives the same
    plan again. Ranks check nothing: the leader validates before it adopts.
    """

    seq: int  # counts adopted segments of this attempt from 0
    epoch: int
    first_step: int
    counts: list[list[int]]  # [step][rank] samples
    indices: bytes  # little-endian uint32, all steps and ranks in order; see `assignments`
    policy: str  # preset's name
    version: int  # policy version of the run: 0 at the start, +1 at each switch
    source: str  # "controller", or "coast": planned by the leader because nothing came in time
    epoch_end: bool  # the epoch is over after this segment
    ett_s: list[list[float]] = []  # [step][rank] expected compute time; empty: unknown
    shares: list[float] = []  # of the load, per rank, for coasting; empty: equal counts
    feedback: list[tuple[int, int]] = []  # half-open ranges of the steps that the predictor saw
    shuffled: bool = False  # the shuffler ran before this segment was scheduled
    moved: int = 0  # samples that got another holder: shuffled, or given to another rank
    plan_s: float = 0.0  # what planning took
    memory: dict[str, Any] = {}  # what the policy wants to know when it plans the next one
    threads: list[int] = []  # CPU threads of each rank; empty: as the script set them
    synchroniser: Synchronisation = ALLREDUCE
    why: str = ""  # this synchroniser, for the operator; empty: the policy has no other

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.counts)

    def assignments(self) -> list[list[npt.NDArray[np.int64]]]:
        """Sample indices, [step][rank] → int64 array (possibly empty)."""
        flat = np.frombuffer(self.indices, dtype="<u4").astype(np.int64)
        ends = np.cumsum([n for row in self.counts for n in row])
        parts = iter(np.split(flat, ends[:-1]) if len(ends) else [])
        return [[next(parts) for _ in row] for row in self.counts]


def pack_indices(assignments: list[list[npt.NDArray[np.int64]]]) -> tuple[list[list[int]], bytes]:
    """`Segment.counts` and `Segment.indices` of [step][rank] index arrays."""
    counts = [[len(part) for part in step] for step in assignments]
    flat = [part for step in assignments for part in step]
    joined = np.concatenate(flat) if flat else np.empty(0)
    return counts, joined.astype("<u4").tobytes()


class Adopted(msgspec.Struct, frozen=True, tag="adopted"):
    """The leader's record of a segment that the ranks follow: the truth about what ran."""

    attempt: int
    segment: Segment
    adopted_at: float


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The leader's introduction, once per attempt: all that planning needs to know."""

    attempt: int
    world: int
    global_batch: int
    seed: int
    sizes: bytes  # little-endian float64, one per sample
    loss_mean: str  # "samples" or "size": which mean the user's loss takes
    drop_last: bool
    epochs: int | None  # None: unknown
    lookahead: int  # steps that data loader workers fetch ahead of training
    started_at: float
    paceline: str  # versions
    torch: str
    device: str  # "cpu" or the accelerator's name
    epoch: int = 0  # where this attempt starts: a resumed run's epoch,
    step: int = 0  # its first step,
    used: bytes = b""  # and the samples used in that epoch before (as `Segment.indices`)
    emulated: dict[str, Any] | None = None  # device speeds: an `Emulation`
    # Of each rank, from the profiling phase if there was one: samples and seconds of trial steps,
    profiles: list[list[tuple[int, float]]] = []
    limits: list[int] = []  # and how many samples fit into its memory; empty: unknown

    def sizes_array(self) -> npt.NDArray[np.float64]:
        """λ of every sample, shape [N]."""
        return np.frombuffer(self.sizes, dtype="<f8").astype(np.float64)

    @property
    def samples(self) -> int:
        """How many samples the data set has."""
        return len(self.sizes) // 8


class RunState(msgspec.Struct, frozen=True, tag="run_state"):
    """A change of a run's life: from the agent that supervises it, or from `paceline run`.

    The last one is repeated every few seconds until the run ends, as a sign of life.
    """

    state: str  # "starting", "running", "finished", "failed", "stopped"
    at: float
    node: str
    attempt: int = 0
    exit_code: int | None = None
    # Of a failure. First line: rank, exception and where its log is; then the log's last lines.
    message: str | None = None
    dropped: int = 0  # telemetry records that did not fit into the bounded spool


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


class StopTraining(msgspec.Struct, frozen=True, tag="stop_training"):
    """End the run at the next segment: loaders run dry, the script goes on to its last lines."""

    reason: str


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """Start a run on this node."""

    script: str
    args: list[str]
    nproc: int
    env: dict[str, str]
    cwd: str | None = None
    max_restarts: int = 0


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End a run's processes now (SIGTERM, then SIGKILL)."""

    reason: str


class RunChanged(msgspec.Struct, frozen=True, tag="run_changed"):
    """The control plane itself ended a run: who shows or plans it should look."""


Message = (
    StepBatch
    | RoundBatch
    | Adopted
    | Hello
    | RunState
    | NodeState
    | SwitchRequested
    | Proposal
    | StopTraining
    | Launch
    | Kill
    | RunChanged
)

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class WireError(ValueError):
    """A bus entry that this version cannot read."""


def encode(message: Message, run: str = "") -> dict[bytes, bytes]:
    """The fields of a bus entry."""
    return {
        b"v": b"%d" % PROTOCOL_VERSION,
        b"run": run.encode(),
        b"data": _encoder.encode(message),
    }


def encode_steps(columns: Mapping[str, Sequence[Any]], run: str) -> dict[bytes, bytes]:
    """What `encode` gives for a `StepBatch`, from its records' fields as columns: far sooner."""
    records = list(zip(*(columns[name] for name in StepRecord.__struct_fields__), strict=True))
    return {
        b"v": b"%d" % PROTOCOL_VERSION,
        b"run": run.encode(),
        b"data": _encoder.encode({"type": "steps", "records": records}),
    }


def decode(fields: dict[bytes, bytes]) -> tuple[str, Message]:
    """Run id and message of a bus entry.

    Raises:
        WireError: another protocol version, or not a message of this one.
    """
    version = fields.get(b"v", b"?").decode(errors="replace")
    if version != str(PROTOCOL_VERSION):
        raise WireError(
            f"message of protocol version {version}; this is {PROTOCOL_VERSION}: "
            "install the same paceline release on agents and control plane"
        )
    try:
        return fields[b"run"].decode(), _decoder.decode(fields[b"data"])
    except Exception as error:  # anybody may write to the bus: nesting raises RecursionError, …
        raise WireError(f"not a paceline message: {error}") from error
