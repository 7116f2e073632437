"""What an operator wants of a run's model; a run that has ended takes it, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.store import Store, runs
from paceline_backend.store.audit import RequestedChange, record_change
from paceline_backend.store.quality import target as stored


def set_target(store: Store, change: RequestedChange, target: Mapping[str, Any] | None) -> None:
    """Sets a run's target in place of the one before.

    Args:
        store: the database.
        change: the run, and who asks.
        target: `{metric, value, direction}`; None: none any more.

    Raises:
        UnknownRunError: no such run.
        RevisionError: the run has another revision than expected.
        StoreError: or one of its kinds.
    """
    with store.write() as connection:
        details = {"target": None if target is None else dict(target)}
        record_change(connection, change, "run.target", details)
        stored.set_target(connection, runs.key_of(connection, change.run), target)
