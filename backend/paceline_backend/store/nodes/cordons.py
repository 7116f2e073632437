"""Cordons: an operator excludes a node from new runs until the cordon is lifted.

Active runs on the node continue. If an engine provides the node, the cordon applies to the machine,
that is, to all nodes with the same `host` (the engine's name of the machine). A worker process
sends the cordon, and later its end, to the engine: `untold` returns the changes to send, and
`note_told` records the engine's replies.

`cordon`, `lift` and `check` raise `UnknownNodeError` if the node never registered.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.core.errors import PacelineError
from paceline_backend.store.database import insert
from paceline_backend.store.schema import cordons, nodes

_NO_HOST = "the node did not report the engine's name of its machine"


class UnknownNodeError(PacelineError):
    """No node of this name ever registered."""


class CordonedError(PacelineError):
    """The node is already cordoned (raised by `cordon`), or is not cordoned (raised by `lift`)."""


@dataclass(frozen=True)
class Cordon:
    """A row of `cordons` that is not lifted, or whose engine has not accepted the lifting yet."""

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
        """Return author, time and reason; None if the cordon is lifted."""
        if self.lifted_at is not None:
            return None
        return {"by": self.by, "at": self.at, "reason": self.reason}

    @property
    def in_engine(self) -> dict[str, Any] | None:
        """Return engine, machine, and the engine's answer; None if no engine provides the node."""
        if self.backend is None:
            return None
        names = ("backend", "host", "told_at", "refusal")
        return {name: getattr(self, name) for name in names} | {"cordoned": self.lifted_at is None}


@dataclass(frozen=True)
class ActiveCordons:
    """All active cordons, by node and by machine of an engine: (engine, host)."""

    by_node: Mapping[str, Cordon]
    by_host: Mapping[tuple[str | None, str], Cordon]

    def of(self, node: str, backend: str | None, host: str | None) -> Cordon | None:
        """Return the cordon of a node or of its machine."""
        of_host = None if host is None else self.by_host.get((backend, host))
        return of_host or self.by_node.get(node)


def active(connection: sa.Connection) -> ActiveCordons:
    """Return one cordon per node and machine: the newest that is not lifted, else the newest."""
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
    """Cordon a node on behalf of `by`.

    Raises:
        CordonedError: the node is already cordoned; the message has author and reason.
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
    known = active(connection).of(node, backend, host)
    if known is not None and known.shown is not None:
        raise CordonedError(f"{words(node, known.shown)}: lift that cordon first")


def lift(connection: sa.Connection, node: str, by: str, why: str) -> None:
    """Lift a node's cordon on behalf of `by`.

    If the engine refused to lift the cordon before, the request is sent to the engine again.

    Raises:
        CordonedError: the node is not cordoned.
    """
    backend, host = check(connection, node)
    c = cordons.c
    mine = c.node == node
    if host is not None:
        mine |= (c.backend == backend) & (c.host == host)
    at = time.time()
    # If the engine refused the cordon, its end need not be sent to the engine.
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
    """Return all cordons that a node had, newest first."""
    c = cordons.c
    query = sa.select(c.at, c.by, c.reason, c.lifted_at, c.lifted_by, c.lifted_why)
    rows = connection.execute(query.where(c.node == node).order_by(c.key.desc()))
    return [dict(row) for row in rows.mappings()]


def check(connection: sa.Connection, node: str) -> tuple[str | None, str | None]:
    """Return a node's engine, and the name that the engine uses for its machine; None: unknown.

    A node that has not sent a heartbeat yet counts as not registered.
    """
    c = nodes.c
    query = sa.select(c.backend, c.host).where(c.id == node, c.heartbeat_at > 0)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise UnknownNodeError(f"no node {node}")
    return row.backend, row.host


def words(node: str, cordoned: Mapping[str, Any]) -> str:
    """Return a text for messages, such as "node n1 is cordoned by ann (slow disk)"."""
    why = f" ({cordoned['reason']})" if cordoned["reason"] else ""
    return f"node {node} is cordoned by {cordoned['by']}{why}"


@dataclass(frozen=True)
class Word:
    """A change of a machine's cordon that must be sent to its engine.

    `reason` has author and reason of the cordon, or is None if the machine is no longer cordoned.
    `rows` has `key` and `lifted_at` of the rows of `cordons` behind the change.
    """

    backend: str
    host: str
    reason: str | None
    rows: tuple[tuple[int, float | None], ...]


def untold(connection: sa.Connection, backends: Collection[str]) -> list[Word]:
    """Return the changes that must still be sent to the engines in `backends`, oldest first.

    A machine with several rows in `cordons` is cordoned while one of them is not lifted.
    """
    c = cordons.c
    waiting = (c.host.is_not(None), c.told_at.is_(None), c.refusal.is_(None))
    hosts = sa.select(c.backend, c.host).where(c.backend.in_(backends), *waiting).distinct()
    due = {(row.backend, row.host) for row in connection.execute(hosts)}
    if not due:
        return []
    counts = c.lifted_at.is_(None) | c.told_at.is_(None)
    query = sa.select(cordons).where(sa.tuple_(c.backend, c.host).in_(due), counts)
    of_host: dict[tuple[str, str], list[sa.Row[tuple[object, ...]]]] = defaultdict(list)
    for row in connection.execute(query.order_by(c.key)):
        of_host[row.backend, row.host].append(row)
    changes = []
    for (backend, host), rows in of_host.items():
        present = [row for row in rows if row.lifted_at is None]
        reason = _reason(present[-1].by, present[-1].reason) if present else None
        behind = tuple((row.key, row.lifted_at) for row in rows)
        changes.append(Word(backend, host, reason, behind))
    return changes


def _reason(by: str, why: str) -> str:
    return f"{by}: {why}" if why else by


def note_told(connection: sa.Connection, word: Word, refusal: str | None) -> None:
    """Record that an engine accepted a change, or why it refused.

    Rows of `cordons` that changed since `word` was read are sent again, even if another worker has
    sent them meanwhile: it is unknown which worker's message reached the engine last. `refusal` is
    the engine's error message, None if it accepted.
    """
    c = cordons.c
    said = {"told_at": None if refusal else time.time(), "refusal": refusal}
    for key, lifted_at in word.rows:
        mine = sa.update(cordons).where(c.key == key)
        same = mine.where(c.lifted_at.is_not_distinct_from(lifted_at))
        if not connection.execute(same.values(said)).rowcount:
            connection.execute(mine.values(told_at=None, refusal=None))
    newer = (c.backend == word.backend, c.host == word.host, c.key > word.rows[-1][0])
    connection.execute(sa.update(cordons).where(*newer).values(told_at=None, refusal=None))


def untaken(connection: sa.Connection, backend: str) -> list[str]:
    """Return an engine's machines that are cordoned in Paceline, but not (yet) in the engine."""
    c = cordons.c
    query = sa.select(c.host).where(c.backend == backend, c.host.is_not(None), c.told_at.is_(None))
    return sorted(set(connection.execute(query.where(c.lifted_at.is_(None))).scalars()))
