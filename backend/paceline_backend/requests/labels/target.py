"""What an operator wants of a run's model; a run that has ended takes it, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.store import Store, runs
from paceline_backend.store.audit import Requester, record_change
from paceline_backend.store.quality import target as stored


def set_target(
    store: Store,
    run: str,
    target: Mapping[str, Any] | None,
    by: Requester,
    *,
    expected: int | None = None,
) -> None:
    """Sets a run's target in place of the one before.

    Args:
        store: the database.
        run: the run's public id.
        target: `{metric, value, direction}`; None: none any more.
        by: who asks.
        expected: the run's revision that the change is meant for; None: any.

    Raises:
        UnknownRunError: no such run.
        RevisionError: the run has another revision than expected.
        StoreError: or one of its kinds.
    """
    with store.write() as connection:
        details = {"target": None if target is None else dict(target)}
        record_change(connection, run, by, "run.target", expected=expected, details=details)
        stored.set_target(connection, runs.key_of(connection, run), target)
