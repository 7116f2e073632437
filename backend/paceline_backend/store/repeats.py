"""Store requests with an Idempotency-Key, and keep the response of the first request for a day.

`api.idempotency` calls `begin` before it executes a request. If several requests with the same key
arrive at the same time, only one of them is executed. After the execution, the caller stores the
response with `finish`, or calls `release` if the request changed nothing. If the server dies before
that, the row stays without a response.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import sqlalchemy as sa

from paceline_backend.store.database import Store, insert
from paceline_backend.store.schema import repeats

RESPONSES_KEPT_S = 86_400.0


class Earlier(NamedTuple):
    """The first request with a key: its digest and its response.

    The response is None while the request is being executed, and if its result is unknown.
    """

    request: str
    answer: bytes | None


def begin(store: Store, identity: str, request: str) -> Earlier | None:
    """Record a request and return None, or return an earlier request with the same key.

    `identity` is a digest of the key and its requester, `request` a digest of the whole request.
    """
    now = time.time()
    values = {"id": identity, "request": request, "at": now}
    known = sa.select(repeats.c.request, repeats.c.answer).where(repeats.c.id == identity)
    with store.write() as connection:
        connection.execute(sa.delete(repeats).where(repeats.c.at <= now - RESPONSES_KEPT_S))
        while True:
            query = insert(connection, repeats).values(values).on_conflict_do_nothing()
            if connection.execute(query).rowcount:
                return None
            # In Postgres, another transaction can release the earlier request after the INSERT
            # found it. Then there is no row, and the INSERT is tried again.
            earlier = connection.execute(known).one_or_none()
            if earlier is not None:
                return Earlier(*earlier)


def finish(store: Store, identity: str, answer: bytes) -> None:
    """Store the response of a request."""
    with store.write() as connection:
        query = sa.update(repeats).where(repeats.c.id == identity)
        connection.execute(query.values(answer=answer))


def release(store: Store, identity: str) -> None:
    """Delete a request that changed nothing, so that the client may send it again."""
    with store.write() as connection:
        connection.execute(sa.delete(repeats).where(repeats.c.id == identity))
