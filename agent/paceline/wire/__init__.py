"""The messages that ranks, node agents and the control plane exchange over the bus.

- `messages`: the typed messages; `plan`: the plan of a segment, which some messages carry;
- `metrics`: values that scripts measure, in training and on held-out data;
- `asking`: questions of the control plane to a node, and the node's answers;
- `shards`: data that is stored on nodes, and how a plan moves this data between nodes;
- `synchronisation`: how ranks synchronise gradients in a segment, one type for each way;
- `states`: the states of a run and their order;
- `streams`: the streams of the bus, with the writers and readers of each;
- `codec`: conversion between messages and bus entries, with `WireError` for unreadable entries and
  `ForgedError` for entries whose MAC is missing or wrong;
- `sealing`: encryption of data that only the control plane and one node may read;
- `defects`: validation of values that types do not restrict enough;
- `bus`: connections to the bus.

    fields = encode(Proposal(0, plan, "me"), run="r7")
    run, message = decode(fields)

This package imports no other package of Paceline.
"""

from paceline.wire.asking import Answer, Ask
from paceline.wire.codec import (
    PROTOCOL_VERSION,
    ForgedError,
    WireError,
    decode,
    decode_all,
    decode_signed,
    encode,
    encode_steps,
    signed,
)
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
    JoinRendezvous,
    Kill,
    Launch,
    LongPhase,
    Message,
    NodeCheck,
    NodeState,
    Phase,
    Proposal,
    RankDevice,
    RoundBatch,
    RoundRecord,
    RunChanged,
    RunState,
    StepBatch,
    StepRecord,
    StopTraining,
)
from paceline.wire.metrics import (
    MOST_METRICS,
    Evaluation,
    MetricBatch,
    MetricRecord,
)
from paceline.wire.plan import CONTROLLER, LOCAL, PLANNED, Assignment, Paces, Plan, pack_samples
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
from paceline.wire.synchronisation import ALLREDUCE, SYNC_NAMES

__all__ = [
    "AGES",
    "ALLREDUCE",
    "CHANGES",
    "CHANGES_LENGTH",
    "COMMANDS_LENGTH",
    "CONTROLLER",
    "CONTROL_LENGTH",
    "ENDED",
    "FAILED_ELSEWHERE",
    "INGEST_GROUP",
    "LOCAL",
    "MOST_METRICS",
    "MOST_PENDING",
    "MOST_WHY",
    "NOWHERE",
    "OBSERVED",
    "PLANNED",
    "PROTOCOL_VERSION",
    "RENDEZVOUS_GONE",
    "SYNC_NAMES",
    "TELEMETRY",
    "Adopted",
    "Answer",
    "Ask",
    "Assignment",
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
    "JoinRendezvous",
    "Kill",
    "Launch",
    "LongPhase",
    "Message",
    "MetricBatch",
    "MetricRecord",
    "Moves",
    "NodeCheck",
    "NodeState",
    "Paces",
    "Phase",
    "Plan",
    "Proposal",
    "RankDevice",
    "RoundBatch",
    "RoundRecord",
    "RunChanged",
    "RunState",
    "Shards",
    "State",
    "StepBatch",
    "StepRecord",
    "StopTraining",
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
    "pack_samples",
    "run_telemetry",
    "signed",
    "writer_of",
]
