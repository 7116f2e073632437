"""How a worker process says on the bus that it works, and how the web process knows."""

from __future__ import annotations

import msgspec
import redis

_PREFIX = "paceline:worker:"
BEAT_S = 1.0
_EXPIRES_S = 10


class Beat(msgspec.Struct, frozen=True):
    """One worker's sign of life, with what its ingest has done since it started."""

    owner: str
    rows: int  # records of worker steps, repeated ones included
    batches: int  # transactions
    lag: int  # entries on the streams that it reads, not yet stored
    last_commit_at: float | None  # Unix time
    leases_taken: int = 0  # runs that it began to plan
    leases_lost: int = 0  # of these, runs that another worker took over


def beat(client: redis.Redis, sign: Beat) -> None:
    """Says that this worker works; forgotten after 10 s.

    Raises:
        redis.RedisError: the bus is away.
    """
    client.set(_PREFIX + sign.owner, msgspec.msgpack.encode(sign), ex=_EXPIRES_S)


def goodbye(client: redis.Redis, owner: str) -> None:
    """Takes the sign back.

    Raises:
        redis.RedisError: the bus is away.
    """
    client.delete(_PREFIX + owner)


def beats(client: redis.Redis) -> list[Beat]:
    """All workers that work.

    Raises:
        redis.RedisError: the bus is away.
    """
    values = (client.get(key) for key in client.scan_iter(match=f"{_PREFIX}*", count=1000))
    # redis-py types answers as bytes or str; ours is not set to decode them.
    return [
        msgspec.msgpack.decode(value, type=Beat) for value in values if isinstance(value, bytes)
    ]
