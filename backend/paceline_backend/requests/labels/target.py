"""Target of a run: the value of a metric that its evaluations should reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.store import Store, runs
from paceline_backend.store.audit import RequestedChange, record_change
from paceline_backend.store.quality import target as stored


def set_target(store: Store, change: RequestedChange, target: Mapping[str, Any] | None) -> None:
    """Replace the target of a run, which may have ended.

    `target` has the keys `metric`, `value` and `direction`; None removes the target.
    """
    with store.write() as connection:
        details = {"target": None if target is None else dict(target)}
        record_change(connection, change, "run.target", details)
        stored.set_target(connection, runs.key_of(connection, change.run), target)
