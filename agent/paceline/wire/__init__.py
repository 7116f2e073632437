"""What both sides say to each other.

- `messages`: what travels, as typed values; `segment`: the plan that most of it is about;
- `metrics`: what scripts measure, in training and on held-out data;
- `asking`: what the control plane asks of a node, and what the node answers;
- `shards`: data that lives on nodes, and how a plan moves it;
- `synchronisation`: how gradients meet in a segment, one type for each way;
- `states`: the states of a run, and which may follow which; `phases`: what a rank does;
- `streams`: the streams of the bus, with who writes and reads each;
- `codec`: messages as entries of the bus; what cannot be read is a `WireError`;
- `authentic`: which entries the control plane wrote; `sealing`: what only one node may read;
- `bus`: connections.

    fields = encode(Proposal(0, segment, "me"), run="r7")
    run, message = decode(fields)

This room imports nothing else of Paceline. Ranks, agents and the control plane all use it.
"""

from paceline.wire.asking import Answer, Ask
from paceline.wire.authentic import ForgedError, decode_signed, signed
from paceline.wire.codec import (
    PROTOCOL_VERSION,
    WireError,
    decode,
    decode_all,
    encode,
    encode_steps,
)
from paceline.wire.devices import RankDevice
from paceline.wire.messages import (
    AGES,
    FAILED_ELSEWHERE,
    MOST_PENDING,
    MOST_WHY,
    OBSERVED,
    RENDEZVOUS_GONE,
    Adopted,
    CheckNode,
    Committed,
    DataEpoch,
    EndRanks,
    Fallback,
    GpuState,
    Hello,
    HelloPart,
    Kill,
    Launch,
    LongPhase,
    Meet,
    Message,
    NodeCheck,
    NodeState,
    Proposal,
    RoundBatch,
    RoundRecord,
    RunChanged,
    RunState,
    StepBatch,
    StepRecord,
    StopTraining,
    SwitchRequested,
)
from paceline.wire.metrics import (
    MOST_METRICS,
    Evaluation,
    MetricBatch,
    MetricRecord,
)
from paceline.wire.paces import Paces
from paceline.wire.phases import Phase
from paceline.wire.segment import Segment, pack_indices
from paceline.wire.shards import NOWHERE, Moves, Shards
from paceline.wire.states import ENDED, State
from paceline.wire.streams import (
    CHANGES,
    CHANGES_LENGTH,
    COMMANDS_LENGTH,
    CONTROL_LENGTH,
    INGEST_GROUP,
    TELEMETRY,
    answers,
    commands,
    control,
    is_node,
    live,
    node_telemetry,
    run_telemetry,
    writer_of,
)
from paceline.wire.synchronisation import ALLREDUCE, SYNCHRONISERS

__all__ = [
    "AGES",
    "ALLREDUCE",
    "CHANGES",
    "CHANGES_LENGTH",
    "COMMANDS_LENGTH",
    "CONTROL_LENGTH",
    "ENDED",
    "FAILED_ELSEWHERE",
    "INGEST_GROUP",
    "MOST_METRICS",
    "MOST_PENDING",
    "MOST_WHY",
    "NOWHERE",
    "OBSERVED",
    "PROTOCOL_VERSION",
    "RENDEZVOUS_GONE",
    "SYNCHRONISERS",
    "TELEMETRY",
    "Adopted",
    "Answer",
    "Ask",
    "CheckNode",
    "Committed",
    "DataEpoch",
    "EndRanks",
    "Evaluation",
    "Fallback",
    "ForgedError",
    "GpuState",
    "Hello",
    "HelloPart",
    "Kill",
    "Launch",
    "LongPhase",
    "Meet",
    "Message",
    "MetricBatch",
    "MetricRecord",
    "Moves",
    "NodeCheck",
    "NodeState",
    "Paces",
    "Phase",
    "Proposal",
    "RankDevice",
    "RoundBatch",
    "RoundRecord",
    "RunChanged",
    "RunState",
    "Segment",
    "Shards",
    "State",
    "StepBatch",
    "StepRecord",
    "StopTraining",
    "SwitchRequested",
    "WireError",
    "answers",
    "commands",
    "control",
    "decode",
    "decode_all",
    "decode_signed",
    "encode",
    "encode_steps",
    "is_node",
    "live",
    "node_telemetry",
    "pack_indices",
    "run_telemetry",
    "signed",
    "writer_of",
]
