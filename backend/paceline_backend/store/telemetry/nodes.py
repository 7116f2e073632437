"""Store the heartbeats of agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from paceline.wire import NodeCheck, NodeState
from paceline_backend.store import refusals, schema
from paceline_backend.store.database import StoreRefusedError, insert, now

# An agent that was just started does not have these, so keep the stored values.
_REMEMBERED = ("check", "checked_at")
# Columns that heartbeats do not change.
_KEPT = ("id", "registered_at", "signed", "only_run", "token", "seed", "backend", "host")


def write(connection: sa.Connection, states: Sequence[NodeState]) -> None:
    """Store each node's latest state, with the database's time because a node's clock may be wrong.

    `states` are in the order of arrival. The caller has checked that the agents have a session: see
    `store.nodes.expect`.
    """
    if not states:
        return
    for state in states:
        if reason := refusals.of_node_state(state):
            raise StoreRefusedError(f"NodeState.{reason}")
    latest = {state.node: state for state in states}
    at = now(connection)
    rows = insert(connection, schema.nodes)
    mutable = [c.name for c in schema.nodes.c if c.name not in _KEPT]
    changes: dict[str, sa.ColumnElement[Any]] = {name: rows.excluded[name] for name in mutable}
    for name in _REMEMBERED:
        changes[name] = sa.func.coalesce(rows.excluded[name], schema.nodes.c[name])
    upsert = rows.on_conflict_do_update(index_elements=["id"], set_=changes)
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
                "registered_at": at,
                "heartbeat_at": at,
                "left": state.left,
                "runs": state.runs,
                "signed": False,
                "gpu_states": [msgspec.structs.asdict(gpu) for gpu in state.gpu_states] or None,
                "check": None if state.check is None else _speeds(state.check),
                "checked_at": None if state.check is None else state.check.at,
            }
            for state in latest.values()
        ],
    )


def _speeds(check: NodeCheck) -> dict[str, float | None]:
    names = ("compute_gflops", "memory_gbps", "disk_mbps")
    return {name: getattr(check, name) for name in names}
