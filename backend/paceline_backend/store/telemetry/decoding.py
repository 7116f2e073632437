"""Reads telemetry from bus entries, and checks most of it on the way."""

from __future__ import annotations

import msgspec

from paceline import wire
from paceline.wire import Message, StepBatch
from paceline_backend.store.telemetry.columns import STEPS

# Most messages are steps that can be stored as they are.
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
    """As `paceline.wire.decode`. Steps that can be stored as they are need no further check.

    Raises:
        WireError: another protocol version, or not a message of this one.
    """
    return wire.decode(fields, _fitting)
