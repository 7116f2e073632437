"""Write roll-ups: in the transaction that changes the steps, or later, a few at a time.

Ingest calls `renew` for the steps that it wrote. While more telemetry is waiting, it calls
`put_off` instead, and the worker process later calls `fill` until no roll-up is due.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from paceline_backend.store.database import Store, in_chunks
from paceline_backend.store.rollups.metrics import BLOCK, CELLS, METRICS, named
from paceline_backend.store.schema import (
    OPTIONAL_METRICS,
    rank_rollups,
    runs,
    step_rollups,
    steps,
    worker_steps,
)

log = logging.getLogger(__name__)

# The possible numbers of blocks in one query, see `in_chunks`.
_CHUNKS = (64, 8, 1)
# Number of blocks that one call of `fill` writes. Its transaction then takes some milliseconds.
_FILLED = 5

_RUN, _FIRST, _END = (sa.bindparam(name, type_=sa.BigInteger) for name in ("r", "first", "end"))


def _within(table: sa.FromClause) -> list[sa.ColumnElement[bool]]:
    return [table.c.run == _RUN, table.c.step >= _FIRST, table.c.step < _END]


def _block(table: sa.Table) -> sa.ColumnElement[Any]:
    return table.c.step - table.c.step % sa.literal_column(str(BLOCK))


def _insert_steps() -> sa.Insert:
    s = steps.c
    inner = sa.select(s.run, _block(steps).label("step"), s.epoch, s.ended_at, *named(METRICS))
    # OFFSET prevents both databases from computing each metric again for each of its sums.
    row = inner.where(*_within(steps)).offset(sa.literal_column("0")).subquery().c
    values: dict[str, sa.ColumnElement[Any]] = {
        "run": row.run,
        "step": row.step,
        "epoch": sa.func.min(row.epoch),
        "ended_at": sa.func.max(row.ended_at),
    }
    for name in METRICS:
        value = row[name]
        if name in OPTIONAL_METRICS:
            values[f"{name}_count"] = sa.func.count(value)
        values[f"{name}_sum"] = sa.func.sum(value)
        values[f"{name}_min"] = sa.func.min(value)
        values[f"{name}_max"] = sa.func.max(value)
    query = sa.select(*values.values()).group_by(row.run, row.step)
    return sa.insert(step_rollups).from_select([*values], query)


def _insert_ranks() -> sa.Insert:
    """Build the INSERT of one block's rows, one for each rank that reported the first step.

    Each record is looked up by its whole key, one rank after the other. Both databases then
    choose a fast query plan even without statistics of the tables. In a new database, which has no
    statistics, a join of two ranges once took Postgres hours.
    """
    w = worker_steps.c
    first = worker_steps.alias("first")
    total = sa.func.sum
    works = w.samples > 0
    nothing: sa.ColumnElement[Any] = sa.literal_column("0.0")
    values: dict[str, sa.ColumnElement[Any]] = {
        "run": sa.cast(_RUN, sa.BigInteger),
        "step": sa.cast(_FIRST, sa.BigInteger),
        "rank": first.c.rank,
        "attempt": sa.func.max(w.attempt),
        "count": sa.func.count(),
        "compute_s_sum": total(w.compute_s),
        "compute_s_min": sa.func.min(w.compute_s),
        "compute_s_max": sa.func.max(w.compute_s),
        "ett_s_sum": total(w.ett_s),
        "ett_s_count": sa.func.count(w.ett_s),
        "wait_s_sum": total(CELLS["wait_s"]),
        "samples_sum": total(w.samples),
        "load_sum": total(w.load),
        "share_sum": total(CELLS["share"]),
        "share_count": sa.func.count(CELLS["share"]),
        "fit_count": total(sa.case((works, 1), else_=0)),
        "fit_load": total(sa.case((works, w.load), else_=nothing)),
        "fit_time": total(sa.case((works, w.compute_s), else_=nothing)),
        "fit_load_sq": total(sa.case((works, w.load * w.load), else_=nothing)),
        "fit_load_time": total(sa.case((works, w.load * w.compute_s), else_=nothing)),
    }
    # Adding 0 prevents SQLite from reading all records of the block before it knows the rank.
    step = steps.c.step + sa.literal_column("0")
    ranks_step = sa.and_(w.run == _RUN, w.step == step, w.rank == first.c.rank)
    query = (
        sa.select(*values.values())
        .select_from(first.join(steps, sa.and_(*_within(steps))).join(worker_steps, ranks_step))
        .where(first.c.run == _RUN, first.c.step == _FIRST)
        .group_by(first.c.rank)
    )
    return sa.insert(rank_rollups).from_select([*values], query)


_INSERT_STEPS, _INSERT_RANKS = _insert_steps(), _insert_ranks()
_DELETES = tuple(sa.delete(table).where(*_within(table)) for table in (step_rollups, rank_rollups))
_FULL = (
    sa.select(_block(steps).label("block"))
    .where(*_within(steps))
    .group_by("block")
    .having(sa.func.count() == BLOCK)
)
_ROLLED = sa.select(step_rollups.c.step).where(*_within(step_rollups))


def remove(connection: sa.Connection, touched: Iterable[tuple[int, range]]) -> None:
    """Delete the roll-ups of all blocks that contain a touched step.

    `touched` has the keys of runs, whose rows must be locked, each with a range of steps.
    """
    spans = [_span(run, range(part.start - part.start % BLOCK, part.stop)) for run, part in touched]
    if spans:
        for delete in _DELETES:
            connection.execute(delete, spans)


def renew(connection: sa.Connection, touched: Iterable[tuple[int, range]]) -> None:
    """Write the roll-ups of all blocks that contain a touched step; delete earlier roll-ups.

    Incomplete blocks get no roll-ups. `touched` has the keys of runs, each with a range of steps.
    The runs' rows must be locked: without the locks, two transactions that each see a part of a
    block would both find the block incomplete.
    """
    blocks = sorted({(run, at) for run, part in touched for at in _starts(part)})
    full: dict[int, list[int]] = {}
    old: list[dict[str, int]] = []
    for some in in_chunks(blocks, _CHUNKS):
        for run, at, is_full, is_rolled in _states(connection, some):
            if is_rolled:
                old.append(_span(run, range(at, at + BLOCK)))
            if is_full:
                full.setdefault(run, []).append(at)
    if old:
        for delete in _DELETES:
            connection.execute(delete, old)
    for run, starts in full.items():
        _add(connection, run, starts)


def _states(connection: sa.Connection, blocks: Sequence[tuple[int, int]]) -> Sequence[Any]:
    values: dict[str, int] = {}
    for place, (run, at) in enumerate(blocks):
        values |= {f"r{place}": run, f"s{place}": at}
    return connection.execute(_state_query(len(blocks)), values).all()


@cache
def _state_query(blocks: int) -> sa.TextClause:
    """Build the query of `_states`, with one lookup by key per block instead of a join."""
    rows = ", ".join(
        f"(CAST(:r{place} AS bigint), CAST(:s{place} AS bigint))" for place in range(blocks)
    )
    return sa.text(
        f"WITH touched (run, block) AS (VALUES {rows}) SELECT run, block, "
        "(SELECT count(*) FROM steps WHERE steps.run = touched.run "
        f"AND steps.step >= touched.block AND steps.step < touched.block + {BLOCK}) = {BLOCK}, "
        "(SELECT count(*) FROM step_rollups WHERE step_rollups.run = touched.run "
        "AND step_rollups.step = touched.block) > 0 FROM touched"
    )


def add(connection: sa.Connection, run: int, within: range) -> None:
    """Write the missing roll-ups of a range of whole blocks; the run's row must be locked."""
    span = _span(run, within)
    full = set(connection.execute(_FULL, span).scalars())
    if full:
        _add(connection, run, full - set(connection.execute(_ROLLED, span).scalars()))


def put_off(connection: sa.Connection, starts: Mapping[int, int]) -> None:
    """Record that the roll-ups of runs are due; the runs' rows must be locked.

    `starts` maps the key of each run to the first step whose block needs a roll-up.
    """
    if not starts:
        return
    c = runs.c
    earlier = sa.or_(c.rollups_due.is_(None), c.rollups_due > sa.bindparam("due"))
    note = sa.update(runs).where(c.key == sa.bindparam("of_run"), earlier)
    connection.execute(
        note.values(rollups_due=sa.bindparam("due")),
        [{"of_run": run, "due": step} for run, step in starts.items()],
    )


def fill(store: Store, after: int = 0) -> int | None:
    """Write the roll-ups of a few blocks of one run; return its key, or None if nothing is due.

    `after` is the key of the run that the previous call handled, so that runs take turns.
    """
    c = runs.c
    turns = sa.select(c.key).where(c.rollups_due.is_not(None))
    with store.read() as connection:
        run = connection.execute(turns.order_by(c.key <= after, c.key).limit(1)).scalar()
    if run is None:
        return None
    with store.write() as connection:
        # Lock the run's row like ingest does: otherwise, both transactions could see only a part of
        # a block.
        query = sa.select(c.rollups_due).where(c.key == run).with_for_update(key_share=True)
        due = connection.execute(query).scalar()
        if due is not None:
            _fill(connection, run, due)
    return int(run)


def _fill(connection: sa.Connection, run: int, due: int) -> None:
    newer = sa.select(steps.c.step).where(steps.c.run == run, steps.c.step >= due - due % BLOCK)
    first = connection.execute(newer.order_by(steps.c.step).limit(1)).scalar()
    end = None
    if first is not None:
        block = first - first % BLOCK
        end = block + _FILLED * BLOCK
        add(connection, run, range(block, end))
    connection.execute(sa.update(runs).where(runs.c.key == run).values(rollups_due=end))


def _add(connection: sa.Connection, run: int, blocks: Iterable[int]) -> None:
    for part in _blocks(range(at, at + BLOCK) for at in sorted(blocks)):
        each = [_span(run, range(at, at + BLOCK)) for at in part[::BLOCK]]
        try:
            # Postgres raises an error if a sum overflows a double. Then the block stays without
            # roll-ups, and its records remain stored.
            with connection.begin_nested():
                connection.execute(_INSERT_STEPS, _span(run, part))
                connection.execute(_INSERT_RANKS, each)
        except exc.DataError as error:
            log.warning(
                "steps %d to %d of the run with key %d get no roll-ups: %s",
                part.start,
                part.stop - 1,
                run,
                error,
            )


def _starts(part: range) -> range:
    return range(part.start // BLOCK * BLOCK, part.stop, BLOCK)


def _span(run: int, part: range) -> dict[str, int]:
    return {"r": run, "first": part.start, "end": part.stop}


def _blocks(touched: Iterable[range]) -> Iterator[range]:
    """Extend ascending ranges of steps to whole blocks, and merge adjacent ones."""
    whole: range | None = None
    for part in touched:
        start, stop = part.start // BLOCK * BLOCK, -(-part.stop // BLOCK) * BLOCK
        if whole is not None and start <= whole.stop:
            whole = range(whole.start, max(stop, whole.stop))
            continue
        if whole is not None:
            yield whole
        whole = range(start, stop)
    if whole is not None:
        yield whole
