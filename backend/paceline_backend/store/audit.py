"""Audit log: a row for each change that a user or program requested.

A row is written in the transaction of its change, so that no change is stored without its row. A
change of a run also increments the run's revision. A client sends the revision that it has read. If
the run has been changed since, the change fails with `RevisionError`, which names the other client.

    with store.write() as connection:
        record_change(connection, RequestedChange(run, requester, expected=3), "run.policy")
        ...
    with store.write() as connection:
        record(connection, requester, "token.create", target="ci")  # any other change
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.core.errors import PacelineError
from paceline_backend.store.runs import cursor_at, key_at, key_of
from paceline_backend.store.schema import audit, runs


@dataclass(frozen=True)
class Requester:
    """Source of a change: name, origin and reason.

    Args:
        name: name of the token or proxy user.
        scope: what the requester may do; empty for the control plane itself.
        via: name of the client program, as it reports itself.
        operator: name that the person gave, if several people share one token or user.
    """

    name: str
    scope: str = ""
    address: str = ""
    via: str = ""
    why: str = ""
    operator: str = ""

    @property
    def known_as(self) -> str:
        """Return the name to show to other operators."""
        return self.operator or self.name


CONTROL_PLANE = Requester("the control plane")
# Name of a client whose login failed.
UNKNOWN = "unknown"
# Names in the audit log that no token and no proxy user may have.
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


@dataclass(frozen=True)
class ChangeFilter:
    """Filter for rows of the audit log; None accepts all.

    `run` is a public id, and `who` the name of the requester. `since` selects changes at this Unix
    time or later.
    """

    run: str | None = None
    who: str | None = None
    action: str | None = None
    since: float | None = None


_ALL = ChangeFilter()


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
    """Write a row about a change that the same transaction makes.

    `action` is the kind of change (``run.create``, ``token.revoke``, …), `run` the public id of the
    changed run, `revision` its revision after the change, and `target` another changed object, such
    as a token's id. `details` has plain values, never a secret.
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
    """Return the newest row about a run, or None if there is none.

    The action of the row is one of `actions` (empty: any action) and none of `without`.
    """
    query = sa.select(audit).where(audit.c.run == run).order_by(audit.c.key.desc()).limit(1)
    if actions:
        query = query.where(audit.c.action.in_(actions))
    if without:
        query = query.where(audit.c.action.not_in(without))
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else _plain(row)


def owners(connection: sa.Connection, runs: Sequence[str]) -> dict[str, str]:
    """Return each run's creator, by public id; runs whose creation is not logged are left out."""
    c = audit.c
    first = sa.func.min(c.who).label("owner")
    query = sa.select(c.run, first).where(c.action == "run.create", c.run.in_(runs))
    return {row.run: row.owner for row in connection.execute(query.group_by(c.run))}


def stop_of(connection: sa.Connection, run: str) -> dict[str, Any] | None:
    """Return the audit row of the request to stop a run's latest launch; None if there is none."""
    change = newest(connection, run, ("run.create", "run.resume", "run.regroup", "run.stop"))
    return change if change is not None and change["action"] == "run.stop" else None


def stop_asked(connection: sa.Connection, run: str) -> bool:
    """Return whether a stop of a run's latest launch was requested."""
    return stop_of(connection, run) is not None


def page(
    connection: sa.Connection,
    which: ChangeFilter = _ALL,
    limit: int = 50,
    cursor: str | None = None,
) -> tuple[list[dict[str, Any]], str | None]:
    """Return a page of the audit log, newest first, and the next page's cursor (None at the end).

    Raises:
        CursorError: `cursor` does not come from an earlier page.
    """
    c = audit.c
    query = sa.select(audit).order_by(c.key.desc()).limit(limit + 1)
    for column, value in ((c.run, which.run), (c.who, which.who), (c.action, which.action)):
        if value is not None:
            query = query.where(column == value)
    if which.since is not None:
        query = query.where(c.at >= which.since)
    if cursor is not None:
        query = query.where(c.key < key_at(cursor, "an earlier page"))
    rows = [_plain(row) for row in connection.execute(query).mappings()]
    following = cursor_at(rows[limit - 1]["key"]) if len(rows) > limit else None
    return rows[:limit], following


def _plain(row: sa.RowMapping) -> dict[str, Any]:
    return {str(name): value for name, value in row.items()}


NOTE = "run.note"
# Changes of tags do not conflict with other changes.
_TAGS = ("run.tag", "run.untag")


@dataclass(frozen=True)
class RequestedChange:
    """Requested change of a run.

    `run` is the public id, and `expected` the revision that the requester has read; None: any.
    """

    run: str
    by: Requester
    expected: int | None = None


class RevisionError(PacelineError):
    """The run was changed by another requester since the caller read it.

    `revision` is the current revision, and `change` the newest row of the audit log about the run,
    if any.
    """

    def __init__(self, run: str, revision: int, change: Mapping[str, Any] | None) -> None:
        self.revision = revision
        self.change = change
        by = f" by {self.who} ({change['action']})" if change else ""
        super().__init__(f"run {run} was changed{by} since you read it: reload it and retry")

    @property
    def who(self) -> str | None:
        """Return the requester of the last change, by the name that operators see."""
        if self.change is None:
            return None
        return str(self.change["details"].get("operator") or self.change["who"])


def record_change(
    connection: sa.Connection,
    change: RequestedChange,
    action: str,
    details: Mapping[str, Any] | None = None,
) -> int:
    """Record that this transaction changes a run; return the run's new revision.

    Call this before the change, because it locks the run's row: of two concurrent changes with the
    same expected revision, only one succeeds. For `action` and `details` see `record`. Notes do
    not change the training, so notes that others wrote since the expected revision make the change
    fail only if it is a note itself.

    Raises:
        UnknownRunError: no such run.
        RevisionError: a conflicting change was made after the expected revision.
    """
    run = change.run
    kept = sa.update(runs).where(runs.c.id == run, runs.c.pruned_at.is_(None))
    update = kept.values(revision=runs.c.revision + 1)
    if change.expected is not None:
        update = update.where(runs.c.revision == _as_seen(run, action, change.expected))
    revision = connection.execute(update.returning(runs.c.revision)).scalar()
    if revision is None:
        key_of(connection, run)
        labels = _TAGS if action == NOTE else (*_TAGS, NOTE)
        last = newest(connection, run, without=labels)
        raise RevisionError(run, revision_of(connection, run), last)
    record(connection, change.by, action, run=run, revision=revision, details=details)
    return int(revision)


def _as_seen(run: str, action: str, expected: int) -> Any:
    """Return the revision that a run must have for the change `action` to be allowed.

    For a note, this is `expected`. For any other change, add the number of notes that were written
    since, because they do not conflict with the change.
    """
    if action == NOTE:
        return expected
    c = audit.c
    notes = sa.select(sa.func.count()).where(c.run == run, c.action == NOTE, c.revision > expected)
    return expected + notes.scalar_subquery()


def revision_of(connection: sa.Connection, run: str) -> int:
    """Return the revision of a run, by its public id."""
    query = sa.select(runs.c.revision).where(runs.c.id == run)
    return int(connection.execute(query).scalar_one())
