"""What a rank tells the leader of its stream, and what the leader answers; keys of their store."""

from __future__ import annotations

import msgspec


class News(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has read since the last one."""

    sizes: list[float]  # λ of each sample, in the order in which they were read
    ended: bool = False  # there are no more in this epoch
    error: str = ""  # why reading failed; empty: it did not


class Room(msgspec.Struct, frozen=True, array_like=True):
    """The leader's answer."""

    samples: int  # that the rank's buffer shall have
    share: float  # of all samples, that the rank trains


encode = msgspec.msgpack.encode
decode_news = msgspec.msgpack.Decoder(News).decode
decode_room = msgspec.msgpack.Decoder(Room).decode


def news_key(epoch: int, rank: int, number: int) -> str:
    """The key of a rank's news of an epoch; its news are numbered from 0."""
    return f"stream/{epoch}/{rank}/{number}"


def room_key(rank: int) -> str:
    """The key of the leader's newest answer to a rank."""
    return f"stream/room/{rank}"


def claims_key(epoch: int) -> str:
    """The key of what ranks have claimed of an epoch's shards."""
    return f"stream/{epoch}/claims"


def order_key(epoch: int, shard: int) -> str:
    """The key of what the first reading of a shard saw, of which each takes a part."""
    return f"stream/{epoch}/order/{shard}"


FILLER = "stream/filler"  # a sample, pickled, for ranks that have read none
FILLER_ASKED = "stream/filler/asked"
