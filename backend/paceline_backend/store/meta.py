"""Check the health of the database, and read the control plane's id and secret from it."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable

import sqlalchemy as sa

from paceline_backend.store.database import Store, StoreError, insert
from paceline_backend.store.schema import meta, runs


class Probe:
    """Health check of the database: whether it accepts writes. Thread-safe.

    Args:
        wait_s: maximum time in seconds that a check waits for other writers.
        every_s: minimum interval between checks, in seconds. Calls before the interval has ended
            get the last result, so that clients of the health endpoint cannot overload the
            database.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        store: Store,
        wait_s: float = 5.0,
        every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._wait_s = wait_s
        self._every_s = every_s
        self._clock = clock
        self._asking = threading.Lock()
        self._asked_at = -math.inf
        self._error: StoreError | None = None

    def error(self) -> StoreError | None:
        """Return the error of the latest check, or None if the database accepted its write."""
        first = self._asked_at == -math.inf
        if self._asking.acquire(blocking=first):
            try:
                if self._clock() >= self._asked_at + self._every_s:
                    self._error = self._ask()
                    self._asked_at = self._clock()
            finally:
                self._asking.release()
        return self._error

    def _ask(self) -> StoreError | None:
        row = {"name": "probe", "value": str(time.time())}
        try:
            with self._store.write(self._wait_s) as connection:
                connection.execute(sa.select(runs.c.key).limit(1))
                query = insert(connection, meta).values(row)
                update = {"value": query.excluded.value}
                connection.execute(
                    query.on_conflict_do_update(index_elements=["name"], set_=update)
                )
        except StoreError as error:
            return error
        return None


def ask(store: Store) -> None:
    """Run a trivial query, to raise a `StoreError` if the database does not respond."""
    with store.read() as connection:
        connection.execute(sa.select(meta.c.name).limit(1))


def control_id(store: Store) -> str:
    """Return the control plane's id: created once, and kept if the server's address changes."""
    return _kept(store, "id", secrets.token_hex(8))


def secret(store: Store) -> bytes:
    """Return the secret of this control plane: 32 random bytes, created once.

    Keys of nodes and runs, passwords on the bus and cookies are derived from the secret.
    """
    return bytes.fromhex(_kept(store, "secret", secrets.token_hex(32)))


def _kept(store: Store, name: str, default: str) -> str:
    """Return the stored value of a name; if none is stored, store `default` and return it."""
    query = sa.select(meta.c.value).where(meta.c.name == name)
    with store.read() as connection:
        value = connection.execute(query).scalar()
    if value is None:
        values = {"name": name, "value": default}
        with store.write() as connection:
            connection.execute(insert(connection, meta).values(values).on_conflict_do_nothing())
            value = connection.execute(query).scalar_one()
    return str(value)
