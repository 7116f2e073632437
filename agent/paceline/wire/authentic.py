"""Proof that the control plane wrote an entry of the bus.

A program that reaches the bus may be able to write to any of its streams. So entries on
``control(run)`` and ``commands(node)`` carry the field ``mac``: HMAC-SHA256 over the stream's name
and all other fields, made with a key that only the control plane and that run or node have.
"""

from __future__ import annotations

import hmac

from paceline.wire.codec import WireError, decode
from paceline.wire.messages import Message

_FIELDS = (b"v", b"run", b"data")


class ForgedError(WireError):
    """A bus entry that the control plane did not write."""


def signed(fields: dict[bytes, bytes], stream: str, key: bytes) -> dict[bytes, bytes]:
    """Return the fields of a bus entry together with its MAC.

    `key` is that of the run or node that reads the stream.
    """
    return {**fields, b"mac": _mac(fields, stream, key)}


def decode_signed(
    fields: dict[bytes, bytes], stream: str, key: bytes | None
) -> tuple[str, Message]:
    """Return the run id and the message of a bus entry if the control plane wrote the entry.

    `key` is that of the run or node that reads the stream; None: the control plane gave no key, and
    the MAC is not checked.

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
