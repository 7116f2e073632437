"""Splitting of a large `Hello` into parts.

A data set of 20 million samples makes a `Hello` of 160 MB. As a single entry of a stream, this
message would block the bus, ingest and the live streams of all runs, and would exceed any sensible
time-out. So rank 0 sends it as parts of `PART_BYTES` (`encode_hello`). Ingest stores each part as
it arrives, in any order, and joins them (`joined`) once the last one is there.
"""

from __future__ import annotations

import hashlib

import msgspec

from paceline.wire.codec import WireError, decode, encode
from paceline.wire.messages import Hello, HelloPart

DIGEST_BYTES = 16
# Size of a part in bytes: an entry of this size occupies the bus for well under a millisecond.
PART_BYTES = 128 * 2**10
# Maximum number of samples of a data set that is no stream.
MOST_SAMPLES = 20_000_000
# Maximum number of parts of a Hello. A sample takes 8 bytes for its size, 4 if it is used, 4 for
# its length and 2 for its node; 128 MiB are for the values of all ranks.
MOST_PARTS = (MOST_SAMPLES * (8 + 4 + 4 + 2) + 128 * 2**20) // PART_BYTES
# Maximum number of bytes of a Hello outside its arrays of samples: `_OF_RUN`, plus `_OF_RANK` for
# each rank.
_OF_RUN, _OF_RANK = 64 * 2**10, 2**10


class _Shards(msgspec.Struct):
    lengths: memoryview = memoryview(b"")
    held: memoryview = memoryview(b"")


class _Moves(msgspec.Struct):
    samples: memoryview = memoryview(b"")
    ranks: memoryview = memoryview(b"")


class _Plan(msgspec.Struct):
    indices: memoryview = memoryview(b"")
    moves: _Moves | None = None


class _Hello(msgspec.Struct, tag="hello"):
    """The arrays of a Hello. Other fields are skipped, and no objects are created for them."""

    sizes: memoryview = memoryview(b"")
    used: memoryview = memoryview(b"")
    shards: _Shards | None = None

    def arrays(self) -> int:
        shards = self.shards or _Shards()
        return sum(map(len, (self.sizes, self.used, shards.lengths, shards.held)))


class _Adopted(msgspec.Struct, tag="adopted"):
    plan: _Plan

    def arrays(self) -> int:
        moves = self.plan.moves or _Moves()
        return sum(map(len, (self.plan.indices, moves.samples, moves.ranks)))


_hello = msgspec.msgpack.Decoder(_Hello)
_with_arrays: msgspec.msgpack.Decoder[_Hello | _Adopted] = msgspec.msgpack.Decoder(
    _Hello | _Adopted
)


def without_arrays(data: bytes) -> int:
    """Return the number of bytes of an encoded message outside of its arrays of samples.

    These bytes become Python objects, up to 64 times as large. Arrays keep their size.
    """
    try:
        return len(data) - _with_arrays.decode(data).arrays()
    # The data is a message of another type, or no message.
    except (ValueError, RecursionError):
        return len(data)


def digest(data: bytes) -> bytes:
    """Return a digest of an encoded Hello; it distinguishes the parts of different Hellos."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def encode_hello(hello: Hello, run: str = "") -> list[dict[bytes, bytes]]:
    """Return the bus entries for a Hello: a single entry, or one entry for each part.

    Raise a ValueError if the data set has more than `MOST_SAMPLES`.
    """
    if hello.samples is not None and hello.samples > MOST_SAMPLES:
        raise ValueError(
            f"the data set has {hello.samples:,} samples, but the control plane plans at most "
            f"{MOST_SAMPLES:,}: use paceline.data.Stream"
        )
    entry = encode(hello, run)
    data = entry[b"data"]
    if len(data) <= PART_BYTES:
        return [entry]
    name, cuts = digest(data), range(0, len(data), PART_BYTES)
    return [
        encode(HelloPart(hello.attempt, name, number, len(cuts), data[at : at + PART_BYTES]), run)
        for number, at in enumerate(cuts)
    ]


def joined(data: bytes, name: bytes, ranks: int) -> Hello:
    """Return the Hello made of all its parts; raise a WireError if they make no valid Hello.

    `data` is the data of all parts in their order, `name` is the digest that each part has, and
    `ranks` the largest number of ranks that the run may have.
    """
    if digest(data) != name:
        raise WireError("the parts of a Hello do not match their digest")
    try:
        others = len(data) - _hello.decode(data).arrays()
    # msgspec's errors are ValueErrors.
    except (ValueError, RecursionError) as error:
        raise WireError(f"the parts of a Hello cannot be decoded: {error}") from error
    if others > (most := _OF_RUN + _OF_RANK * ranks):
        raise WireError(
            f"a Hello has {others:,} bytes besides the arrays of its samples: with {ranks} ranks "
            f"it may have at most {most:,}"
        )
    _, message = decode({**encode(HelloPart(0, b"", 0, 0, b"")), b"data": data})
    assert isinstance(message, Hello)
    return message
