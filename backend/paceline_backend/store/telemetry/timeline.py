"""What ranks did within a few steps, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.rollups.metrics import of_same_step
from paceline_backend.store.schema import steps, worker_steps

PHASES = ("data_s", "compute_s", "wait_s", "reduce_s", "rest_s")


def newest_steps(connection: sa.Connection, run: int, count: int) -> tuple[int, int] | None:
    """First and last of the newest complete steps; None: there is none.

    Args:
        connection: to read from.
        run: key of the run.
        count: of them, at most.
    """
    query = sa.select(steps.c.step).where(steps.c.run == run)
    newest = connection.execute(query.order_by(steps.c.step.desc()).limit(count)).scalars().all()
    return (newest[-1], newest[0]) if newest else None


def timeline(
    connection: sa.Connection, run: int, first: int, last: int, ranks: Sequence[int]
) -> dict[str, Any]:
    """``began_at`` and the phases of `PHASES`, each as ``name[rank][step]``; None: no record.

    A rank waits for its data, computes, waits for the others, reduces, and does the rest of the
    step. `began_at` is Unix time by the clock of its node; phases are in s.

    Args:
        connection: to read from.
        run: key of the run.
        first: step,
        last: and the last one.
        ranks: of which ranks.
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
    """Of one rank's step. Without the other ranks' records, all of `sync_s` counts as reducing."""
    reduce_s = row.sync_s if row.sync_min is None else min(row.sync_min, row.sync_s)
    return {
        "began_at": row.ended_at - row.step_s - row.data_s,
        "data_s": row.data_s,
        "compute_s": row.compute_s,
        "wait_s": row.sync_s - reduce_s,
        "reduce_s": reduce_s,
        "rest_s": max(0.0, row.step_s - row.compute_s - row.sync_s),
    }
