"""A large `Hello` in parts.

A data set of 20 million samples makes a `Hello` of 160 MB. In one entry of a stream it would block
the bus, ingest and the live streams of all runs, and no time-out would be long enough for it. So
rank 0 sends it as parts of `PART_BYTES` (`in_parts`). Ingest stores each part as it comes, in any
order, and puts them together (`joined`) once the last one is there.
"""

from __future__ import annotations

import hashlib

import msgspec

from paceline.wire.codec import WireError, decode, encode
from paceline.wire.messages import Hello, HelloPart

DIGEST_BYTES = 16
PART_BYTES = 128 * 2**10  # an entry of this size takes the bus well under a millisecond
# Of a data set that is no stream. Tested at this number: `long` tests of ingest, and ingest.py.
MOST_SAMPLES = 20_000_000
# Per sample: its size, whether it is used, its bytes and its node; and what is there per rank.
MOST_PARTS = (MOST_SAMPLES * (8 + 4 + 4 + 2) + 128 * 2**20) // PART_BYTES
# What a Hello has besides its arrays of samples: of the run, and of each rank.
_OF_RUN, _OF_RANK = 64 * 2**10, 2**10


class _Shards(msgspec.Struct):
    lengths: memoryview = memoryview(b"")
    held: memoryview = memoryview(b"")


class _Moves(msgspec.Struct):
    samples: memoryview = memoryview(b"")
    ranks: memoryview = memoryview(b"")


class _Segment(msgspec.Struct):
    indices: memoryview = memoryview(b"")
    moves: _Moves | None = None


class _Hello(msgspec.Struct, tag="hello"):
    """The arrays of a Hello. All else is skipped, and no objects are made of it."""

    sizes: memoryview = memoryview(b"")
    used: memoryview = memoryview(b"")
    shards: _Shards | None = None

    def arrays(self) -> int:
        shards = self.shards or _Shards()
        return sum(map(len, (self.sizes, self.used, shards.lengths, shards.held)))


class _Adopted(msgspec.Struct, tag="adopted"):
    segment: _Segment

    def arrays(self) -> int:
        moves = self.segment.moves or _Moves()
        return sum(map(len, (self.segment.indices, moves.samples, moves.ranks)))


_hello = msgspec.msgpack.Decoder(_Hello)
_with_arrays: msgspec.msgpack.Decoder[_Hello | _Adopted] = msgspec.msgpack.Decoder(
    _Hello | _Adopted
)


def without_arrays(data: bytes) -> int:
    """Return how many bytes of an encoded message are not in arrays of samples.

    `decode` makes objects of them: a list of 1 MiB may become 64 MiB. Arrays stay as they are.
    """
    try:
        return len(data) - _with_arrays.decode(data).arrays()
    except (ValueError, RecursionError):  # another message, or none
        return len(data)


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


def joined(data: bytes, name: bytes, ranks: int) -> Hello:
    """Return the Hello that parts make together.

    Args:
        data: of all parts, in their order.
        name: as each part gives it.
        ranks: the most that the run may have.

    Raises:
        WireError: they make none.
    """
    if digest(data) != name:
        raise WireError("the parts of a Hello do not make what their digest names")
    try:
        others = len(data) - _hello.decode(data).arrays()
    except (ValueError, RecursionError) as error:  # of msgspec, too
        raise WireError(f"the parts of a Hello make none: {error}") from error
    if others > (most := _OF_RUN + _OF_RANK * ranks):
        raise WireError(
            f"besides the arrays of its samples a Hello has {others:,} bytes: one of {ranks} ranks "
            f"has at most {most:,}"
        )
    _, message = decode({**encode(HelloPart(0, b"", 0, 0, b"")), b"data": data})
    assert isinstance(message, Hello)
    return message
