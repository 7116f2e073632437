"""Compute how long a run took, or when it will end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from paceline.wire import State
from paceline_backend.store.schema import steps

# Number of newest steps whose mean time predicts the rest of the run.
RECENT = 50


def times(
    connection: sa.Connection, run: Mapping[str, Any], per_epoch: int | None
) -> dict[str, float | None]:
    """Return a run's `queued_s`, `jct_s` and `eta_at`; None where unknown.

    `run` has `key`, and `epoch` and `step` of its newest complete step. `per_epoch` is the number
    of steps of a whole epoch, None if unknown.
    """
    began, ended = run["started_at"], run["ended_at"]
    # A simulated run has a clock of its own.
    simulated = run["backend"] == "simulated"
    return {
        "queued_s": None if began is None or simulated else max(0.0, began - run["created_at"]),
        "jct_s": None if began is None or ended is None else max(0.0, ended - began),
        "eta_at": None if simulated else _eta_at(connection, run, per_epoch),
    }


def _eta_at(
    connection: sa.Connection, run: Mapping[str, Any], per_epoch: int | None
) -> float | None:
    """Predict the end of a run from its newest steps and the newest pause between two epochs."""
    if run["state"] != State.RUNNING or run["step"] is None:
        return None
    if not run["epochs"] or not per_epoch:
        return None
    c = steps.c
    query = sa.select(c.step_s, c.ended_at).where(c.run == run["key"], c.step <= run["step"])
    newest = connection.execute(query.order_by(c.step.desc()).limit(RECENT)).all()
    if not newest:
        return None
    left = max(0, run["epochs"] * per_epoch - run["step"] - 1)
    step_s = sum(row.step_s for row in newest) / len(newest)
    pause_s = _pause_s(connection, run["key"], run["epoch"], run["epoch"] * per_epoch)
    pauses = run["epochs"] - run["epoch"]
    return float(max(time.time(), newest[0].ended_at + left * step_s + pauses * pause_s))


def _pause_s(connection: sa.Connection, run: int, epoch: int, first: int) -> float:
    """Return the pause before step `first`, which begins an epoch, in seconds; 0 if unknown."""
    c = steps.c
    query = sa.select(c.epoch, c.step_s, c.ended_at).where(c.run == run)
    rows = connection.execute(query.where(c.step.in_((first - 1, first))).order_by(c.step)).all()
    if [row.epoch for row in rows] != [epoch - 1, epoch]:
        return 0.0
    before, after = rows
    return max(0.0, float(after.ended_at - after.step_s - before.ended_at))
