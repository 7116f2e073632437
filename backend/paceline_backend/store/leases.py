"""Leases: exclusive rights of one worker process, for a limited time.

A worker holds a lease on a run to plan it or to manage its jobs on an engine, and a lease on all
runs for work that one worker does for all of them, such as evaluating alerts. A lease expires by
the database's clock. If a worker dies, another worker can take its lease once it has expired. If
the database fails, existing leases remain until they expire.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, Literal, TypeVar

import sqlalchemy as sa

from paceline.wire.states import ACTIVE
from paceline_backend.store.database import Store, StoreError, insert, now
from paceline_backend.store.schema import leases, runs

log = logging.getLogger(__name__)

# Leases for different purposes are independent: different workers may hold them on the same run.
Purpose = Literal["plan", "jobs", "alerts", "fleet"]
# Value in place of a run's key, for a lease on all runs. Keys of runs start at 1.
ALL_RUNS = 0

S = TypeVar("S", bound=sa.Select[Any])


def take(connection: sa.Connection, run: int, owner: str, lease_s: float, purpose: Purpose) -> bool:
    """Take or renew a lease for `lease_s` seconds; return False if another owner holds it.

    Until this transaction ends, no other owner can take the lease.
    """
    at = now(connection)
    row = {"purpose": purpose, "run": run, "owner": owner, "expires_at": at + lease_s}
    query = insert(connection, leases).values(row)
    taken = connection.execute(
        query.on_conflict_do_update(
            index_elements=[leases.c.purpose, leases.c.run],
            set_={"owner": owner, "expires_at": query.excluded.expires_at},
            where=(leases.c.owner == owner) | (leases.c.expires_at <= at),
        ).returning(leases.c.run)
    ).one_or_none()
    return taken is not None


def acquire(store: Store, run: int, owner: str, lease_s: float, purpose: Purpose = "plan") -> bool:
    """Call `take` in a transaction of its own."""
    with store.write() as connection:
        return take(connection, run, owner, lease_s, purpose)


def extend(
    store: Store, held: Collection[tuple[int, str]], lease_s: float, purpose: Purpose = "plan"
) -> set[int]:
    """Extend leases, given as (key of the run, owner).

    Return the keys of the runs whose leases were extended; the other leases have been lost.
    """
    of_owners: dict[str, list[int]] = {}
    for run, owner in held:
        of_owners.setdefault(owner, []).append(run)
    kept: set[int] = set()
    c = leases.c
    with store.write() as connection:
        expires_at = now(connection) + lease_s
        for owner, of_owner in of_owners.items():
            query = (
                sa.update(leases)
                .where(c.purpose == purpose, c.owner == owner, c.run.in_(of_owner))
                .values(expires_at=expires_at)
                .returning(c.run)
            )
            kept.update(connection.execute(query).scalars())
    return kept


def release(store: Store, run: int, owner: str, purpose: Purpose = "plan") -> None:
    """Delete an owner's lease."""
    c = leases.c
    mine = (c.purpose == purpose, c.run == run, c.owner == owner)
    with store.write() as connection:
        connection.execute(sa.delete(leases).where(*mine))


def give_back(store: Store, owner: str, purpose: Purpose) -> None:
    """Release a lease on all runs; if the database fails, log a warning."""
    try:
        release(store, ALL_RUNS, owner, purpose)
    except StoreError as error:
        log.warning("cannot release the lease %s, so it expires on its own: %s", purpose, error)


def reap(store: Store) -> int:
    """Delete expired leases on runs that have ended or were deleted; return their number."""
    c = leases.c
    active = sa.select(runs.c.key).where(runs.c.state.in_(ACTIVE))
    with store.write() as connection:
        over = (c.expires_at <= now(connection), c.run != ALL_RUNS, c.run.not_in(active))
        return connection.execute(sa.delete(leases).where(*over)).rowcount


def held_now(connection: sa.Connection) -> int:
    """Return the number of unexpired planning leases, that is, of runs that a worker plans."""
    planned = (leases.c.purpose == "plan", leases.c.expires_at > now(connection))
    query = sa.select(sa.func.count()).select_from(leases).where(*planned)
    return int(connection.execute(query).scalar_one())


def planners(connection: sa.Connection, keys: Collection[int]) -> dict[int, tuple[str, float]]:
    """Return the owner and the expiry of each run's planning lease, by the run's key."""
    c = leases.c
    query = sa.select(c.run, c.owner, c.expires_at).where(c.purpose == "plan", c.run.in_(keys))
    return {row.run: (row.owner, row.expires_at) for row in connection.execute(query)}


def unless_planned(query: S, owner: str, at: float) -> S:
    """Restrict a query to runs that no other worker plans.

    `query` selects from `runs`; `at` is the current time by the database's clock.
    """
    c = leases.c
    planned = sa.and_(c.purpose == "plan", c.run == runs.c.key)
    mine = sa.or_(c.owner.is_(None), c.owner == owner, c.expires_at <= at)
    return query.outerjoin(leases, planned).where(mine)
