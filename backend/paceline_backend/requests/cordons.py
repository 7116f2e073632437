"""Cordoning of nodes.

A cordoned node gets no new run and joins none; runs on it continue. Functions raise
`UnknownNodeError` if there is no such node.
"""

from __future__ import annotations

import contextlib

from paceline_backend.requests.errors import ConflictError
from paceline_backend.store import Connection, Store
from paceline_backend.store.audit import Requester, record
from paceline_backend.store.nodes import cordons


def cordon(store: Store, node: str, by: Requester) -> None:
    """Cordon a node.

    Raises:
        ConflictError: the node is cordoned already.
    """
    with store.write() as connection:
        try:
            cordons.cordon(connection, node, by.name, by.why)
        except cordons.CordonedError as error:
            raise ConflictError(str(error)) from error
        record(connection, by, "node.cordon", target=node)


def uncordon(store: Store, node: str, by: Requester) -> None:
    """Lift a node's cordon.

    Raises:
        ConflictError: the node is not cordoned.
    """
    with store.write() as connection:
        try:
            cordons.lift(connection, node, by.name, by.why)
        except cordons.CordonedError as error:
            raise ConflictError(str(error)) from error
        record(connection, by, "node.uncordon", target=node)


def cordon_too(connection: Connection, node: str, by: Requester) -> None:
    """Cordon a node in the transaction in which it leaves a run, unless it is cordoned already."""
    with contextlib.suppress(cordons.CordonedError):
        cordons.cordon(connection, node, by.name, by.why)
