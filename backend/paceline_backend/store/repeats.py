"""Requests with an Idempotency-Key: the first one is recorded, and its answer kept for a day.

`api.idempotency` calls `begin` before a request is executed. Of several requests with one key, one
begins. When it has been executed, the caller stores its answer with `finish`, or calls `release` if
it changed nothing. A request whose server died in between keeps its row without an answer.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import sqlalchemy as sa

from paceline_backend.store.database import Store, insert
from paceline_backend.store.schema import repeats

KEPT_S = 86_400.0  # seconds that an answer is kept


class Earlier(NamedTuple):
    """The first request with a key."""

    request: str  # digest
    answer: bytes | None  # None: it is being executed, or nobody knows how it ended


def begin(store: Store, identity: str, request: str) -> Earlier | None:
    """Record a request; return an earlier one with the same key instead, if there is one.

    Args:
        store: database.
        identity: digest of the key and its requester.
        request: digest of all that the request asks for.

    Raises:
        StoreError: or one of its kinds.
    """
    now = time.time()
    values = {"id": identity, "request": request, "at": now}
    known = sa.select(repeats.c.request, repeats.c.answer).where(repeats.c.id == identity)
    with store.write() as connection:
        connection.execute(sa.delete(repeats).where(repeats.c.at <= now - KEPT_S))
        while True:
            query = insert(connection, repeats).values(values).on_conflict_do_nothing()
            if connection.execute(query).rowcount:
                return None
            # None if the earlier request was released since: Postgres shows that at once.
            earlier = connection.execute(known).one_or_none()
            if earlier is not None:
                return Earlier(*earlier)


def finish(store: Store, identity: str, answer: bytes) -> None:
    """Store the answer of a request.

    Raises:
        StoreError: or one of its kinds.
    """
    with store.write() as connection:
        query = sa.update(repeats).where(repeats.c.id == identity)
        connection.execute(query.values(answer=answer))


def release(store: Store, identity: str) -> None:
    """Forget a request that changed nothing, so that it may be sent again.

    Raises:
        StoreError: or one of its kinds.
    """
    with store.write() as connection:
        connection.execute(sa.delete(repeats).where(repeats.c.id == identity))
