"""Leases: which control plane plans a run. Expiry is judged by the database's clock."""

from __future__ import annotations

import time
from collections.abc import Collection

import sqlalchemy as sa

from paceline.wire import ENDED
from paceline_backend.store.database import Store, insert
from paceline_backend.store.schema import leases, runs


def acquire(store: Store, run: int, owner: str, lease_s: float) -> bool:
    """Takes a lease that is free, expired, or this owner's already; False if another holds it.

    Args:
        store: the database.
        run: key of the run.
        owner: who wants it.
        lease_s: how long it lasts unless it is extended.

    Raises:
        StoreError: the database did not answer.
    """
    with store.write() as connection:
        now = _now(connection)
        query = insert(connection, leases).values(run=run, owner=owner, expires_at=now + lease_s)
        taken = connection.execute(
            query.on_conflict_do_update(
                index_elements=[leases.c.run],
                set_={"owner": owner, "expires_at": query.excluded.expires_at},
                where=(leases.c.owner == owner) | (leases.c.expires_at <= now),
            ).returning(leases.c.run)
        ).one_or_none()
    return taken is not None


def extend(store: Store, held: Collection[tuple[int, str]], lease_s: float) -> set[int]:
    """Prolongs leases, each given by the run's key and its owner; the runs whose lease is kept.

    Raises:
        StoreError: the database did not answer; the leases run on until they expire.
    """
    kept = set()
    with store.write() as connection:
        expires_at = _now(connection) + lease_s
        for run, owner in held:
            query = (
                sa.update(leases)
                .where(leases.c.run == run, leases.c.owner == owner)
                .values(expires_at=expires_at)
            )
            if connection.execute(query).rowcount:
                kept.add(run)
    return kept


def release(store: Store, run: int, owner: str) -> None:
    """Deletes an owner's lease of a run, so that others need not wait for its expiry.

    Raises:
        StoreError: the database did not answer; the lease expires by itself.
    """
    with store.write() as connection:
        connection.execute(sa.delete(leases).where(leases.c.run == run, leases.c.owner == owner))


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


def held_now(connection: sa.Connection) -> int:
    """How many leases have not expired by this process's clock."""
    query = sa.select(sa.func.count()).where(leases.c.expires_at > time.time())
    return int(connection.execute(query).scalar_one())


def _now(connection: sa.Connection) -> float:
    """Unix time, by the database's clock."""
    if connection.dialect.name == "postgresql":
        return float(connection.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())")))
    return time.time()  # SQLite is a file of this machine: all its users see this clock.
