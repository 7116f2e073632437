"""Cordons a node, or lifts its cordon."""

from __future__ import annotations

import contextlib

from paceline_backend.requests.errors import ConflictError
from paceline_backend.store import Connection, Store
from paceline_backend.store.audit import Requester, record
from paceline_backend.store.nodes import cordons


def cordon(store: Store, node: str, by: Requester) -> None:
    """Lets a node get no new run, and join none; runs on it go on.

    Args:
        store: the database.
        node: its name.
        by: who asks, and why.

    Raises:
        UnknownNodeError: no such node.
        ConflictError: it is cordoned already.
        StoreError: or one of its kinds.
    """
    with store.write() as connection:
        try:
            cordons.cordon(connection, node, by.name, by.why)
        except cordons.CordonedError as error:
            raise ConflictError(str(error)) from error
        record(connection, by, "node.cordon", target=node)


def uncordon(store: Store, node: str, by: Requester) -> None:
    """Lifts a node's cordon.

    Args:
        store: the database.
        node: its name.
        by: who asks, and why.

    Raises:
        UnknownNodeError: no such node.
        ConflictError: it is not cordoned.
        StoreError: or one of its kinds.
    """
    with store.write() as connection:
        try:
            cordons.lift(connection, node, by.name, by.why)
        except cordons.CordonedError as error:
            raise ConflictError(str(error)) from error
        record(connection, by, "node.uncordon", target=node)


def cordon_too(connection: Connection, node: str, by: Requester) -> None:
    """Cordons a node that leaves a run, in the transaction of that; it may be cordoned already."""
    with contextlib.suppress(cordons.CordonedError):
        cordons.cordon(connection, node, by.name, by.why)
