"""The rows of the audit log: how they are written and listed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.runs import cursor_at, key_at
from paceline_backend.store.schema import audit


@dataclass(frozen=True)
class Requester:
    """Who asks for a change, from where, and why."""

    name: str
    scope: str = ""  # what it may do; empty: the control plane itself
    address: str = ""
    via: str = ""  # the program that asks, as it calls itself
    why: str = ""
    operator: str = ""  # the name that who asks gave, where several share what names them

    @property
    def known_as(self) -> str:
        """The name that other operators know."""
        return self.operator or self.name


CONTROL_PLANE = Requester("the control plane")
UNKNOWN = "unknown"  # name of a client whose login failed
# Who stands in the lists of changes beside tokens and proxies' users.
RESERVED = (
    "auto",
    "scenario",
    "configured",
    "configured agent",
    "configured viewer",
    "owner",
    "server",
    UNKNOWN,
    CONTROL_PLANE.name,
)


def record(
    connection: sa.Connection,
    by: Requester,
    action: str,
    *,
    run: str | None = None,
    revision: int | None = None,
    target: str = "",
    details: Mapping[str, Any] | None = None,
) -> None:
    """Writes a row about a change that is made in the same transaction.

    Args:
        connection: to write with.
        by: who asks for it.
        action: what was done: ``run.create``, ``token.revoke``, …
        run: the public id of the run that was changed.
        revision: of that run, after the change.
        target: what else was changed, such as a token's id.
        details: plain values; never a secret.
    """
    who = {"operator": by.operator} if by.operator else {}
    values = {
        "at": time.time(),
        "who": by.name,
        "scope": by.scope,
        "address": by.address,
        "via": by.via,
        "action": action,
        "run": run,
        "revision": revision,
        "target": target,
        "why": by.why,
        "details": {**(details or {}), **who},
    }
    connection.execute(sa.insert(audit).values(values))


def newest(
    connection: sa.Connection,
    run: str,
    actions: Sequence[str] = (),
    *,
    without: Sequence[str] = (),
) -> dict[str, Any] | None:
    """The newest row about a run; with `actions`, about one of these; not about `without`."""
    query = sa.select(audit).where(audit.c.run == run).order_by(audit.c.key.desc()).limit(1)
    if actions:
        query = query.where(audit.c.action.in_(actions))
    if without:
        query = query.where(audit.c.action.not_in(without))
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else _plain(row)


def owners(connection: sa.Connection, runs: Sequence[str]) -> dict[str, str]:
    """Return who started some runs, by public id; runs of which that is unknown are left out."""
    c = audit.c
    first = sa.func.min(c.who).label("owner")
    query = sa.select(c.run, first).where(c.action == "run.create", c.run.in_(runs))
    return {row.run: row.owner for row in connection.execute(query.group_by(c.run))}


def stop_of(connection: sa.Connection, run: str) -> dict[str, Any] | None:
    """The row of who has asked for the end of a run's latest launch; None: nobody has."""
    change = newest(connection, run, ("run.create", "run.resume", "run.regroup", "run.stop"))
    return change if change is not None and change["action"] == "run.stop" else None


def stop_asked(connection: sa.Connection, run: str) -> bool:
    """Whether somebody has asked for the end of a run's latest launch."""
    return stop_of(connection, run) is not None


def page(
    connection: sa.Connection,
    *,
    run: str | None = None,
    who: str | None = None,
    action: str | None = None,
    since: float | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> tuple[list[dict[str, Any]], str | None]:
    """Rows, newest first, and the cursor of the next page (None: this was the last).

    Args:
        connection: to read from.
        run: only of this run.
        who: only by this requester.
        action: only these actions.
        since: only at this Unix time or later.
        limit: most rows.
        cursor: that an earlier page gave.

    Raises:
        CursorError: `cursor` is not one that an earlier page gave.
    """
    c = audit.c
    query = sa.select(audit).order_by(c.key.desc()).limit(limit + 1)
    for column, value in ((c.run, run), (c.who, who), (c.action, action)):
        if value is not None:
            query = query.where(column == value)
    if since is not None:
        query = query.where(c.at >= since)
    if cursor is not None:
        query = query.where(c.key < key_at(cursor, "an earlier page"))
    rows = [_plain(row) for row in connection.execute(query).mappings()]
    following = cursor_at(rows[limit - 1]["key"]) if len(rows) > limit else None
    return rows[:limit], following


def _plain(row: sa.RowMapping) -> dict[str, Any]:
    return {str(name): value for name, value in row.items()}
