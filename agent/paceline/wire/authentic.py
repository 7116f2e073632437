"""Proof that the control plane wrote an entry of the bus.

Whoever reaches the bus may be able to write to any stream of it. So entries on ``control(run)`` and
``commands(node)`` carry the field ``mac``: HMAC-SHA256, with the key that only the control plane
and that run or node have, over the stream's name and all other fields.
"""

from __future__ import annotations

import hmac

from paceline.wire.codec import WireError, decode
from paceline.wire.messages import Message

_FIELDS = (b"v", b"run", b"data")


class ForgedError(WireError):
    """A bus entry that the control plane did not write."""


def signed(fields: dict[bytes, bytes], stream: str, key: bytes) -> dict[bytes, bytes]:
    """The fields of a bus entry, with its MAC.

    Args:
        fields: as `encode` makes them.
        stream: that the entry goes to.
        key: of the run or node that reads the stream.
    """
    return {**fields, b"mac": _mac(fields, stream, key)}


def decode_signed(
    fields: dict[bytes, bytes], stream: str, key: bytes | None
) -> tuple[str, Message]:
    """Run id and message of a bus entry, if the control plane wrote it.

    Args:
        fields: of the entry.
        stream: that it was read from.
        key: of the run or node that reads; None: the control plane gave none, and nothing is asked.

    Raises:
        ForgedError: the MAC is missing or wrong.
        WireError: another protocol version, or not a message of this one.
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
