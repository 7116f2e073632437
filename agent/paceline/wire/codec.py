"""Messages as entries of the bus.

Every entry is one message: the fields ``v`` (protocol version), ``run`` (public run id, empty for
node messages) and ``data`` (MessagePack, tagged with its type). A receiver refuses another version
and counts it; it never guesses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from paceline.wire.messages import Committed, Message, StepRecord
from paceline.wire.wording import worded

PROTOCOL_VERSION = 1
_VERSION = b"%d" % PROTOCOL_VERSION
_LONGEST = 1000  # characters of a reason, which may quote the message

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class WireError(ValueError):
    """A bus entry that this version cannot read."""


def encode(message: Message, run: str = "") -> dict[bytes, bytes]:
    """The fields of a bus entry."""
    return {
        b"v": _VERSION,
        b"run": run.encode(),
        b"data": _encoder.encode(message),
    }


def encode_steps(columns: Mapping[str, Sequence[Any]], run: str) -> dict[bytes, bytes]:
    """What `encode` gives for a `StepBatch`, from its records' fields as columns: far sooner."""
    records = list(zip(*(columns[name] for name in StepRecord.__struct_fields__), strict=True))
    return {
        b"v": _VERSION,
        b"run": run.encode(),
        b"data": _encoder.encode({"type": "steps", "records": records}),
    }


def decode(
    fields: dict[bytes, bytes], first: msgspec.msgpack.Decoder[Any] | None = None
) -> tuple[str, Message]:
    """Run id and message of a bus entry.

    Args:
        fields: of the entry.
        first: a decoder of some messages, with types that ask for more; what it refuses is decoded
            as if it were not there.

    Raises:
        WireError: another protocol version, or not a message of this one.
    """
    version = fields.get(b"v", b"?")
    if version != _VERSION:
        other = version.decode(errors="replace")
        raise WireError(
            f"message of protocol version {other}; this is {PROTOCOL_VERSION}: "
            "install the same paceline version on agents and control plane"
        )
    try:
        run, data = fields[b"run"].decode(), fields[b"data"]
        if first is not None:
            with suppress(msgspec.ValidationError):
                return run, first.decode(data)
        return run, _decoder.decode(data)
    except Exception as error:  # anybody may write to the bus: nesting raises RecursionError, …
        words = worded(error) if isinstance(error, msgspec.ValidationError) else error
        raise WireError(f"not a paceline message: {str(words)[:_LONGEST]}") from error


def decode_all(fields: dict[bytes, bytes]) -> tuple[str, list[Message]]:
    """Return run id and messages of a bus entry, those of a `Committed` one by one.

    Raises:
        WireError: another protocol version, or not messages of this one.
    """
    run, message = decode(fields)
    if not isinstance(message, Committed):
        return run, [message]
    return run, [decode({**fields, b"data": bytes(raw)})[1] for raw in message.messages]
