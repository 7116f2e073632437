"""Read the phases of each rank within a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.rollups.metrics import of_same_step
from paceline_backend.store.schema import steps, worker_steps

PHASES = ("data_s", "compute_s", "wait_s", "reduce_s", "rest_s")


def newest_steps(connection: sa.Connection, run: int, count: int) -> tuple[int, int] | None:
    """Return first and last of the newest `count` complete steps; None if there are none."""
    query = sa.select(steps.c.step).where(steps.c.run == run)
    newest = connection.execute(query.order_by(steps.c.step.desc()).limit(count)).scalars().all()
    return (newest[-1], newest[0]) if newest else None


def timeline(
    connection: sa.Connection, run: int, first: int, last: int, ranks: Sequence[int]
) -> dict[str, Any]:
    """Return ``began_at`` and `PHASES`, each as ``name[rank][step]``; None: no record.

    The phases of a step, in order: the rank waits for its data, computes, waits for other ranks,
    reduces, and does the rest of the step. `began_at` is Unix time by the clock of the rank's node;
    phases are in seconds. The range includes the step `last`.
    """
    w = worker_steps.c
    columns = (w.rank, w.step, w.data_s, w.compute_s, w.sync_s, w.step_s, w.ended_at)
    query = (
        sa.select(*columns, steps.c.sync_min)
        .select_from(worker_steps.outerjoin(steps, of_same_step))
        .where(w.run == run, w.step.between(first, last), w.rank.in_(ranks))
    )
    known = {(row.rank, row.step): _phases(row) for row in connection.execute(query)}
    numbers = range(first, last + 1)
    table = {
        name: [[known.get((rank, step), {}).get(name) for step in numbers] for rank in ranks]
        for name in ("began_at", *PHASES)
    }
    return {"from": first, "to": last, "ranks": list(ranks), "step": list(numbers), **table}


def _phases(row: Any) -> dict[str, float]:
    """Return the phases of one rank's step.

    Without the other ranks' records, all of `sync_s` counts as reduction.
    """
    reduce_s = row.sync_s if row.sync_min is None else min(row.sync_min, row.sync_s)
    return {
        "began_at": row.ended_at - row.step_s - row.data_s,
        "data_s": row.data_s,
        "compute_s": row.compute_s,
        "wait_s": row.sync_s - reduce_s,
        "reduce_s": reduce_s,
        "rest_s": max(0.0, row.step_s - row.compute_s - row.sync_s),
    }
