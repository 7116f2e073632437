"""Record which engines may have jobs of a run, even after the run moved elsewhere or was deleted.

A row is inserted in the transaction that requests jobs, and deleted once the engine has none of
them. So leftover jobs are cancelled even if the engine was unreachable or the control plane
restarted meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa

from paceline_backend.store.database import Connection, insert
from paceline_backend.store.schema import engine_runs, runs


@dataclass(frozen=True)
class Leftover:
    """A run that moved elsewhere or is deleted, while an engine may still have jobs of it.

    `backend` is the engine, and `key` is None if the run is deleted or is being deleted.
    """

    backend: str
    run: str
    key: int | None


def add(connection: Connection, run: str, backend: str) -> None:
    """Record that an engine may have jobs of a run from now on."""
    query = insert(connection, engine_runs).values(run=run, backend=backend)
    connection.execute(query.on_conflict_do_nothing())


def remove(connection: Connection, run: str, backend: str) -> None:
    """Record that an engine has no jobs of a run and will get none."""
    c = engine_runs.c
    connection.execute(sa.delete(engine_runs).where(c.backend == backend, c.run == run))


def leftovers(connection: Connection, backends: Collection[str]) -> list[Leftover]:
    """Return the possible leftovers of runs that moved elsewhere or are deleted."""
    c = engine_runs.c
    deleted = runs.c.key.is_(None) | runs.c.pruned_at.is_not(None)
    query = (
        sa.select(c.backend, c.run, runs.c.key, runs.c.pruned_at)
        .outerjoin(runs, runs.c.id == c.run)
        .where(c.backend.in_(backends), deleted | (runs.c.backend != c.backend))
        .order_by(c.backend, c.run)
    )
    return [
        Leftover(row.backend, row.run, row.key if row.pruned_at is None else None)
        for row in connection.execute(query)
    ]


def clear(connection: Connection, left: Leftover) -> None:
    """Record that an engine has no jobs of a run, unless the run came back meanwhile."""
    there = sa.select(runs.c.backend).where(runs.c.id == left.run, runs.c.pruned_at.is_(None))
    if connection.execute(there.with_for_update(key_share=True)).scalar() != left.backend:
        remove(connection, left.run, left.backend)
