"""Spares: idle nodes that are reserved for a run, to replace a slow or lost node.

A spare is reserved until the run uses it or has ended.
"""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from paceline.wire.states import ACTIVE
from paceline_backend.store.schema import runs


def held(connection: sa.Connection) -> dict[str, str]:
    """Return the reserved nodes: node → public id of the run."""
    c = runs.c
    reserved = (c.state.in_(ACTIVE), c.pruned_at.is_(None), c.spare_nodes.is_not(sa.null()))
    query = sa.select(c.id, c.spare_nodes).where(*reserved).order_by(c.key)
    return {node: row.id for row in connection.execute(query) for node in row.spare_nodes}


def hold(connection: sa.Connection, run: int, names: Iterable[str]) -> None:
    """Reserve exactly these nodes for a run, and release its other spares."""
    query = sa.update(runs).where(runs.c.key == run)
    connection.execute(query.values(spare_nodes=sorted(set(names)) or None))


def use(connection: sa.Connection, run: int, names: Iterable[str]) -> None:
    """Record that a run is launched on nodes, which are then no longer its spares."""
    query = sa.select(runs.c.spare_nodes).where(runs.c.key == run)
    reserved = set(connection.execute(query.with_for_update(key_share=True)).scalar() or ())
    used = reserved.intersection(names)
    if used:
        hold(connection, run, reserved - used)
