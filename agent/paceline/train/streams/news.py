"""Messages between a rank and the leader about a stream, and their keys in the ranks' store."""

from __future__ import annotations

import msgspec


class News(msgspec.Struct, frozen=True, array_like=True):
    """A rank's report of the samples that it has read since the previous report.

    `sizes` has the size λ of each sample, in the order of reading. `ended`: the rank has no more
    samples in this epoch. `error` is the reason why reading failed; empty if it did not fail.
    """

    sizes: list[float]
    ended: bool = False
    error: str = ""


class BufferSize(msgspec.Struct, frozen=True, array_like=True):
    """The leader's answer: a rank's buffer size in samples, and its fraction of all buffers."""

    samples: int
    share: float


encode = msgspec.msgpack.encode
decode_news = msgspec.msgpack.Decoder(News).decode
decode_room = msgspec.msgpack.Decoder(BufferSize).decode


def news_key(epoch: int, rank: int, number: int) -> str:
    """Return the key of a rank's report in an epoch; the rank's reports are numbered from 0."""
    return f"stream/{epoch}/{rank}/{number}"


def room_key(rank: int) -> str:
    """Return the key of the newest `BufferSize` that the leader has stored for a rank."""
    return f"stream/room/{rank}"


def claims_key(epoch: int) -> str:
    """Return the key whose value says how many parts of an epoch's shards are claimed."""
    return f"stream/{epoch}/claims"


def order_key(epoch: int, shard: int) -> str:
    """Return the key of a shard's order, which the first rank that reads the shard stores."""
    return f"stream/{epoch}/order/{shard}"


# The key of a pickled sample for ranks that have read no sample, and the key of a counter: the rank
# that increases the counter first stores the sample.
FILLER = "stream/filler"
FILLER_ASKED = "stream/filler/asked"
