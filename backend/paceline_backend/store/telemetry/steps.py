"""Store ranks' steps, and sum up the steps that all ranks reported."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import psycopg
import sqlalchemy as sa
from msgspec.structs import astuple as as_tuple

from paceline.wire import StepBatch, StepRecord
from paceline_backend.store import schema
from paceline_backend.store.database import in_chunks
from paceline_backend.store.rollups import writing as rollups
from paceline_backend.store.telemetry.locked import LockedRun
from paceline_backend.store.telemetry.validation import STEPS

_ALL_STEPS = range(2**62)
# For runs with at least this many ranks, `sum_up` first counts rows to find the complete steps.
_MANY = 64
# The possible numbers of steps in one query, see `in_chunks`.
_CHUNKS = (64, 8, 1)

_COLUMNS = ("run", *STEPS.names)
_NAMES = ", ".join(_COLUMNS)
_KEY = itemgetter(*(_COLUMNS.index(name) for name in ("run", "step", "rank")))
_STEP = attrgetter("step")
_ATTEMPT = itemgetter(_COLUMNS.index("attempt"))
_NEWER_ATTEMPT_WINS = (
    "ON CONFLICT (run, step, rank) DO UPDATE SET "
    + ", ".join(f"{c} = excluded.{c}" for c in _COLUMNS if c not in ("run", "step", "rank"))
    + " WHERE excluded.attempt > worker_steps.attempt"
)
# SQL placeholders of one row. `?1` is the run, which is the same for all rows of a statement.
_ROW = f"(?1, {', '.join('?' * len(STEPS.names))})"
# Number of rows → statement that inserts this number of rows. Python's SQLite driver releases the
# GIL once per statement, and may then wait for other threads, so a statement inserts many rows.
_INSERTS = {
    rows: f"INSERT INTO worker_steps ({_NAMES}) VALUES {', '.join([_ROW] * rows)} "
    + _NEWER_ATTEMPT_WINS
    for rows in (64, 8, 1)
}
_COPY = "COPY {} (" + _NAMES + ") FROM STDIN (FORMAT BINARY)"
_INCOMING = "CREATE TEMP TABLE IF NOT EXISTS incoming (LIKE worker_steps) ON COMMIT DELETE ROWS"
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


def _weighted_loss(weight: str) -> str:
    return (
        f"sum(CASE WHEN abs(loss) > 1e-100 THEN loss * {weight} ELSE 0 END)"
        f" / nullif(sum(CASE WHEN loss IS NOT NULL THEN {weight} ELSE 0 END), 0)"
    )


_OF_RANK = "CASE WHEN samples = 0 THEN 0.0 ELSE loss END"
# Condition for records that have an ETT error. A rank without samples has no ETT error. It counts
# in all other sums, because it runs the forward and backward pass of a filler sample.
_PREDICTED = "ett_s IS NOT NULL AND samples > 0 AND compute_s > 1e-9"
# The mean loss of the global batch, by `loss_mean`. A rank's loss has the weight that its gradient
# has in the update.
_LOSSES = {
    "samples": _weighted_loss("samples"),
    "size": _weighted_loss("(CASE WHEN load > 1e-100 THEN load ELSE 0 END)"),
    # The mean over all ranks. The loss of a rank without samples counts as 0.
    "ranks": f"CASE WHEN count(loss) > 0 THEN sum({_OF_RANK}) / count({_OF_RANK}) END",
}
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
    "ended_at": "max(ended_at)",
}


def _sum_up(loss: str) -> sa.TextClause:
    sums = {**_SUMS, "loss": loss}
    return sa.text(
        f"INSERT INTO steps ({', '.join(sums)}) SELECT {', '.join(sums.values())} "
        "FROM worker_steps WHERE run = :run AND step >= :first AND step < :end GROUP BY run, step "
        "HAVING count(*) = :world AND min(attempt) = max(attempt) "
        # Records that arrive before the Hello may have any rank.
        "AND max(rank) < :world "
        "ON CONFLICT (run, step) DO UPDATE SET "
        + ", ".join(f"{c} = excluded.{c}" for c in sums if c not in ("run", "step"))
    )


_SUM_UP = {loss_mean: _sum_up(loss) for loss_mean, loss in _LOSSES.items()}
# If the records of a step belong to different attempts, a later attempt has replaced only some of
# them, so the step is not complete any more.
_DROP_MIXED = sa.text(
    "DELETE FROM steps WHERE run = :run AND step >= :first AND step < :end AND step IN ("
    "SELECT step FROM worker_steps WHERE run = :run AND step >= :first AND step < :end "
    "GROUP BY step HAVING min(attempt) < max(attempt))"
)


def write(connection: sa.Connection, batches: Sequence[tuple[LockedRun, StepBatch]]) -> int:
    """Store records and return their number; records of later attempts replace earlier ones."""
    of_runs: list[tuple[int, Sequence[StepRecord]]] = []
    for run, of_run in _by_run(batches):
        # The tables are sorted by step. Inserting rows in this order is cheaper, because most are
        # appended at the end.
        records = sorted(STEPS.all_checked(of_run), key=_STEP)
        for attempt, rank in {(record.attempt, record.rank) for record in records}:
            run.check_rank(attempt, rank)
            run.repeated |= attempt > 0
        run.touched.update(map(_STEP, records))
        of_runs.append((run.key, records))
    count = sum(len(records) for _, records in of_runs)
    if not count:
        return 0
    if connection.dialect.name == "sqlite":
        _insert(connection, of_runs)
    else:
        rows = [(key, *as_tuple(record)) for key, records in of_runs for record in records]
        _copy(connection, rows, new=not any(run.repeated for run, _ in batches))
    return count


def _by_run(
    batches: Sequence[tuple[LockedRun, StepBatch]],
) -> Iterator[tuple[LockedRun, Sequence[StepRecord]]]:
    of_runs: dict[int, tuple[LockedRun, list[StepRecord]]] = {}
    for run, batch in batches:
        of_runs.setdefault(run.key, (run, []))[1].extend(batch.records)
    yield from of_runs.values()


def _latest(rows: Iterable[tuple[Any, ...]]) -> Collection[tuple[Any, ...]]:
    """Return one row per key, from the latest attempt: upserts in Postgres fail on duplicates."""
    latest: dict[Any, tuple[Any, ...]] = {}
    for row in rows:
        earlier = latest.get(_KEY(row))
        if earlier is None or _ATTEMPT(earlier) < _ATTEMPT(row):
            latest[_KEY(row)] = row
    return latest.values()


def sum_up(connection: sa.Connection, runs: Collection[LockedRun], roll_up: bool) -> None:
    """Sum up each step that has new rows and that all ranks have reported.

    All runs are handled together, because most batches have a few rows of each of many runs. If
    `roll_up` is false, roll-ups are only recorded as due.
    """
    touched = {run.key: list(ranges(run.touched)) for run in runs}
    parts = {run.key: [_ALL_STEPS] if run.all_steps else touched[run.key] for run in runs}
    mixed = [span for run in runs if run.repeated for span in _spans(run, parts[run.key])]
    if mixed:
        connection.execute(_DROP_MIXED, mixed)
    known = [run for run in runs if run.world is not None]
    whole = parts | _complete(connection, known)
    for run in known:
        run.new_step = min((part.start for part in whole[run.key]), default=None)
    for loss_mean, query in _SUM_UP.items():
        weighed = [run for run in known if _loss_mean(run) == loss_mean]
        spans = [
            span | {"world": run.world} for run in weighed for span in _spans(run, whole[run.key])
        ]
        if spans:
            connection.execute(query, spans)
    changed = [(run.key, part) for run in known for part in touched[run.key]]
    if not roll_up:
        rollups.remove(connection, changed)
        starts = {run.key: parts[run.key][0].start for run in known if parts[run.key]}
        rollups.put_off(connection, starts)
        return
    rollups.renew(connection, changed)
    for run in known:
        if run.all_steps:
            rollups.add(connection, run.key, _ALL_STEPS)


def _complete(connection: sa.Connection, runs: Iterable[LockedRun]) -> dict[int, list[range]]:
    """Return which of the touched steps of large runs are complete, by key of the run.

    A batch has only a few rows of each step of a large run, so most touched steps are not complete
    yet. Counting a step's rows is much faster than summing them up.
    """
    large = [run for run in runs if (run.world or 0) >= _MANY and not run.all_steps]
    asked = [(run.key, step, run.world) for run in large for step in sorted(run.touched)]
    complete: dict[int, list[int]] = {run.key: [] for run in large}
    for some in in_chunks(asked, _CHUNKS):
        values: dict[str, int | None] = {}
        for place, (key, step, world) in enumerate(some):
            values |= {f"r{place}": key, f"s{place}": step, f"w{place}": world}
        for key, step in connection.execute(_counted(len(some)), values):
            complete[key].append(step)
    return {key: list(ranges(steps)) for key, steps in complete.items()}


@cache
def _counted(steps: int) -> sa.TextClause:
    """Build the query of `_complete` for `steps` steps, with one lookup by key per step."""
    rows = ", ".join(
        f"(CAST(:r{place} AS bigint), CAST(:s{place} AS bigint), CAST(:w{place} AS bigint))"
        for place in range(steps)
    )
    return sa.text(
        f"WITH asked (run, step, world) AS (VALUES {rows}) SELECT run, step FROM asked WHERE "
        "(SELECT count(*) FROM worker_steps WHERE worker_steps.run = asked.run "
        "AND worker_steps.step = asked.step) = world"
    )


def _loss_mean(run: LockedRun) -> str:
    return run.loss_mean if run.loss_mean in _LOSSES else "samples"


def _spans(run: LockedRun, parts: Iterable[range]) -> Iterator[dict[str, Any]]:
    for part in parts:
        yield {"run": run.key, "first": part.start, "end": part.stop}


def _insert(connection: sa.Connection, of_runs: Iterable[tuple[int, Sequence[StepRecord]]]) -> None:
    by_size: dict[int, list[tuple[int, Sequence[StepRecord]]]] = {size: [] for size in _INSERTS}
    for key, records in of_runs:
        for chunk in in_chunks(records, tuple(_INSERTS)):
            by_size[len(chunk)].append((key, chunk))
    # Pass the values to the driver itself, which takes them a chunk at a time. SQLAlchemy would
    # need all of them in memory at once.
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    for size, chunks in by_size.items():
        if chunks:
            values = ((key, *chain.from_iterable(map(as_tuple, chunk))) for key, chunk in chunks)
            driver.executemany(_INSERTS[size], values)


def _copy(connection: sa.Connection, rows: Iterable[tuple[Any, ...]], *, new: bool) -> None:
    """Write rows to Postgres with COPY; rows of later attempts replace earlier ones.

    `new` means that the rows are probably new and distinct. Then first try to copy them directly
    into the table, which takes half the time.
    """
    if new:
        try:
            with connection.begin_nested():
                _copy_into("worker_steps", connection, rows)
        # A message arrived again, or another attempt repeats the step.
        except psycopg.errors.UniqueViolation:
            pass
        else:
            return
    connection.execute(sa.text(_INCOMING))
    _copy_into("incoming", connection, _latest(rows))
    connection.execute(sa.text(_INSERT_INCOMING))


def _copy_into(table: str, connection: sa.Connection, rows: Iterable[tuple[Any, ...]]) -> None:
    # SQLAlchemy has begun a transaction on this connection. Its commit also commits the rows that
    # are written here without SQLAlchemy.
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    with driver.cursor() as cursor, cursor.copy(_COPY.format(table)) as copy:
        copy.set_types(_COPY_TYPES)
        for row in rows:
            copy.write_row(row)


def ranges(numbers: Iterable[int]) -> Iterator[range]:
    """Return the ranges of consecutive numbers, ascending."""
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
