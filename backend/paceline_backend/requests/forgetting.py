"""Forget a node: remove it from the list, with its key and its user of the bus."""

from __future__ import annotations

from typing import Any

from paceline.wire import commands, node_telemetry
from paceline_backend.requests import streams
from paceline_backend.requests.errors import ConflictError
from paceline_backend.server import users
from paceline_backend.store import Store, nodes
from paceline_backend.store.audit import Requester, record
from paceline_backend.store.nodes import cordons


def forget_node(store: Store, bus_url: str, node: str, by: Requester) -> dict[str, Any]:
    """Delete a node that is out of use; return it as it was.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        node: its name.
        by: who asks.

    Raises:
        UnknownNodeError: no such node.
        ConflictError: its agent answers, or a run that has not ended was launched there.
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
    """
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            cordons.check(connection, node)
            known = nodes.known(connection, node)
            if known["alive"]:
                raise ConflictError(
                    f"the agent of node {node} answers: stop it, or revoke its token first "
                    "(`paceline token revoke`)"
                )
            if running := nodes.launched(connection).get(node):
                names = ", ".join(running)
                raise ConflictError(f"node {node} still has a part in run {names}: stop it first")
            nodes.forget(connection, node)
            record(connection, by, "node.forget", target=node)
            # Before the transaction ends: otherwise a bus that goes away now would keep the user.
            users.forget(bus, [users.name_of_node(node)])
        bus.delete(commands(node), node_telemetry(node))
    return known
