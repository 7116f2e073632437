"""Which engines may have jobs of a run, also after the run went elsewhere or was deleted.

The row is made in the transaction that asks for jobs, and goes once the engine has none of them. An
engine that is away meanwhile, or a control plane that ends, forgets none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa

from paceline_backend.store.database import Connection, insert
from paceline_backend.store.schema import engine_runs, runs


@dataclass(frozen=True)
class Leftover:
    """A run that went elsewhere or is deleted, and of which an engine may still have jobs."""

    backend: str  # the engine
    run: str  # public id
    key: int | None  # None: it is deleted, or is being deleted


def add(connection: Connection, run: str, backend: str) -> None:
    """Notes that an engine may have jobs of a run from now on."""
    query = insert(connection, engine_runs).values(run=run, backend=backend)
    connection.execute(query.on_conflict_do_nothing())


def remove(connection: Connection, run: str, backend: str) -> None:
    """Notes that an engine has no jobs of a run, and gets none."""
    c = engine_runs.c
    connection.execute(sa.delete(engine_runs).where(c.backend == backend, c.run == run))


def leftovers(connection: Connection, backends: Collection[str]) -> list[Leftover]:
    """What some engines may have of runs that are not there any more."""
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
    """Notes that an engine has nothing left of a run, unless the run came back meanwhile."""
    there = sa.select(runs.c.backend).where(runs.c.id == left.run, runs.c.pruned_at.is_(None))
    if connection.execute(there.with_for_update(key_share=True)).scalar() != left.backend:
        remove(connection, left.run, left.backend)
