"""How long the streams of the bus are, and how long those of a run stay when it is over."""

from __future__ import annotations

import redis

from paceline.wire import RunChanged, control, live
from paceline.wire.bus import publish

LIVE_LENGTH = 10_000  # entries: what a page may lag behind
COMMANDS_LENGTH = 1_000  # of a node whose agent may never come back

_KEPT_S = 3_600


def tell_end(client: redis.Redis, run: str) -> None:
    """Lets who follows a run look, after the control plane has ended it itself.

    Raises:
        redis.RedisError: the bus is away.
    """
    publish(client, live(run), RunChanged(), run, maxlen=LIVE_LENGTH)
    expire(client, run)


def expire(client: redis.Redis, run: str) -> None:
    """Lets the streams of a run that is over go after a while. Also into a pipeline.

    Raises:
        redis.RedisError: the bus is away.
    """
    for stream in (live(run), control(run)):
        client.expire(stream, _KEPT_S)
