"""Cordons: nodes that get nothing new until somebody lifts the cordon. Runs on them go on.

A cordon of a node that an engine gave is one of its machine: of all nodes that the engine calls by
this host. The engine is told of the cordon and of its end by a worker (`engine_cordons`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.core.errors import PacelineError
from paceline_backend.store.database import insert
from paceline_backend.store.schema import cordons, nodes

_NO_HOST = "the node did not say what the engine calls its machine"


class UnknownNodeError(PacelineError):
    """No node of this name ever registered."""


class CordonedError(PacelineError):
    """The node is cordoned already, or is not cordoned."""


@dataclass(frozen=True)
class Cordon:
    """A row of `cordons` that counts: it is not lifted, or its engine does not know yet."""

    key: int
    node: str
    at: float
    by: str
    reason: str
    lifted_at: float | None
    backend: str | None
    host: str | None
    told_at: float | None
    refusal: str | None

    @property
    def shown(self) -> dict[str, Any] | None:
        """By whom, when and why; None: it is lifted."""
        if self.lifted_at is not None:
            return None
        return {"by": self.by, "at": self.at, "reason": self.reason}

    @property
    def in_engine(self) -> dict[str, Any] | None:
        """What became of it in its engine; None: the node is of no engine."""
        if self.backend is None:
            return None
        names = ("backend", "host", "told_at", "refusal")
        return {name: getattr(self, name) for name in names} | {"cordoned": self.lifted_at is None}


@dataclass(frozen=True)
class ActiveCordons:
    """The cordons that count."""

    by_node: Mapping[str, Cordon]
    by_host: Mapping[tuple[str | None, str], Cordon]  # of engines

    def of(self, node: str, backend: str | None, host: str | None) -> Cordon | None:
        """The cordon of a node, or of its machine."""
        of_host = None if host is None else self.by_host.get((backend, host))
        return of_host or self.by_node.get(node)


def standing(connection: sa.Connection) -> ActiveCordons:
    """The cordons that count; of two of the same node or machine the one that is not lifted."""
    c = cordons.c
    names = list(Cordon.__dataclass_fields__)
    query = sa.select(*(c[name] for name in names)).where(_counts()).order_by(c.key)
    known = [Cordon(*row) for row in connection.execute(query)]
    known.sort(key=lambda row: (row.lifted_at is None, row.key))
    by_host = {(row.backend, row.host): row for row in known if row.host is not None}
    return ActiveCordons({row.node: row for row in known}, by_host)


def _counts() -> sa.ColumnElement[bool]:
    c = cordons.c
    return c.lifted_at.is_(None) | (c.backend.is_not(None) & c.told_at.is_(None))


def cordon(connection: sa.Connection, node: str, by: str, reason: str) -> None:
    """Cordons a node.

    Args:
        connection: to write with.
        node: its name.
        by: who asks.
        reason: why.

    Raises:
        UnknownNodeError: no such node.
        CordonedError: somebody has cordoned it; the message says who and why.
    """
    backend, host = check(connection, node)
    row = {"node": node, "at": time.time(), "by": by, "reason": reason}
    if backend is not None:
        row |= {"backend": backend, "host": host, "refusal": None if host else _NO_HOST}
    _refuse_second(connection, node, backend, host)
    made = insert(connection, cordons).values(row).on_conflict_do_nothing()
    if connection.execute(made.returning(cordons.c.key)).scalar() is None:
        _refuse_second(connection, node, backend, host)


def _refuse_second(
    connection: sa.Connection, node: str, backend: str | None, host: str | None
) -> None:
    known = standing(connection).of(node, backend, host)
    if known is not None and known.shown is not None:
        raise CordonedError(f"{words(node, known.shown)}: lift that cordon first")


def lift(connection: sa.Connection, node: str, by: str, why: str) -> None:
    """Lifts a node's cordon; where its engine refused to lift it, the engine is asked again.

    Args:
        connection: to write with.
        node: its name.
        by: who asks.
        why: the reason.

    Raises:
        UnknownNodeError: no such node.
        CordonedError: it is not cordoned.
    """
    backend, host = check(connection, node)
    c = cordons.c
    mine = c.node == node
    if host is not None:
        mine |= (c.backend == backend) & (c.host == host)
    at = time.time()
    # What the engine refused to do, it need not undo.
    values = {
        "told_at": sa.case((c.refusal.is_not(None), at)),
        "refusal": None,
        "lifted_at": at,
        "lifted_by": by,
        "lifted_why": why,
    }
    present = sa.update(cordons).where(mine, c.lifted_at.is_(None)).values(values)
    again = sa.update(cordons).where(mine, c.lifted_at.is_not(None), c.refusal.is_not(None))
    lifted = connection.execute(present).rowcount
    asked_again = connection.execute(again.values(refusal=None, told_at=None)).rowcount
    if not lifted and not asked_again:
        raise CordonedError(f"node {node} is not cordoned")


def of_node(connection: sa.Connection, node: str) -> list[dict[str, Any]]:
    """All cordons that a node had, the newest first."""
    c = cordons.c
    query = sa.select(c.at, c.by, c.reason, c.lifted_at, c.lifted_by, c.lifted_why)
    rows = connection.execute(query.where(c.node == node).order_by(c.key.desc()))
    return [dict(row) for row in rows.mappings()]


def check(connection: sa.Connection, node: str) -> tuple[str | None, str | None]:
    """Refuses a node that never registered: its agent may have a session and not have spoken yet.

    Returns:
        Its engine, and what the engine calls its machine; None: it has none, or did not say.

    Raises:
        UnknownNodeError: no such node.
    """
    c = nodes.c
    query = sa.select(c.backend, c.host).where(c.id == node, c.heartbeat_at > 0)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise UnknownNodeError(f"no node {node}")
    return row.backend, row.host


def words(node: str, cordoned: Mapping[str, Any]) -> str:
    """The sentence about a cordoned node, without a full stop."""
    why = f" ({cordoned['reason']})" if cordoned["reason"] else ""
    return f"node {node} is cordoned by {cordoned['by']}{why}"
