"""A run's revision: it says whether a run is still as somebody saw it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from paceline.core.errors import PacelineError
from paceline_backend.store import schema
from paceline_backend.store.audit import log
from paceline_backend.store.runs import key_of
from paceline_backend.store.schema import runs

NOTE = "run.note"
_TAGS = ("run.tag", "run.untag")  # they are no changes of a revision


class RevisionError(PacelineError):
    """Somebody else has changed the run since.

    Args:
        run: its public id.
        revision: that the run has now.
        change: the newest row of the audit log about the run; None: there is none.
    """

    def __init__(self, run: str, revision: int, change: Mapping[str, Any] | None) -> None:
        self.revision = revision
        self.change = change
        by = f" by {self.who} ({change['action']})" if change else ""
        super().__init__(
            f"run {run} was changed{by} since it was read: read it again, then decide anew"
        )

    @property
    def who(self) -> str | None:
        """Who changed the run last, as other operators know them."""
        if self.change is None:
            return None
        return str(self.change["details"].get("operator") or self.change["who"])


def record_change(
    connection: sa.Connection,
    run: str,
    by: log.Requester,
    action: str,
    *,
    expected: int | None = None,
    details: Mapping[str, Any] | None = None,
) -> int:
    """Writes that a run is changed in this transaction; the run's new revision.

    Call it before the change: it locks the run's row, and of two changes at once it lets one pass.

    Args:
        connection: to write with.
        run: its public id.
        by: who asks for the change.
        action: what is done: ``run.policy``, ``run.stop``, …
        expected: the revision that the change is meant for; None: any. Notes that were written
            since refuse only another note: they change nothing of the training.
        details: plain values; never a secret.

    Raises:
        UnknownRunError: no such run.
        RevisionError: the run has another revision.
    """
    kept = sa.update(runs).where(runs.c.id == run, runs.c.pruned_at.is_(None))
    update = kept.values(revision=runs.c.revision + 1)
    if expected is not None:
        update = update.where(runs.c.revision == _as_seen(run, action, expected))
    revision = connection.execute(update.returning(runs.c.revision)).scalar()
    if revision is None:
        key_of(connection, run)
        labels = _TAGS if action == NOTE else (*_TAGS, NOTE)
        newest = log.newest(connection, run, without=labels)
        raise RevisionError(run, revision_of(connection, run), newest)
    log.record(connection, by, action, run=run, revision=revision, details=details)
    return int(revision)


def _as_seen(run: str, action: str, expected: int) -> Any:
    """The revision of a run that is still as it was at `expected`, for what `action` changes."""
    if action == NOTE:
        return expected
    c = schema.audit.c
    notes = sa.select(sa.func.count()).where(c.run == run, c.action == NOTE, c.revision > expected)
    return expected + notes.scalar_subquery()


def revision_of(connection: sa.Connection, run: str) -> int:
    """Of a run, by its public id."""
    query = sa.select(runs.c.revision).where(runs.c.id == run)
    return int(connection.execute(query).scalar_one())
