"""Heartbeats of worker processes on the bus.

A worker calls `beat` every second, or every `IDLE_BEAT_S` while no run is active and nothing
changes. The web process reads `beats` for `/readyz` and metrics. All functions raise
`redis.RedisError` while the bus is unavailable.
"""

from __future__ import annotations

import msgspec
import redis

_PREFIX = "paceline:worker:"
BEAT_S, IDLE_BEAT_S = 1.0, 3.0  # seconds
_EXPIRES_S = 10  # seconds


class Beat(msgspec.Struct, frozen=True):
    """Heartbeat of one worker, with counts of its ingest since it started.

    `lag` counts entries on the worker's streams that are not stored yet. `leases_taken` counts runs
    that the worker began to plan, and `leases_lost` the runs among them that another worker took
    over.
    """

    owner: str
    # Number of ingested records, one for each step of a rank, including repeated records.
    rows: int
    batches: int  # transactions
    lag: int  # entries
    last_commit_at: float | None  # Unix time
    leases_taken: int = 0  # runs
    leases_lost: int = 0  # runs


def beat(client: redis.Redis, sign: Beat) -> None:
    """Report that this worker is alive. The report expires after 10 s."""
    client.set(_PREFIX + sign.owner, msgspec.msgpack.encode(sign), ex=_EXPIRES_S)


def goodbye(client: redis.Redis, owner: str) -> None:
    """Delete the heartbeat of a worker that ends."""
    client.delete(_PREFIX + owner)


def beats(client: redis.Redis) -> list[Beat]:
    """Return the heartbeats of all workers that are alive."""
    values = (client.get(key) for key in client.scan_iter(match=f"{_PREFIX}*", count=1000))
    # redis-py declares values as bytes or str. This client does not decode them, so they are bytes.
    return [
        msgspec.msgpack.decode(value, type=Beat) for value in values if isinstance(value, bytes)
    ]
