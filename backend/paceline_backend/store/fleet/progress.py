"""Record the newest steps of runs; only one worker process at a time writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.wire import State
from paceline_backend.store import attempts
from paceline_backend.store.database import insert
from paceline_backend.store.schema import run_progress, runs


@dataclass(frozen=True)
class Running:
    """A run that trains.

    `attempt` is the latest attempt, and `step` the newest complete step; each is -1 if there is
    none yet. `dropped` counts records that were lost because a spool was full. `node` is the node
    of all ranks, None if they are on several nodes or if it is unknown.
    """

    key: int
    id: str
    name: str
    policy: str
    attempt: int
    world: int | None
    dropped: int
    step: int
    backend: str
    node: str | None


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run; see the columns of `run_progress`."""

    run: int
    attempt: int
    step: int
    step_at: float
    lost: int
    lost_at: float | None
    inexact: int | None


_COLUMNS = [run_progress.c[name] for name in RunProgress.__dataclass_fields__]


def running(connection: sa.Connection) -> list[Running]:
    """Return all runs in state `running`, oldest first."""
    c = runs.c
    node = sa.case((c.nodes_max == 1, c.node))
    known = (c.key, c.id, c.name, c.policy, c.attempt, c.world, c.dropped)
    query = sa.select(*known, c.backend, node.label("node"))
    query = query.where(c.state == State.RUNNING, c.pruned_at.is_(None)).order_by(c.key)
    seen = []
    for row in connection.execute(query).mappings().all():
        spans = attempts.spans(connection, row["key"], row["attempt"])
        newest = attempts.newest_complete(connection, row["key"], spans)
        attempt = -1 if row["attempt"] is None else row["attempt"]
        step = -1 if newest is None else newest.step
        seen.append(Running(**{**row, "attempt": attempt}, step=step))
    return seen


def known(connection: sa.Connection) -> dict[int, RunProgress]:
    """Return the stored progress of all runs in state `running`, by key."""
    query = sa.select(*_COLUMNS).join(runs, runs.c.key == run_progress.c.run)
    rows = connection.execute(query.where(runs.c.state == State.RUNNING))
    return {row.run: RunProgress(*row) for row in rows}


def note(
    connection: sa.Connection, run: Running, before: RunProgress | None, at: float
) -> RunProgress | None:
    """Store a run's progress; return the new progress, or None if nothing changed.

    `before` is the stored progress, if any; `at` is the current time by the database's clock.
    """
    if before is None:
        lost_at = at if run.dropped else None
        values: dict[str, Any] = {"attempt": run.attempt, "step": run.step, "step_at": at}
        values |= {"lost": run.dropped, "lost_at": lost_at}
        rows = insert(connection, run_progress).values(run=run.key, **values)
        connection.execute(rows.on_conflict_do_nothing())
        return RunProgress(run.key, run.attempt, run.step, at, run.dropped, lost_at, None)
    changed: dict[str, Any] = {}
    if (run.attempt, run.step) != (before.attempt, before.step):
        changed |= {"attempt": run.attempt, "step": run.step, "step_at": at}
    if run.dropped > before.lost:
        changed |= {"lost": run.dropped, "lost_at": at}
    if not changed:
        return None
    change(connection, run.key, changed)
    return RunProgress(**{**vars(before), **changed})


def change(connection: sa.Connection, run: int, values: Mapping[str, Any]) -> None:
    """Update columns of a run's row in `run_progress`."""
    mine = run_progress.c.run == run
    connection.execute(sa.update(run_progress).where(mine).values(**values))
