"""Sum up each epoch of a run."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from paceline_backend.store.rollups.metrics import METRICS, named
from paceline_backend.store.rollups.tables import step_rollups
from paceline_backend.store.schema import steps

_MEANS = ("step_s", "se", "waste", "dif", "ett_error", "comm_s", "loss")


def epochs(connection: sa.Connection, run: int, limit: int) -> list[dict[str, Any]]:
    """Return sums and means over the complete steps of the newest `limit` epochs, oldest first.

    Steps of earlier epochs are not read.
    """
    s = steps.c
    metrics = {name: METRICS[name] for name in _MEANS}
    where = [s.run == run]
    if (first := _before(connection, run, limit)) is not None:
        where.append(s.step >= first)
    row = sa.select(s.epoch, s.step, s.samples, s.ended_at, *named(metrics)).where(*where)
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


def _before(connection: sa.Connection, run: int, limit: int) -> int | None:
    """Return a step near the end of an epoch before the newest `limit`; None if roll-ups have none.

    A roll-up has the epoch in which its block of steps begins. The newest `limit` epochs of
    roll-ups are not newer than the newest `limit` of all steps. The block may end in a later epoch,
    so it is read, too.
    """
    r = step_rollups.c
    begun = sa.select(sa.func.max(r.step)).where(r.run == run).group_by(r.epoch)
    first = connection.execute(begun.order_by(r.epoch.desc()).offset(limit).limit(1)).scalar()
    return None if first is None else int(first)
