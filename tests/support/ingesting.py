"""An ingest at work on a bus and a database."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import redis

from paceline.wire import (
    INGEST_GROUP,
    TELEMETRY,
    Hello,
    Message,
    RunChanged,
    StepBatch,
    decode_all,
)
from paceline_backend.control.ingest import Ingest
from paceline_backend.requests.rejected import REJECTED
from paceline_backend.store import Store
from support.waiting import DEADLINE_S, until


@contextmanager
def ingesting(store: Store, bus_url: str, name: str = "one", **options: Any) -> Iterator[Ingest]:
    """An ingest in a thread, that ended without an exception."""
    ingest, stop = Ingest(store, bus_url, name, **options), threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            ingest.run(stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ingest
    finally:
        stop.set()
        thread.join(timeout=DEADLINE_S)
    assert not thread.is_alive()
    assert failures == []


def settled(client: redis.Redis, stream: str = TELEMETRY) -> bool:
    """Nothing waits and nothing is unacknowledged."""
    try:
        pending = client.xpending(stream, INGEST_GROUP)["pending"]
    except redis.ResponseError:  # no group yet
        return False
    return client.xlen(stream) == 0 and pending == 0


def said(client: redis.Redis, stream: str) -> list[Any]:
    """What the messages of a stream say; each record by itself, however many a message holds."""
    return [part for message in messages(client, stream) for part in parts(message)]


def messages(client: redis.Redis, stream: str) -> list[Message]:
    """The messages of a stream, those that were committed together one by one."""
    entries: Any = client.xrange(stream)
    return [message for _, fields in entries for message in decode_all(fields)[1]]


def parts(message: Message) -> list[Any]:
    """A message, or its records."""
    return [*message.records] if isinstance(message, StepBatch) else [message]


def heard(sent: Iterable[Message]) -> list[Any]:
    """What a run's live stream says of messages that ingest has stored."""
    shown: list[Message] = [
        RunChanged() if isinstance(message, Hello) else message for message in sent
    ]
    return [part for message in shown for part in parts(message)]


def reasons(client: redis.Redis) -> list[str]:
    """Return why messages were rejected."""
    notes: Any = client.xrange(REJECTED)
    return [fields[b"reason"].decode() for _, fields in notes]


def ingest_all(store: Store, bus_url: str, stream: str = TELEMETRY) -> None:
    """Lets an ingest take in what lies on the bus."""
    with redis.Redis.from_url(bus_url) as client, ingesting(store, bus_url):
        until(lambda: settled(client, stream), "all is acknowledged")
