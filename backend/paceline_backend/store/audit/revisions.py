"""Revisions of runs: optimistic locking against concurrent changes.

A run's revision increases with each requested change. A client that sends the revision that it has
read can change the run only if it is still at this revision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.core.errors import PacelineError
from paceline_backend.store import schema
from paceline_backend.store.audit import log
from paceline_backend.store.runs import key_of
from paceline_backend.store.schema import runs

NOTE = "run.note"
# Changes of tags do not conflict with other changes.
_TAGS = ("run.tag", "run.untag")


@dataclass(frozen=True)
class RequestedChange:
    """Requested change of a run.

    Args:
        run: public id of the run.
        by: who requests the change, and why.
        expected: revision of the run that the requester has read; None: any.
    """

    run: str
    by: log.Requester
    expected: int | None = None


class RevisionError(PacelineError):
    """The run was changed by another requester since the caller read it.

    `revision` is the current one, and `change` the newest row of the audit log about the run, if
    any.
    """

    def __init__(self, run: str, revision: int, change: Mapping[str, Any] | None) -> None:
        self.revision = revision
        self.change = change
        by = f" by {self.who} ({change['action']})" if change else ""
        super().__init__(f"run {run} was changed{by} since you read it: reload it and retry")

    @property
    def who(self) -> str | None:
        """Return the requester of the last change, by the name that operators know."""
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

    Call this before the change: it locks the run's row, so that of two concurrent changes only one
    passes. `action` is the kind of change (``run.policy``, ``run.stop``, …); `details` has plain
    values, never a secret. Notes that were written since the expected revision conflict only with
    another note, because they do not change the training.

    Raises:
        UnknownRunError: no such run.
        RevisionError: the run has another revision.
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
        newest = log.newest(connection, run, without=labels)
        raise RevisionError(run, revision_of(connection, run), newest)
    log.record(connection, change.by, action, run=run, revision=revision, details=details)
    return int(revision)


def _as_seen(run: str, action: str, expected: int) -> Any:
    """Return a run's revision if nothing relevant to `action` changed since `expected`."""
    if action == NOTE:
        return expected
    c = schema.audit.c
    notes = sa.select(sa.func.count()).where(c.run == run, c.action == NOTE, c.revision > expected)
    return expected + notes.scalar_subquery()


def revision_of(connection: sa.Connection, run: str) -> int:
    """Return the revision of a run, by its public id."""
    query = sa.select(runs.c.revision).where(runs.c.id == run)
    return int(connection.execute(query).scalar_one())
