"""Read training metrics of the global batch, downsampled like other columns of steps."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from paceline_backend.store import reads
from paceline_backend.store.schema import step_metrics, steps

# Query for all names of a run, with one index seek per name instead of a scan of all rows.
_NAMES = sa.text(
    "WITH RECURSIVE names (name) AS (SELECT min(name) FROM step_metrics WHERE run = :run "
    "UNION ALL SELECT (SELECT min(name) FROM step_metrics WHERE run = :run "
    "AND step_metrics.name > names.name) FROM names WHERE names.name IS NOT NULL) "
    "SELECT name FROM names WHERE name IS NOT NULL"
)


def names(connection: sa.Connection, run: int) -> list[str]:
    """Return the names of a run's training metrics, in alphabetical order."""
    return list(connection.execute(_NAMES, {"run": run}).scalars())


def columns(connection: sa.Connection, run: int, span: reads.Range, points: int) -> dict[str, Any]:
    """Return ``from``, ``to``, ``bucket``, and columns ``step`` and ``value`` of each metric.

    Steps after the newest complete one are left out. If there are more steps than `points`, each
    `bucket` steps are combined to their mean, minimum (``min``) and maximum (``max``).
    """
    first, last = reads.bounds(connection, steps, run, span)
    bucket = reads.bucket_of(first, last, points)
    c = step_metrics.c
    shown = reads.within(c.step, (first, -1 if last is None else last))
    metrics = {}
    for name in names(connection, run):
        where = (c.run == run, c.name == name, *shown)
        metrics[name] = _columns(connection, where, bucket)
    return {"from": first, "to": last, "bucket": bucket, "metrics": metrics}


def _columns(
    connection: sa.Connection, where: tuple[sa.ColumnElement[bool], ...], bucket: int
) -> dict[str, list[Any]]:
    c = step_metrics.c
    titles = ["step", "value"] if bucket == 1 else ["step", "value", "min", "max"]
    query: sa.Select[Any] = sa.select(c.step, c.value).where(*where).order_by(c.step)
    if bucket > 1:
        row = sa.select(c.step, c.value, (c.step // bucket).label("cell")).where(*where)
        own = row.subquery().c
        shown: list[sa.ColumnElement[Any]] = [sa.func.min(own.step), sa.func.avg(own.value)]
        shown += [sa.func.min(own.value), sa.func.max(own.value)]
        query = sa.select(*shown).group_by(own.cell).order_by(own.cell)
    rows = connection.execute(query).all()
    values = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in titles]
    return dict(zip(titles, values, strict=True))
