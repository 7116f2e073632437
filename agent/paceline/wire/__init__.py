"""What both sides say to each other.

- `messages`: what travels, as typed values; `segment`: the plan that most of it is about;
- `synchronisation`: how gradients meet in a segment, one type for each way;
- `states`: the states of a run, and which may follow which;
- `streams`: the streams of the bus, with who writes and reads each;
- `codec`: messages as entries of the bus; what cannot be read is a `WireError`;
- `bus`: connections.

    fields = encode(Proposal(0, segment, "me"), run="r7")
    run, message = decode(fields)

This room imports nothing else of Paceline. Ranks, agents and the control plane all use it.
"""

from paceline.wire.codec import PROTOCOL_VERSION, WireError, decode, encode, encode_steps
from paceline.wire.messages import (
    AGES,
    MOST_PENDING,
    MOST_WHY,
    Adopted,
    Fallback,
    Hello,
    Kill,
    Launch,
    Message,
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
from paceline.wire.segment import Segment, pack_indices
from paceline.wire.states import ENDED, State
from paceline.wire.streams import (
    COMMANDS_LENGTH,
    CONTROL_LENGTH,
    INGEST_GROUP,
    LIVE_LENGTH,
    TELEMETRY,
    commands,
    control,
    live,
)
from paceline.wire.synchronisation import ALLREDUCE, SYNCHRONISERS
from paceline.wire.synchronisation import untyped as Synchronisation

__all__ = [
    "AGES",
    "ALLREDUCE",
    "COMMANDS_LENGTH",
    "CONTROL_LENGTH",
    "ENDED",
    "INGEST_GROUP",
    "LIVE_LENGTH",
    "MOST_PENDING",
    "MOST_WHY",
    "PROTOCOL_VERSION",
    "SYNCHRONISERS",
    "TELEMETRY",
    "Adopted",
    "Fallback",
    "Hello",
    "Kill",
    "Launch",
    "Message",
    "NodeState",
    "Proposal",
    "RoundBatch",
    "RoundRecord",
    "RunChanged",
    "RunState",
    "Segment",
    "State",
    "StepBatch",
    "StepRecord",
    "StopTraining",
    "SwitchRequested",
    "Synchronisation",
    "WireError",
    "commands",
    "control",
    "decode",
    "encode",
    "encode_steps",
    "live",
    "pack_indices",
]
