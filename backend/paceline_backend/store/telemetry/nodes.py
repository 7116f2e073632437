"""What agents say about their nodes."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from paceline.wire import NodeState
from paceline_backend.store import refusals, schema
from paceline_backend.store.database import StoreRefusedError, insert


def write(connection: sa.Connection, states: Sequence[NodeState]) -> None:
    """Writes each node's latest state, unless a later one is there.

    Raises:
        StoreRefusedError: some state holds what no database takes.
    """
    if not states:
        return
    for state in states:
        if reason := refusals.of_node_state(state):
            raise StoreRefusedError(f"NodeState.{reason}")
    latest = {state.node: state for state in sorted(states, key=lambda state: state.at)}
    rows = insert(connection, schema.nodes)
    mutable = [c.name for c in schema.nodes.c if c.name not in ("id", "registered_at")]
    upsert = rows.on_conflict_do_update(
        index_elements=["id"],
        set_={name: rows.excluded[name] for name in mutable},
        where=rows.excluded.heartbeat_at >= schema.nodes.c.heartbeat_at,
    )
    connection.execute(
        upsert,
        [
            {
                "id": state.node,
                "hostname": state.hostname,
                "cores": state.cores,
                "memory_bytes": state.memory_bytes,
                "gpus": state.gpus,
                "paceline": state.paceline,
                "registered_at": state.at,
                "heartbeat_at": state.at,
                "left": state.left,
                "runs": state.runs,
            }
            for state in latest.values()
        ],
    )
