"""A run's streams on the bus: whether the bus answers, and what happens at the run's end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import redis

from paceline.wire import LIVE_LENGTH, RunChanged, control, live
from paceline.wire.bus import connect, publish

log = logging.getLogger(__name__)

_KEPT_S = 3_600  # for clients that were away when the run ended


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
    """Tells all who follow a run that the control plane itself has ended it.

    The end is in the database already, so a bus that is away is logged and not raised. Open pages
    ask the database when the bus is back.
    """
    try:
        publish(client, live(run), RunChanged(), run, maxlen=LIVE_LENGTH)
        expire(client, run)
    except redis.RedisError as error:
        log.warning("run %s has ended; open pages show it when the bus is back: %s", run, error)


def expire(client: redis.Redis, run: str) -> None:
    """Lets the streams of a run that is over go after a while. Also into a pipeline.

    Raises:
        redis.RedisError: the bus is away.
    """
    for stream in (live(run), control(run)):
        client.expire(stream, _KEPT_S)
