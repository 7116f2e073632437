"""Leases: exclusive rights to plan a run, or to manage its jobs on an engine.

A lease expires by the database's clock. All functions raise `StoreError` if the database fails;
then existing leases remain until they expire.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import sqlalchemy as sa

from paceline.wire import ENDED
from paceline_backend.store.database import Store, insert, now
from paceline_backend.store.schema import engine_leases, leases, runs

# The two purposes are independent: different workers may hold them for the same run.
Purpose = Literal["plan", "jobs"]
_TABLES = {"plan": leases, "jobs": engine_leases}


def acquire(store: Store, run: int, owner: str, lease_s: float, purpose: Purpose = "plan") -> bool:
    """Take or renew a lease for `lease_s` seconds; return False if another owner holds it."""
    table = _TABLES[purpose]
    with store.write() as connection:
        at = now(connection)
        query = insert(connection, table).values(run=run, owner=owner, expires_at=at + lease_s)
        taken = connection.execute(
            query.on_conflict_do_update(
                index_elements=[table.c.run],
                set_={"owner": owner, "expires_at": query.excluded.expires_at},
                where=(table.c.owner == owner) | (table.c.expires_at <= at),
            ).returning(table.c.run)
        ).one_or_none()
    return taken is not None


def extend(
    store: Store, held: Collection[tuple[int, str]], lease_s: float, purpose: Purpose = "plan"
) -> set[int]:
    """Extend leases, given as (key of the run, owner); return the runs whose leases remain held."""
    of_owners: dict[str, list[int]] = {}
    for run, owner in held:
        of_owners.setdefault(owner, []).append(run)
    kept: set[int] = set()
    table = _TABLES[purpose]
    with store.write() as connection:
        expires_at = now(connection) + lease_s
        for owner, of_owner in of_owners.items():
            query = (
                sa.update(table)
                .where(table.c.owner == owner, table.c.run.in_(of_owner))
                .values(expires_at=expires_at)
                .returning(table.c.run)
            )
            kept.update(connection.execute(query).scalars())
    return kept


def release(store: Store, run: int, owner: str, purpose: Purpose = "plan") -> None:
    """Delete an owner's lease of a run, so that others need not wait until it expires."""
    table = _TABLES[purpose]
    with store.write() as connection:
        connection.execute(sa.delete(table).where(table.c.run == run, table.c.owner == owner))


def reap(store: Store) -> int:
    """Delete expired leases of runs that have ended; return their number."""
    ended = sa.select(runs.c.key).where(runs.c.state.in_(ENDED))
    with store.write() as connection:
        at = now(connection)
        return sum(
            connection.execute(
                sa.delete(table).where(table.c.expires_at <= at, table.c.run.in_(ended))
            ).rowcount
            for table in _TABLES.values()
        )


def held_now(connection: sa.Connection) -> int:
    """Return the number of runs that are being planned: their leases have not expired."""
    query = sa.select(sa.func.count()).where(leases.c.expires_at > now(connection))
    return int(connection.execute(query).scalar_one())
