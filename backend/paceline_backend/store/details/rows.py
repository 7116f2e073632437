"""A run's tables in parts of some thousand rows, each from a transaction of its own.

Whoever exports a long run holds one part in memory, and no transaction that would keep a database
from tidying up.
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

PART = 10_000  # rows

Kind = Literal["integer", "number", "text", "json"]
Part = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Exported:
    """A table of a run.

    Args:
        columns: name → expression, in the order of an export.
        key: the columns by which rows are ordered; together they name a row.
        step: by which a range of steps is chosen; None: the whole table is given.
        rank: by which ranks are chosen; None: there is none.
        ended_at: by which a range of time is chosen; None: there is none.
    """

    columns: Mapping[str, sa.ColumnElement[Any]]
    key: tuple[sa.Column[Any], ...]
    step: sa.Column[Any] | None = None
    rank: sa.Column[Any] | None = None
    ended_at: sa.Column[Any] | None = None

    @property
    def kinds(self) -> dict[str, Kind]:
        """Name → what a column holds."""
        return {str(name): _kind(column.type) for name, column in self.columns.items()}


def _kind(of: sa.types.TypeEngine[Any]) -> Kind:
    if isinstance(of, sa.Integer):  # BigInteger and SmallInteger, too
        return "integer"
    if isinstance(of, sa.JSON):
        return "json"
    # Of an expression, such as a square root, SQLAlchemy may not know the type: all are numbers.
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
    """Which rows of a table.

    Args:
        span: first and last step; None: no bound.
        ranks: only these; None: all.
        since: ended at this Unix time or later; None: no bound.
        until: and before this one; None: no bound.
    """

    span: Range = (None, None)
    ranks: Sequence[int] | None = None
    since: float | None = None
    until: float | None = None

    def conditions(self, table: Exported) -> list[sa.ColumnElement[bool]]:
        """Those that this table has columns for."""
        where = [] if table.step is None else within(table.step, self.span)
        if table.rank is not None and self.ranks is not None:
            where.append(table.rank.in_(self.ranks))
        if table.ended_at is not None and self.since is not None:
            where.append(table.ended_at >= self.since)
        if table.ended_at is not None and self.until is not None:
            where.append(table.ended_at < self.until)
        return where


def parts(
    store: Store, run: int, table: Exported, wanted: Wanted, size: int = PART
) -> Iterator[Part]:
    """The rows of a run's table in the order of its key, at most `size` at a time.

    Rows that come meanwhile are given if their place is behind the part that was read last.

    Args:
        store: the database.
        run: key of the run.
        table: of `TABLES`.
        wanted: rows.
        size: of a part.

    Raises:
        StoreError: the database does not answer.
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
