"""A run's revision: it says whether a run is still as somebody saw it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from paceline.core.errors import PacelineError
from paceline_backend.store.audit import log
from paceline_backend.store.runs import key_of
from paceline_backend.store.schema import runs


class RevisionError(PacelineError):
    """Somebody else has changed the run since.

    Args:
        run: its public id.
        revision: that the run has now.
        change: the newest row of the audit log about the run; None: there is none.
    """

    def __init__(self, run: str, revision: int, change: Mapping[str, Any] | None) -> None:
        by = f" by {change['who']} ({change['action']})" if change else ""
        super().__init__(
            f"run {run} was changed{by} since it was read: read it again, then decide anew"
        )
        self.revision = revision
        self.change = change


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
        expected: the revision that the change is meant for; None: any.
        details: plain values; never a secret.

    Raises:
        UnknownRunError: no such run.
        RevisionError: the run has another revision.
    """
    kept = sa.update(runs).where(runs.c.id == run, runs.c.pruned_at.is_(None))
    update = kept.values(revision=runs.c.revision + 1)
    if expected is not None:
        update = update.where(runs.c.revision == expected)
    revision = connection.execute(update.returning(runs.c.revision)).scalar()
    if revision is None:
        key_of(connection, run)
        raise RevisionError(run, revision_of(connection, run), log.newest(connection, run))
    log.record(connection, by, action, run=run, revision=revision, details=details)
    return int(revision)


def revision_of(connection: sa.Connection, run: str) -> int:
    """Of a run, by its public id."""
    query = sa.select(runs.c.revision).where(runs.c.id == run)
    return int(connection.execute(query).scalar_one())
