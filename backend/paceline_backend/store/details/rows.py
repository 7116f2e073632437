"""Read a run's tables in chunks of some thousand rows, each in a transaction of its own.

So an export of a long run holds only one chunk in memory, and needs no long transaction. During a
long transaction, the database could not clean up deleted rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from paceline_backend.store.database import Store
from paceline_backend.store.reads import Range, within
from paceline_backend.store.rollups.metrics import METRICS
from paceline_backend.store.schema import rounds, segments, steps, switches, worker_steps
from paceline_backend.store.segments import SHOWN

ROWS_PER_PART = 10_000  # rows

Kind = Literal["integer", "number", "text", "json"]
Part = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Exported:
    """Definition of an exportable table of a run.

    Args:
        columns: name → expression, in the order of an export.
        key: columns that order the rows and together identify a row.
        step: column to filter by step; None: the table cannot be filtered by step.
        rank: column to filter by rank; None: the table has no ranks.
        ended_at: column to filter by time; None: the table has no times.
    """

    columns: Mapping[str, sa.ColumnElement[Any]]
    key: tuple[sa.Column[Any], ...]
    step: sa.Column[Any] | None = None
    rank: sa.Column[Any] | None = None
    ended_at: sa.Column[Any] | None = None

    @property
    def kinds(self) -> dict[str, Kind]:
        """Return the kind of value of each column, by name."""
        return {str(name): _kind(column.type) for name, column in self.columns.items()}


def _kind(of: sa.types.TypeEngine[Any]) -> Kind:
    # sa.Integer includes BigInteger and SmallInteger.
    if isinstance(of, sa.Integer):
        return "integer"
    if isinstance(of, sa.JSON):
        return "json"
    # SQLAlchemy may not know the type of an expression, such as a square root. All expressions here
    # are numbers.
    return "text" if isinstance(of, sa.String | sa.TypeDecorator) else "number"


def _plain(table: sa.Table, *without: str) -> dict[str, sa.ColumnElement[Any]]:
    return {str(column.name): column for column in table.c if column.name not in ("run", *without)}


_s, _w, _r = steps.c, worker_steps.c, rounds.c
_STEPS = {
    name: _s[name] for name in ("step", "epoch", "segment", "workers", "samples", "ended_at")
} | {"load": _s.load_sum}
TABLES: dict[str, Exported] = {
    "steps": Exported({**_STEPS, **METRICS}, (_s.step,), _s.step, None, _s.ended_at),
    "worker-steps": Exported(
        _plain(worker_steps), (_w.step, _w.rank), _w.step, _w.rank, _w.ended_at
    ),
    "rounds": Exported(
        _plain(rounds, "staleness"),
        (_r.attempt, _r.rank, _r.seq),
        *(_r.step, _r.rank, _r.ended_at),
    ),
    "segments": Exported(
        {str(column.name): column for column in SHOWN},
        (segments.c.attempt, segments.c.seq),
        segments.c.first_step,
    ),
    "switches": Exported(_plain(switches), (switches.c.version,)),
}


@dataclass(frozen=True)
class Wanted:
    """Filter for the rows of a table.

    `span` and `ranks` select the steps and ranks. `since` (inclusive) and `until` (exclusive) are
    Unix times at which the row's step ended. None: all ranks, or no bound.
    """

    span: Range = (None, None)
    ranks: Sequence[int] | None = None
    since: float | None = None
    until: float | None = None

    def conditions(self, table: Exported) -> list[sa.ColumnElement[bool]]:
        """Return the SQL conditions, without those on columns that the table does not have."""
        where = [] if table.step is None else within(table.step, self.span)
        if table.rank is not None and self.ranks is not None:
            where.append(table.rank.in_(self.ranks))
        if table.ended_at is not None and self.since is not None:
            where.append(table.ended_at >= self.since)
        if table.ended_at is not None and self.until is not None:
            where.append(table.ended_at < self.until)
        return where


def parts(
    store: Store, run: int, table: Exported, wanted: Wanted, size: int = ROWS_PER_PART
) -> Iterator[Part]:
    """Yield the rows of a run's table in the order of its key, at most `size` at a time.

    Rows that are added during the iteration are included if they sort after the last chunk.
    """
    source = table.key[0].table
    values = [column.label(name) for name, column in table.columns.items()]
    key = [column.label(f"key_{at}") for at, column in enumerate(table.key)]
    query = sa.select(*values, *key).where(source.c.run == run, *wanted.conditions(table))
    query = query.order_by(*table.key).limit(size)
    after: sa.Select[Any] = query
    while True:
        with store.read() as connection:
            rows = [tuple(row) for row in connection.execute(after)]
        if rows:
            yield [row[: len(values)] for row in rows]
        if len(rows) < size:
            return
        last = rows[-1][len(values) :]
        after = query.where(sa.tuple_(*table.key) > sa.tuple_(*map(sa.literal, last)))
