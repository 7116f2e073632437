"""Ranks' steps, and the sums of those that all ranks reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import psycopg
import sqlalchemy as sa

from paceline.wire import StepBatch, StepRecord
from paceline_backend.store import schema
from paceline_backend.store.telemetry.columns import Columns
from paceline_backend.store.telemetry.locked import LockedRun

_ALL_STEPS = range(2**62)

_RECORD = Columns(StepRecord, schema.worker_steps)
_COLUMNS = (*_RECORD.names, "run")
_NAMES = ", ".join(_COLUMNS)
_NEWER_ATTEMPT_WINS = (
    "ON CONFLICT (run, step, rank) DO UPDATE SET "
    + ", ".join(f"{c} = excluded.{c}" for c in _COLUMNS if c not in ("run", "step", "rank"))
    + " WHERE excluded.attempt > worker_steps.attempt"
)
_INSERT = (
    f"INSERT INTO worker_steps ({_NAMES}) VALUES ({', '.join('?' * len(_COLUMNS))}) "
    + _NEWER_ATTEMPT_WINS
)
_INCOMING = "CREATE TEMP TABLE IF NOT EXISTS incoming (LIKE worker_steps) ON COMMIT DELETE ROWS"
_COPY = f"COPY incoming ({_NAMES}) FROM STDIN (FORMAT BINARY)"
_INSERT_INCOMING = (
    f"INSERT INTO worker_steps ({_NAMES}) SELECT {_NAMES} FROM incoming {_NEWER_ATTEMPT_WINS}"
)
_POSTGRES_TYPES = {
    sa.BigInteger: "int8",
    sa.Integer: "int4",
    sa.SmallInteger: "int2",
    sa.Double: "float8",
}
_COPY_TYPES = [_POSTGRES_TYPES[type(schema.worker_steps.c[name].type)] for name in _COLUMNS]

# A rank without samples counts in every sum but the ETT error: its forward and backward are real.
_PREDICTED = "ett_s IS NOT NULL AND samples > 0 AND compute_s > 1e-9"
# A rank's weight in the mean loss of the global batch, as its gradient's in the update.
_WEIGHT = (
    "(CASE WHEN CAST(:by_size AS integer) = 0 THEN samples WHEN load > 1e-100 THEN load ELSE 0 END)"
)
_SUMS = {
    "run": "run",
    "step": "step",
    "epoch": "max(epoch)",
    "segment": "max(segment)",
    "workers": "count(*)",
    "samples": "sum(samples)",
    "load_sum": "sum(load)",
    "load_sq": "sum(CASE WHEN abs(load) > 1e-100 THEN load * load ELSE 0 END)",
    "compute_min": "min(compute_s)",
    "compute_max": "max(compute_s)",
    "compute_sum": "sum(compute_s)",
    "sync_min": "min(sync_s)",
    "step_s": "avg(step_s)",
    "ett_error_sum": f"sum(CASE WHEN {_PREDICTED} THEN abs(ett_s - compute_s) / compute_s END)",
    "ett_count": f"sum(CASE WHEN {_PREDICTED} THEN 1 ELSE 0 END)",
    "loss": f"sum(CASE WHEN abs(loss) > 1e-100 THEN loss * {_WEIGHT} ELSE 0 END)"
    f" / nullif(sum(CASE WHEN loss IS NOT NULL THEN {_WEIGHT} ELSE 0 END), 0)",
    "ended_at": "max(ended_at)",
}
_SUM_UP = sa.text(
    f"INSERT INTO steps ({', '.join(_SUMS)}) SELECT {', '.join(_SUMS.values())} "
    "FROM worker_steps WHERE run = :run AND step >= :first AND step < :end GROUP BY run, step "
    "HAVING count(*) = :world AND min(attempt) = max(attempt) "
    "AND min(rank) >= 0 AND max(rank) < :world "  # any rank may come before the Hello
    "ON CONFLICT (run, step) DO UPDATE SET "
    + ", ".join(f"{c} = excluded.{c}" for c in _SUMS if c not in ("run", "step"))
)
# A step of which ranks reported different attempts never ran as a whole.
_DROP_MIXED = sa.text(
    "DELETE FROM steps WHERE run = :run AND step >= :first AND step < :end AND step IN ("
    "SELECT step FROM worker_steps WHERE run = :run AND step >= :first AND step < :end "
    "GROUP BY step HAVING min(attempt) < max(attempt))"
)


def write(connection: sa.Connection, batches: Sequence[tuple[LockedRun, StepBatch]]) -> int:
    """Writes records; how many there were. Of several attempts at a step the latest stays.

    Raises:
        StoreRefusedError: some record holds values that no database takes.
    """
    count = 0
    # By key: one INSERT of Postgres must not meet the same row twice.
    rows: dict[tuple[int, int, int], tuple[Any, ...]] = {}
    for run, batch in batches:
        key = run.key
        count += len(batch.records)
        for record in batch.records:
            run.touched.add(record.step)
            run.repeated |= record.attempt > 0
            at = (key, record.step, record.rank)
            earlier = rows.get(at)
            if earlier is None or earlier[0] < record.attempt:  # attempt is the first column
                run.check_rank(record)
                rows[at] = (*msgspec.structs.astuple(_RECORD.checked(record)), key)
    if not rows:
        return count
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(_INSERT, list(rows.values()))
    else:
        _copy(connection, rows.values())
    return count


def sum_up(connection: sa.Connection, runs: Iterable[LockedRun]) -> None:
    """Sums up the steps with new rows that all ranks have reported."""
    for run in runs:
        parts = [_ALL_STEPS] if run.all_steps else list(_ranges(run.touched))
        spans = [{"run": run.key, "first": part.start, "end": part.stop} for part in parts]
        if spans and run.repeated:
            connection.execute(_DROP_MIXED, spans)
        if spans and run.world is not None:
            terms = {"world": run.world, "by_size": int(run.loss_mean == "size")}
            connection.execute(_SUM_UP, [span | terms for span in spans])


def _copy(connection: sa.Connection, rows: Iterable[tuple[Any, ...]]) -> None:
    connection.execute(sa.text(_INCOMING))
    # SQLAlchemy's transaction has begun above, so its commit commits what goes past it here.
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    with driver.cursor() as cursor, cursor.copy(_COPY) as copy:
        copy.set_types(_COPY_TYPES)
        for row in rows:
            copy.write_row(row)
    connection.execute(sa.text(_INSERT_INCOMING))


def _ranges(numbers: Iterable[int]) -> Iterator[range]:
    """The fewest ranges that hold just these numbers."""
    part: range | None = None
    for number in sorted(numbers):
        if part is not None and part.stop == number:
            part = range(part.start, number + 1)
            continue
        if part is not None:
            yield part
        part = range(number, number + 1)
    if part is not None:
        yield part
