"""Streams of runs on the bus: clients, lengths, notifications, and expiry after a run's end.

Functions raise `redis.RedisError` if the bus does not answer, except those that log the error.
"""

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
    control,
    live,
    node_telemetry,
    run_telemetry,
)
from paceline.wire.bus import connect, publish, trust
from paceline_backend.store import Store
from paceline_backend.store.telemetry import writers

log = logging.getLogger(__name__)

# Key that is written to check whether the bus accepts writes.
PROBE = "paceline:probe"

# Seconds for which a run's streams are kept after its end, for clients that were disconnected when
# the run ended.
_STREAMS_KEPT_S = 3_600
_BUS_CONNECT_S = 2.0


@contextlib.contextmanager
def answering(url: str) -> Iterator[redis.Redis]:
    """Connect to the bus, and ping it before the caller writes anything."""
    with connect(url) as client:
        client.ping()
        yield client


def shared(url: str, *, connections: int, queued_s: float, timeout_s: float) -> redis.asyncio.Redis:
    """Return a client for many tasks of an event loop, which share a few connections.

    `queued_s` is the longest wait for a free connection, and `timeout_s` for an answer.
    """
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        **trust(url),
        max_connections=connections,
        timeout=queued_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=_BUS_CONNECT_S,
        retry=Retry(NoBackoff(), 0),
        # With protocol 3, redis-py 8 does not check whether a pooled connection is dead. The first
        # call on each connection after an outage of the bus would fail.
        protocol=2,
    )
    return redis.asyncio.Redis.from_pool(pool)


def telemetry_streams(store: Store) -> list[str]:
    """Return the streams that ingest reads."""
    with store.read() as connection:
        known_nodes = writers.signed_nodes(connection)
        known_runs = writers.signed_runs(connection)
    return [TELEMETRY, *map(node_telemetry, known_nodes), *map(run_telemetry, known_runs)]


def waiting(client: redis.Redis, store: Store) -> int:
    """Return the number of entries on the bus that are not stored yet."""
    return entries(client, telemetry_streams(store))


def entries(client: redis.Redis, names: Iterable[str]) -> int:
    """Return the total number of entries in streams."""
    return sum(lengths(client, names))


def lengths(client: redis.Redis, names: Iterable[str]) -> list[int]:
    """Return the number of entries in each stream, in one round trip."""
    pipeline = client.pipeline(transaction=False)
    for stream in names:
        pipeline.xlen(stream)
    return pipeline.execute()


def announce(client: redis.Redis, run: str) -> None:
    """Tell a run's controller and dashboard pages that a change of the run was committed."""
    publish(client, live(run), RunChanged(), run)
    client.xadd(CHANGES, {run: b""}, maxlen=CHANGES_LENGTH)


def wake(client: redis.Redis) -> None:
    """Notify idle workers that something may have changed; an error of the bus is only logged."""
    try:
        client.xadd(CHANGES, {"": b""}, maxlen=CHANGES_LENGTH)
    except redis.RedisError as error:
        log.debug("workers could not be notified of a change, and notice it later: %s", error)


def tell_end(client: redis.Redis, run: str) -> None:
    """Tell a run's controller and dashboard pages that the control plane itself has ended the run.

    The database has the run's end already, so an error of the bus is logged and not raised.
    """
    try:
        announce(client, run)
        expire(client, run)
    except redis.RedisError as error:
        log.warning(
            "run %s has ended; open dashboard pages show it when the bus is back: %s", run, error
        )


def tell_change(client: redis.Redis, run: str) -> None:
    """Call `announce`; an error of the bus is only logged."""
    try:
        announce(client, run)
    except redis.RedisError as error:
        log.warning(
            "a change of run %s could not be announced, so pages show it with a delay: %s",
            run,
            error,
        )


def keep(client: redis.Redis, run: str) -> None:
    """Cancel the expiry of a run's streams, because the run may train again.

    `client` may be a pipeline.
    """
    for stream in (live(run), control(run)):
        client.persist(stream)


def forget_orders(client: redis.Redis, run: str) -> None:
    """Delete messages to the leader of an ended run, such as an old order to stop."""
    client.delete(control(run))


def expire(client: redis.Redis, run: str) -> None:
    """Let the streams of an ended run expire after an hour. `client` may be a pipeline."""
    for stream in (live(run), control(run)):
        client.expire(stream, _STREAMS_KEPT_S)
