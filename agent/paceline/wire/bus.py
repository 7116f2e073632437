"""Connections to the bus."""

from __future__ import annotations

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from paceline.wire import Message, encode


def connect(url: str, *, timeout_s: float = 2.0) -> redis.Redis:
    """A client that fails fast: callers decide what an outage means. Give each thread its own.

    Args:
        url: ``redis://host:port/db``.
        timeout_s: of connecting and of each call; a blocking read must block for less.
    """
    return redis.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
    )


def publish(
    client: redis.Redis, stream: str, message: Message, run: str = "", maxlen: int | None = None
) -> bytes:
    """Appends one message; returns its entry id.

    Raises:
        redis.RedisError: the bus did not take it.
    """
    fields: dict[bytes | str, bytes | str] = dict(encode(message, run).items())
    return bytes(client.xadd(stream, fields, maxlen=maxlen, approximate=True))  # type: ignore[arg-type]
