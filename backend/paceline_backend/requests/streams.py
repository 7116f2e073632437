"""A run's streams on the bus: whether the bus answers, and what happens at the run's end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from paceline.wire import (
    CHANGES,
    CHANGES_LENGTH,
    TELEMETRY,
    RunChanged,
    SwitchRequested,
    control,
    live,
    node_telemetry,
    run_telemetry,
)
from paceline.wire.bus import connect, publish, trust
from paceline_backend.store import Store
from paceline_backend.store.telemetry import writers

log = logging.getLogger(__name__)

PROBE = "paceline:probe"  # written to see whether the bus takes anything

_KEPT_S = 3_600  # for clients that were away when the run ended
_CONNECT_S = 2.0


@contextlib.contextmanager
def answering(url: str) -> Iterator[redis.Redis]:
    """A client of a bus that answers: asked before anything is written.

    Raises:
        redis.RedisError: the bus does not answer.
    """
    with connect(url) as client:
        client.ping()
        yield client


def shared(url: str, *, connections: int, queued_s: float, timeout_s: float) -> redis.asyncio.Redis:
    """A client for many tasks of an event loop, whose calls queue for a few connections.

    Args:
        url: of the bus.
        connections: at most.
        queued_s: longest wait for a free connection.
        timeout_s: longest wait for an answer.
    """
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        **trust(url),
        max_connections=connections,
        timeout=queued_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=_CONNECT_S,
        retry=Retry(NoBackoff(), 0),
        # Under protocol 3 redis-py 8 does not look whether a connection is dead before it hands it
        # out. Then the first call on each connection would fail after the bus was away.
        protocol=2,
    )
    return redis.asyncio.Redis.from_pool(pool)


def telemetry_streams(store: Store) -> list[str]:
    """The streams that ingest reads.

    Raises:
        StoreError: or one of its kinds.
    """
    with store.read() as connection:
        known_nodes = writers.signed_nodes(connection)
        known_runs = writers.signed_runs(connection)
    return [TELEMETRY, *map(node_telemetry, known_nodes), *map(run_telemetry, known_runs)]


def waiting(client: redis.Redis, store: Store) -> int:
    """How many entries on the bus are not stored yet.

    Raises:
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
    """
    return entries(client, telemetry_streams(store))


def entries(client: redis.Redis, names: Iterable[str]) -> int:
    """How many entries streams have together; see `lengths`."""
    return sum(lengths(client, names))


def lengths(client: redis.Redis, names: Iterable[str]) -> list[int]:
    """How many entries each stream has, in one round trip.

    Raises:
        redis.RedisError: the bus is away.
    """
    pipeline = client.pipeline(transaction=False)
    for stream in names:
        pipeline.xlen(stream)
    return pipeline.execute()


def announce(client: redis.Redis, run: str, message: RunChanged | SwitchRequested) -> None:
    """Tells a run's controller and open pages of a change that the control plane has committed.

    Raises:
        redis.RedisError: the bus is away.
    """
    publish(client, live(run), message, run)
    client.xadd(CHANGES, {run: b""}, maxlen=CHANGES_LENGTH)


def tell_end(client: redis.Redis, run: str) -> None:
    """Tells all who follow a run that the control plane itself has ended it.

    The end is in the database already, so a bus that is away is logged and not raised. Open pages
    ask the database when the bus is back.
    """
    try:
        announce(client, run, RunChanged())
        expire(client, run)
    except redis.RedisError as error:
        log.warning("run %s has ended; open pages show it when the bus is back: %s", run, error)


def tell_change(client: redis.Redis, run: str) -> None:
    """Tells all who follow a run that its row is another; a bus that is away is logged."""
    try:
        announce(client, run, RunChanged())
    except redis.RedisError as error:
        log.warning("run %s has changed; open pages show it later: %s", run, error)


def keep(client: redis.Redis, run: str) -> None:
    """Lets the streams of a run stay that goes on after its end. Also into a pipeline.

    Raises:
        redis.RedisError: the bus is away.
    """
    for stream in (live(run), control(run)):
        client.persist(stream)


def forget_orders(client: redis.Redis, run: str) -> None:
    """Deletes what was said to the leader of a run that has ended: it may be an order to stop.

    Raises:
        redis.RedisError: the bus is away.
    """
    client.delete(control(run))


def expire(client: redis.Redis, run: str) -> None:
    """Lets the streams of a run that is over go after a while. Also into a pipeline.

    Raises:
        redis.RedisError: the bus is away.
    """
    for stream in (live(run), control(run)):
        client.expire(stream, _KEPT_S)
