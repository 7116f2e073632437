"""What travels between ranks, agents and control plane: typed messages.

Messages are values: nobody changes one after making it. `codec` makes bus entries of them,
`streams` says who writes and reads which.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.wire.segment import Segment
from paceline.wire.states import State

AGES = 16  # of gradients that `RoundRecord.staleness` tells apart at most
MOST_WHY = 500  # characters of `Fallback.why`
MOST_PENDING = 4  # gradients of a rank for the same partial round, before it calls it itself


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
    # Response time: from the end of the previous round until this one was called; of a mean of two
    # replicas: from the question until the other rank has it; of a mean of all: 0. Ranks compute
    # meanwhile.
    waited_s: float
    reduced_s: float  # from then until the result was there; of a mean of all: all of it, and waits
    bytes: int  # that the rank gave to it
    ended_at: float  # Unix time
    copied_s: float = 0.0  # copying what the rank gave from its device to one vector on the CPU


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

    state: State
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
    | Fallback
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
