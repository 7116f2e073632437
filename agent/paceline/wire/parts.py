"""A large `Hello` in parts.

A data set of 20 million samples makes a `Hello` of 160 MB. In one entry of a stream it would block
the bus, ingest and the live streams of all runs, and no time-out would be long enough for it. So
rank 0 sends it as parts of `PART_BYTES` (`in_parts`). Ingest stores each part as it comes, in any
order, and puts them together (`joined`) once the last one is there.
"""

from __future__ import annotations

import hashlib

from paceline.wire.codec import WireError, decode, encode
from paceline.wire.messages import Hello, HelloPart

DIGEST_BYTES = 16
PART_BYTES = 128 * 2**10  # an entry of this size takes the bus well under a millisecond
# Of a data set that is no stream. Tested at this number: `long` tests of ingest, and ingest.py.
MOST_SAMPLES = 20_000_000
# Per sample: its size, whether it is used, its bytes and its node; and what is there per rank.
MOST_PARTS = (MOST_SAMPLES * (8 + 4 + 4 + 2) + 128 * 2**20) // PART_BYTES


def digest(data: bytes) -> bytes:
    """Return the name of an encoded Hello: parts of two that differ are never mixed."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def in_parts(hello: Hello) -> list[Hello | HelloPart]:
    """Return the messages that bring a Hello to ingest: itself if it is small.

    Raises:
        ValueError: the data set has more than `MOST_SAMPLES`.
    """
    if hello.samples is not None and hello.samples > MOST_SAMPLES:
        raise ValueError(
            f"the data set has {hello.samples:,} samples, and the control plane plans at most "
            f"{MOST_SAMPLES:,}: give the session a stream"
        )
    data = encode(hello)[b"data"]
    if len(data) <= PART_BYTES:
        return [hello]
    name, view = digest(data), memoryview(data)
    cuts = range(0, len(data), PART_BYTES)
    return [
        HelloPart(hello.attempt, name, number, len(cuts), bytes(view[at : at + PART_BYTES]))
        for number, at in enumerate(cuts)
    ]


def joined(data: bytes, name: bytes) -> Hello:
    """Return the Hello that parts make together.

    Args:
        data: of all parts, in their order.
        name: as each part gives it.

    Raises:
        WireError: they make none.
    """
    if digest(data) != name:
        raise WireError("the parts of a Hello do not make what their digest names")
    _, message = decode({**encode(HelloPart(0, b"", 0, 0, b"")), b"data": data})
    if not isinstance(message, Hello):
        raise WireError(f"parts of a Hello make a {type(message).__name__}")
    if encode(message)[b"data"] != data:
        raise WireError("parts of a Hello that this release would write in another way")
    return message
