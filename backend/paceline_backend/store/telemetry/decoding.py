"""Decode telemetry from bus entries, and validate most of it in the same pass."""

from __future__ import annotations

import msgspec

from paceline import wire
from paceline.wire import Message, StepBatch
from paceline_backend.store.telemetry.columns import STEPS

# Most messages are steps that can be stored unchanged.
_fitting = msgspec.msgpack.Decoder(
    msgspec.defstruct(
        StepBatch.__name__,
        [("records", list[STEPS.fitting])],  # type: ignore[name-defined]
        bases=(StepBatch,),
        frozen=True,
        tag="steps",
    )
)


def decode(fields: dict[bytes, bytes]) -> tuple[str, Message]:
    """Decode an entry like `paceline.wire.decode`, but validate steps while decoding.

    Steps that can be stored unchanged need no further check.

    Raises:
        WireError: another protocol version, or an invalid message.
    """
    return wire.decode(fields, _fitting)
