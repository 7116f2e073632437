"""Requests about nodes: cordon, uncordon, and a new measurement of their speed.

A cordoned node gets no new run and joins none; runs on it continue. Functions raise
`UnknownNodeError` if there is no such node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from paceline.wire import COMMANDS_LENGTH, CheckNode, commands
from paceline.wire.bus import publish
from paceline_backend.requests import sessions, streams
from paceline_backend.requests.errors import ConflictError
from paceline_backend.store import Connection, Store, nodes
from paceline_backend.store.audit import Requester, record
from paceline_backend.store.nodes import cordons
from paceline_backend.store.nodes.cordons import UnknownNodeError


def cordon(store: Store, node: str, by: Requester) -> None:
    """Cordon a node, or raise `ConflictError` if it is cordoned already."""
    _change(store, node, by, cordons.cordon, "node.cordon")


def uncordon(store: Store, node: str, by: Requester) -> None:
    """Lift a node's cordon, or raise `ConflictError` if the node is not cordoned."""
    _change(store, node, by, cordons.lift, "node.uncordon")


def _change(
    store: Store,
    node: str,
    by: Requester,
    change: Callable[[Connection, str, str, str], None],
    action: str,
) -> None:
    with store.write() as connection:
        try:
            change(connection, node, by.name, by.why)
        except cordons.CordonedError as error:
            raise ConflictError(str(error)) from error
        record(connection, by, action, target=node)


def cordon_too(connection: Connection, node: str, by: Requester) -> None:
    """Cordon a node in the transaction in which it leaves a run, unless it is cordoned already."""
    with contextlib.suppress(cordons.CordonedError):
        cordons.cordon(connection, node, by.name, by.why)


def check_node(store: Store, bus_url: str, node: str, by: Requester) -> None:
    """Order a node's agent to measure the machine's speed. A later heartbeat carries the result.

    Raises:
        ConflictError: the agent does not answer, or ranks train on the node: the ranks and
            the measurement would slow each other down.
    """
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            row = next((row for row in nodes.listed(connection) if row["id"] == node), None)
            if row is None:
                raise UnknownNodeError(f"no node {node}")
            if not row["alive"] or not row["signed"]:
                raise ConflictError(
                    f"no agent with a session answers on node {node}: start `paceline agent` "
                    "there, with --server and a token"
                )
            if row["runs"]:
                names = ", ".join(row["runs"])
                raise ConflictError(f"ranks train on {node}: measure it when {names} has ended")
            record(connection, by, "node.check", target=node)
        key = sessions.keys(store, [node]).of_node(node)
        publish(bus, commands(node), CheckNode(), maxlen=COMMANDS_LENGTH, key=key)
