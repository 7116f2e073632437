"""Read a node's history: its runs, the verdicts that named it slow, and its cordons."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from paceline_backend.store.nodes import cordons, slowness
from paceline_backend.store.schema import run_nodes, runs


def of_node(connection: sa.Connection, node: str, limit: int) -> dict[str, Any]:
    """Return a node's history, at most `limit` items of each kind, newest first.

    Raises:
        UnknownNodeError: no such node.
    """
    cordons.check(connection, node)
    return {
        "node": node,
        "runs": _runs(connection, node, limit),
        "slow": slowness.of_node(connection, node, limit),
        "cordons": cordons.of_node(connection, node)[:limit],
    }


def _runs(connection: sa.Connection, node: str, limit: int) -> list[dict[str, Any]]:
    c, own = runs.c, run_nodes.c
    here = sa.and_(own.run == c.key, own.node == node)
    query = (
        sa.select(
            c.id.label("run"),
            c.name,
            sa.func.coalesce(own.state, c.state).label("state"),
            sa.func.coalesce(own.launched_at, c.created_at).label("launched_at"),
            sa.func.coalesce(own.message, sa.case((own.node.is_(None), c.message))).label(
                "message"
            ),
            sa.func.coalesce(own.leaving, False).label("asked_to_leave"),
            own.replaces,
        )
        .outerjoin(run_nodes, here)
        .where(sa.or_(own.node.is_not(None), c.node == node), c.pruned_at.is_(None))
        .order_by(c.key.desc())
        .limit(limit)
    )
    return [dict(row) for row in connection.execute(query).mappings()]
