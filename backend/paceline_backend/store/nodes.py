"""Nodes: machines whose agents have registered."""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.schema import nodes

ALIVE_S = 10.0  # a node without a heartbeat for longer gets no new runs


def listed(connection: sa.Connection) -> list[dict[str, Any]]:
    """All nodes that ever registered, those that answer first."""
    oldest = time.time() - ALIVE_S
    query = sa.select(nodes).order_by(nodes.c.id)
    rows = [dict(row) for row in connection.execute(query).mappings()]
    for node in rows:
        node["alive"] = not node.pop("left") and node["heartbeat_at"] >= oldest
    return sorted(rows, key=lambda node: not node["alive"])
