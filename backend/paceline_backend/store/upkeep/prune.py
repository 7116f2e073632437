"""Delete ended runs, the oldest first, in transactions of some milliseconds.

A run is deleted as a whole. First, the run is marked: from then on it is hidden, and ingest accepts
nothing about it. Then the run's rows are deleted, `_ROWS_PER_DELETE` per transaction, or
`_LONG_ROWS` if a row can have 100 kB. After each transaction, `prune` pauses for at least the
duration of this transaction, so that other processes can write. If `prune` is interrupted, the next
call continues its work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import sqlalchemy as sa

from paceline.wire import ENDED
from paceline_backend.store import tokens
from paceline_backend.store.database import Store
from paceline_backend.store.schema import leases, metadata, runs

_ROWS_PER_DELETE = 2_000
_LONG_ROWS = 50
_DAY_S = 86_400.0
# Bytes of a row in Postgres besides its values: headers, and the entry in the primary key.
_ENTRY_BYTES = 60
# The mean length of a table's rows is estimated from this many rows.
_SAMPLE = 500


@dataclass(frozen=True)
class Keep:
    """Limits for ended runs: days since the end, number of runs, bytes of rows; None: no limit.

    For the bytes see `used_bytes`.
    """

    days: float | None = None
    runs: int | None = None
    bytes: int | None = None

    @property
    def everything(self) -> bool:
        """Return whether there is no limit."""
        return self.days is None and self.runs is None and self.bytes is None


def prune(store: Store, keep: Keep, pause: Callable[[float], bool]) -> Iterator[str]:
    """Delete runs beyond the limits; yield the id of each deleted run.

    `pause` waits for the given number of seconds and returns whether to stop. Postgres before
    version 15 updates its row counts seconds late, so with such a Postgres, one call deletes at
    most one run because of `keep.bytes`.
    """
    while (chosen := next_run(store, keep)) is not None:
        key, run = chosen
        if not _mark(store, key):
            # The run was resumed meanwhile.
            continue
        for table in _tables():
            while True:
                began = time.monotonic()
                more = _delete_some(store, table, key)
                if pause(max(0.005, time.monotonic() - began)):
                    return
                if not more:
                    break
        with store.write() as connection:
            tokens.revoke_of_run(connection, run)
            connection.execute(sa.delete(leases).where(leases.c.run == key))
            connection.execute(sa.delete(runs).where(runs.c.key == key))
        yield run
        with store.read() as connection:
            if not _counts_at_once(connection):
                keep = replace(keep, bytes=None)


def _counts_at_once(connection: sa.Connection) -> bool:
    """Return whether `used_bytes` reflects deleted rows immediately."""
    version = connection.dialect.server_version_info or ()
    return connection.dialect.name == "sqlite" or version >= (15,)


def _mark(store: Store, run: int) -> bool:
    """Mark a run as being deleted; return False if it has not ended."""
    c = runs.c
    over = sa.update(runs).where(c.key == run, c.state.in_(ENDED))
    with store.write() as connection:
        marked = over.values(pruned_at=sa.func.coalesce(c.pruned_at, time.time()))
        return connection.execute(marked).rowcount > 0


def next_run(store: Store, keep: Keep) -> tuple[int, str] | None:
    """Return key and id of the run to delete next; None if no further run exceeds the limits."""
    c = runs.c
    over = sa.select(c.key, c.id).where(c.state.in_(ENDED)).order_by(c.ended_at, c.key).limit(1)
    with store.read() as connection:
        row = connection.execute(over.where(c.pruned_at.is_not(None))).one_or_none()
        if row is None and keep.days is not None:
            limit = time.time() - keep.days * _DAY_S
            row = connection.execute(over.where(c.ended_at < limit)).one_or_none()
        if row is None and keep.runs is not None:
            count = sa.select(sa.func.count()).where(c.state.in_(ENDED))
            if connection.execute(count).scalar_one() > keep.runs:
                row = connection.execute(over).one_or_none()
        if row is None and keep.bytes is not None and used_bytes(connection) > keep.bytes:
            row = connection.execute(over).one_or_none()
    return None if row is None else (int(row.key), str(row.id))


def used_bytes(connection: sa.Connection) -> int:
    """Return the size of all rows, in bytes.

    The size of the database's file is not used, because a file does not shrink when rows are
    deleted. For Postgres, the result is an estimate from the number of rows and the length of some
    of them.
    """
    if connection.dialect.name == "sqlite":
        pages, free, size = (
            int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size
    counted = connection.exec_driver_sql("SELECT relname, n_live_tup FROM pg_stat_user_tables")
    rows = {str(name): int(count) for name, count in counted}
    total = 0.0
    for name in metadata.tables:
        width = connection.exec_driver_sql(
            f"SELECT avg(pg_column_size(t.*)) FROM (SELECT * FROM {name} LIMIT {_SAMPLE}) t"
        ).scalar()
        total += rows.get(name, 0) * (float(width or 0) + _ENTRY_BYTES)
    return int(total)


def _tables() -> list[sa.Table]:
    """Return the tables with many rows per run.

    From smaller tables, the database deletes the rows together with the row of the run (cascade).
    Tables that name a run by its public id keep their rows.
    """
    keys = {table: list(table.primary_key) for table in metadata.sorted_tables}
    return [
        table
        for table, (first, *others) in keys.items()
        if first.name == "run" and first.foreign_keys and others
    ]


def _delete_some(store: Store, table: sa.Table, run: int) -> bool:
    """Delete the first rows of a run from a table; return whether there are more."""
    columns = [column for column in table.primary_key if column.name != "run"]
    query = sa.select(*columns).where(table.c.run == run).order_by(*columns)
    long = any(isinstance(column.type, sa.LargeBinary) for column in table.c)
    with store.write() as connection:
        end = connection.execute(
            query.offset(_LONG_ROWS if long else _ROWS_PER_DELETE).limit(1)
        ).one_or_none()
        delete = sa.delete(table).where(table.c.run == run)
        if end is not None:
            delete = delete.where(sa.tuple_(*columns) < sa.tuple_(*map(sa.literal, end)))
        connection.execute(delete)
        if not store.is_sqlite and _counts_at_once(connection):
            connection.execute(sa.select(sa.func.pg_stat_force_next_flush()))
    return end is not None
