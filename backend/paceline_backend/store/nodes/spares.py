"""Spares: idle nodes that are reserved for a run, to replace a slow or lost node.

A spare is reserved until the run uses it or has ended. No other run gets it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from paceline.wire import ENDED
from paceline_backend.store.database import insert
from paceline_backend.store.schema import runs, spares


def held(connection: sa.Connection) -> dict[str, str]:
    """Return the reserved nodes: node → public id of the run."""
    query = (
        sa.select(spares.c.node, runs.c.id)
        .join(runs, runs.c.key == spares.c.run)
        .where(runs.c.state.not_in(ENDED), runs.c.pruned_at.is_(None))
    )
    return {row.node: row.id for row in connection.execute(query)}


def hold(connection: sa.Connection, run: int, names: Iterable[str]) -> None:
    """Reserve exactly these nodes for a run."""
    connection.execute(sa.delete(spares).where(spares.c.run == run))
    for node in names:
        add(connection, run, node)


def add(connection: sa.Connection, run: int, node: str) -> None:
    """Reserve one more node for a run."""
    row = insert(connection, spares).values(run=run, node=node)
    connection.execute(row.on_conflict_do_nothing())


def use(connection: sa.Connection, run: int, names: Iterable[str]) -> None:
    """Record that a run is launched on nodes, which are then no longer its spares."""
    mine = (spares.c.run == run, spares.c.node.in_(list(names)))
    connection.execute(sa.delete(spares).where(*mine))
