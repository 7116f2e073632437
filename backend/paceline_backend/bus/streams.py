"""How long the streams of the bus are, and how long those of a run stay when it is over."""

from __future__ import annotations

import redis

from paceline.wire import control, live

LIVE_LENGTH = 10_000  # entries: what a page may lag behind
COMMANDS_LENGTH = 1_000  # of a node whose agent may never come back
WAKE_LENGTH = 1_000

_KEPT_S = 3_600


def expire(client: redis.Redis, run: str) -> None:
    """Lets the streams of a run that is over go after a while. Also into a pipeline.

    Raises:
        redis.RedisError: the bus is away.
    """
    for stream in (live(run), control(run)):
        client.expire(stream, _KEPT_S)
