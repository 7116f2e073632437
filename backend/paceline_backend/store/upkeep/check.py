"""Check a database: its file, its revision, and that its roll-ups match the steps."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from paceline_backend.store import migrate
from paceline_backend.store.database import Store
from paceline_backend.store.rollups.tables import BLOCK, step_rollups
from paceline_backend.store.schema import steps

# Maximum number of reported faults of each kind.
_SHOWN = 20


def faults(store: Store) -> Iterator[str]:
    """Yield a description of each fault; nothing if the database is sound."""
    with store.read() as connection:
        known, head = migrate.revision(connection), migrate.head()
        if known != head:
            yield f"its revision is {known or 'none'}, not {head}: run paceline db upgrade"
            return
        if store.is_sqlite:
            yield from _file(connection)
        yield from _untrue(connection)


def _file(connection: sa.Connection) -> Iterator[str]:
    for (line,) in connection.exec_driver_sql(f"PRAGMA integrity_check({_SHOWN})"):
        if line != "ok":
            yield f"the file is damaged: {line}"
    orphans = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchmany(_SHOWN)
    for table, _, parent, _ in orphans:
        yield f"{table} has a row that refers to a missing row of {parent}"


def _untrue(connection: sa.Connection) -> Iterator[str]:
    """Find roll-ups that do not match the rows of their steps."""
    s, r = steps.c, step_rollups.c
    block = (s.step - s.step % sa.literal_column(str(BLOCK))).label("block")
    row = (
        sa.select(s.run, block, sa.func.count().label("count"), sa.func.sum(s.step_s).label("sum"))
        .group_by(s.run, block)
        .subquery()
        .c
    )
    wrong = sa.or_(
        sa.func.coalesce(row.count, 0) != BLOCK,
        sa.func.abs(r.step_s_sum - row.sum) > 1e-9 * sa.func.abs(row.sum),
    )
    query = sa.select(r.run, r.step).select_from(
        step_rollups.outerjoin(row.run.table, (r.run == row.run) & (r.step == row.block))
    )
    for run, step in connection.execute(query.where(wrong).limit(_SHOWN)):
        yield f"the roll-up of the run with key {run} from step {step} on does not match its steps"
