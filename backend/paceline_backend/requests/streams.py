"""How long the streams of the bus are, and how long those of a run stay when it is over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import redis

from paceline.wire import LIVE_LENGTH, RunChanged, control, live
from paceline.wire.bus import connect, publish

_KEPT_S = 3_600


@contextlib.contextmanager
def answering(url: str) -> Iterator[redis.Redis]:
    """A client of a bus that answers: asked before anything is written.

    Raises:
        redis.RedisError: the bus does not answer.
    """
    with connect(url) as client:
        client.ping()
        yield client


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
