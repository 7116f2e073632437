"""What each epoch of a run came to."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from paceline_backend.store.rollups.metrics import METRICS, named
from paceline_backend.store.schema import steps

_MEANS = ("step_s", "se", "waste", "dif", "ett_error", "comm_s", "loss")


def epochs(connection: sa.Connection, run: int, limit: int) -> list[dict[str, Any]]:
    """The newest epochs of a run, oldest first: sums and means over their complete steps.

    Args:
        connection: to read from.
        run: key of the run.
        limit: most epochs.
    """
    s = steps.c
    metrics = {name: METRICS[name] for name in _MEANS}
    row = sa.select(s.epoch, s.step, s.samples, s.ended_at, *named(metrics)).where(s.run == run)
    c = row.subquery().c
    query = sa.select(
        c.epoch,
        sa.func.min(c.step).label("first_step"),
        sa.func.max(c.step).label("last_step"),
        sa.func.count().label("steps"),
        sa.func.sum(c.samples).label("samples"),
        sa.func.sum(c.step_s).label("wall_s"),
        sa.func.min(c.ended_at).label("first_ended_at"),
        sa.func.max(c.ended_at).label("ended_at"),
        *(sa.func.avg(c[name]).label(name) for name in _MEANS),
    )
    newest = query.group_by(c.epoch).order_by(c.epoch.desc()).limit(limit)
    rows = [dict(each) for each in connection.execute(newest).mappings()]
    return [{**each, "samples": int(each["samples"])} for each in reversed(rows)]
