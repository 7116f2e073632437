"""Who may plan a run: at most one owner at a time, for a limited time.

Expiry is judged by the database's clock: those of several control planes need not agree.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from paceline.wire import ENDED
from paceline_backend.store import Store
from paceline_backend.store.schema import leases, runs


@dataclass
class Lease:
    """This process's claim on a run, as far as it knows without asking. Thread-safe.

    Args:
        run: key of the run.
        owner: who holds it.
        until: monotonic time; before this nobody else can have acquired it.
    """

    run: int
    owner: str
    until: float
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def held(self) -> bool:
        """Whether planning is certainly still ours."""
        with self._lock:
            return time.monotonic() < self.until

    def prolong(self, until: float) -> None:
        """Notes an extension; a time in the past gives the lease up."""
        with self._lock:
            self.until = until


def acquire(store: Store, run: int, owner: str, lease_s: float) -> Lease | None:
    """Takes a lease that is free, expired, or this owner's already; None if another holds it.

    Raises:
        StoreError: the database did not answer.
    """
    asked = time.monotonic()  # before the database's now: we never believe in it for too long
    with store.write() as connection:
        now = _now(connection)
        insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
        query = insert(leases).values(run=run, owner=owner, expires_at=now + lease_s)
        taken = connection.execute(
            query.on_conflict_do_update(
                index_elements=[leases.c.run],
                set_={"owner": owner, "expires_at": query.excluded.expires_at},
                where=(leases.c.owner == owner) | (leases.c.expires_at <= now),
            ).returning(leases.c.run)
        ).one_or_none()
    return Lease(run, owner, asked + lease_s) if taken else None


def extend(store: Store, held: Collection[Lease], lease_s: float) -> list[Lease]:
    """Prolongs leases; returns those that were lost to another owner.

    Raises:
        StoreError: the database did not answer; the leases run on until they expire.
    """
    if not held:
        return []
    asked = time.monotonic()
    kept = set()
    with store.write() as connection:
        expires_at = _now(connection) + lease_s
        for lease in held:
            query = (
                sa.update(leases)
                .where(leases.c.run == lease.run, leases.c.owner == lease.owner)
                .values(expires_at=expires_at)
            )
            if connection.execute(query).rowcount:
                kept.add(lease.run)
    for lease in held:
        lease.prolong(asked + lease_s if lease.run in kept else 0.0)
    return [lease for lease in held if lease.run not in kept]


def release(store: Store, lease: Lease) -> None:
    """Gives a lease back, so that others need not wait for its expiry.

    Raises:
        StoreError: the database did not answer; the lease expires by itself.
    """
    lease.prolong(0.0)
    with store.write() as connection:
        connection.execute(
            sa.delete(leases).where(leases.c.run == lease.run, leases.c.owner == lease.owner)
        )


def reap(store: Store) -> int:
    """Deletes expired leases of runs that have ended; returns how many.

    Raises:
        StoreError: the database did not answer.
    """
    ended = sa.select(runs.c.key).where(runs.c.state.in_(ENDED))
    with store.write() as connection:
        return connection.execute(
            sa.delete(leases).where(
                leases.c.expires_at <= _now(connection), leases.c.run.in_(ended)
            )
        ).rowcount


def _now(connection: sa.Connection) -> float:
    """Unix time, by the database's clock."""
    if connection.dialect.name == "postgresql":
        return float(connection.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())")))
    return time.time()  # SQLite: a file of this machine, so all see this clock
