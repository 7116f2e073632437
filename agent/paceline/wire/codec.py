"""Conversion between messages and entries of the bus, and proof of who wrote an entry.

Every entry is one message with the fields ``v`` (protocol version), ``run`` (public run id, empty
for a node's message) and ``data`` (MessagePack, tagged with the message's type). A receiver rejects
and counts entries of another version.

A program that reaches the bus may be able to write to any of its streams. So entries on
``control(run)``, ``commands(node)`` and ``answers(node, id)`` carry the field ``mac``: HMAC-SHA256
over the stream's name and all other fields, made with a key that only the control plane and that
run or node have.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from paceline.wire.defects import worded
from paceline.wire.messages import Committed, Message, StepRecord

PROTOCOL_VERSION = 1
_VERSION = b"%d" % PROTOCOL_VERSION
# Maximum number of characters of an error's reason, which may quote the message.
_LONGEST_REASON = 1000

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_FIELDS = (b"v", b"run", b"data")


class WireError(ValueError):
    """A bus entry that this version cannot read."""


def encode(message: Message, run: str = "") -> dict[bytes, bytes]:
    """Return the bus entry for a message; `run` is the run's id, empty for a node's message."""
    return {
        b"v": _VERSION,
        b"run": run.encode(),
        b"data": _encoder.encode(message),
    }


def encode_steps(columns: Mapping[str, Sequence[Any]], run: str) -> dict[bytes, bytes]:
    """Encode a `StepBatch` from the columns of its records, by field name; faster than `encode`."""
    records = list(zip(*(columns[name] for name in StepRecord.__struct_fields__), strict=True))
    return {
        b"v": _VERSION,
        b"run": run.encode(),
        b"data": _encoder.encode({"type": "steps", "records": records}),
    }


def decode(
    fields: dict[bytes, bytes], first: msgspec.msgpack.Decoder[Any] | None = None
) -> tuple[str, Message]:
    """Return the run id and the message of a bus entry.

    `first` is a decoder that has stricter types for some of the messages. A message that `first`
    rejects is decoded as if `first` were None.

    Raises:
        WireError: the entry has another protocol version, or holds no message of this version.
    """
    version = fields.get(b"v", b"?")
    if version != _VERSION:
        other = version.decode(errors="replace")
        raise WireError(
            f"the message has protocol version {other}, but this paceline reads version "
            f"{PROTOCOL_VERSION}: install the same paceline version on agents and control plane"
        )
    try:
        run, data = fields[b"run"].decode(), fields[b"data"]
        if first is not None:
            with suppress(msgspec.ValidationError):
                return run, first.decode(data)
        return run, _decoder.decode(data)
    # Any program may write to the bus, so any error is possible: deep nesting raises
    # RecursionError.
    except Exception as error:
        words = worded(error) if isinstance(error, msgspec.ValidationError) else error
        raise WireError(f"not a paceline message: {str(words)[:_LONGEST_REASON]}") from error


def decode_all(fields: dict[bytes, bytes]) -> tuple[str, list[Message]]:
    """Return the run id and the messages of a bus entry; a `Committed` is split into its messages.

    Raise a WireError in the same cases as `decode`.
    """
    run, message = decode(fields)
    if not isinstance(message, Committed):
        return run, [message]
    return run, [decode({**fields, b"data": bytes(raw)})[1] for raw in message.messages]


class ForgedError(WireError):
    """A bus entry whose MAC is missing or wrong, so its writer may not have the key."""


def signed(fields: dict[bytes, bytes], stream: str, key: bytes) -> dict[bytes, bytes]:
    """Return the fields of a bus entry together with its MAC.

    `key` is the key of the run or node to which the stream belongs.
    """
    return {**fields, b"mac": _mac(fields, stream, key)}


def decode_signed(
    fields: dict[bytes, bytes], stream: str, key: bytes | None
) -> tuple[str, Message]:
    """Return the run id and the message of a bus entry, after checking its MAC.

    `key` is the key of the run or node to which the stream belongs; None: the control plane gave no
    key, and the MAC is not checked.

    Raises:
        ForgedError: the MAC is missing or wrong.
        WireError: the entry has another protocol version, or holds no message of this version.
    """
    if key is not None:
        given = fields.get(b"mac")
        if given is None:
            raise ForgedError("an entry without a MAC")
        if not hmac.compare_digest(given, _mac(fields, stream, key)):
            raise ForgedError("an entry with a wrong MAC")
    return decode(fields)


def _mac(fields: dict[bytes, bytes], stream: str, key: bytes) -> bytes:
    digest = hmac.new(key, digestmod="sha256")
    for part in (stream.encode(), *(fields.get(name, b"") for name in _FIELDS)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
