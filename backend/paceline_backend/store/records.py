"""Read the records of ranks' steps as arrays of numbers.

Columns are named like the fields of `StepRecord`. `store.attempts` decides which rows of earlier
attempts count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from paceline.wire import Hello
from paceline_backend.store import attempts
from paceline_backend.store.reads import Range, bounds, within
from paceline_backend.store.rollups import reading as rollups
from paceline_backend.store.rollups.metrics import METRICS
from paceline_backend.store.schema import rank_rollups, runs, steps, worker_steps

Floats = npt.NDArray[np.float64]
# Ranges of steps, each from its first step to one past its last step.
Steps = Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Records:
    """Rows of ranks' steps, with the number of ranks of the latest attempt (None: unknown).

    `table` has step, rank, and the requested columns.
    """

    world: int | None
    table: Floats  # [rows, 2 + columns]

    def since(self, step: int) -> Records:
        """Return the rows of step `step` and of later steps."""
        return Records(self.world, self.table[self.table[:, 0] >= step])

    def by_step(self, world: int | None = None) -> tuple[Floats, Floats]:
        """Return the steps, [steps], and the values, [columns, steps, ranks]; NaN: no row.

        The result has at least `world` ranks (None: the number of ranks of the latest attempt), and
        more if an earlier attempt had more.
        """
        ranks = self.table[:, 1].astype(np.int64)
        steps, at = np.unique(self.table[:, 0], return_inverse=True)
        known = (self.world or 0) if world is None else world
        width = max(known, int(ranks.max(initial=-1)) + 1)
        columns = np.full((self.table.shape[1] - 2, len(steps), width), np.nan)
        columns[:, at, ranks] = self.table[:, 2:].T
        return steps, columns


def _known(connection: sa.Connection, run: int, hello: Hello) -> sa.ColumnElement[bool]:
    """Return the SQL condition for rows of the Hello's attempt and of comparable earlier steps.

    A step before the attempt is comparable if all ranks reported it, and if the same number of
    ranks trained it on the same nodes. On other nodes, ranks have other speeds.
    """
    c = worker_steps.c
    workers = sa.select(steps.c.workers).where(steps.c.run == c.run, steps.c.step == c.step)
    earlier = sa.and_(c.step < hello.step, workers.scalar_subquery() == hello.world)
    if elsewhere := attempts.elsewhere(connection, run, hello.placement):
        earlier = sa.and_(earlier, c.attempt.not_in(elsewhere))
    return sa.or_(c.attempt == hello.attempt, earlier) if hello.attempt else c.attempt == 0


def of_attempt(
    connection: sa.Connection,
    run: int,
    hello: Hello,
    columns: Sequence[str],
    newest: tuple[int, int],
    older: Steps,
) -> Iterator[tuple[int, int, tuple[float, ...]]]:
    """Yield (step, rank, values of `columns`), ordered by step and rank.

    The rows belong to an attempt, or to comparable earlier steps (see `_known`). Only steps in the
    half-open range `newest` and in the earlier ranges `older` are included.
    """
    since, before = newest
    c = worker_steps.c
    query = sa.select(c.step, c.rank, *(c[name] for name in columns)).where(
        c.run == run,
        _known(connection, run, hello),
        c.step < before,
        sa.or_(c.step >= since, *(c.step.between(start, end - 1) for start, end in older)),
    )
    for step, rank, *values in connection.execute(query.order_by(c.step, c.rank)):
        yield step, rank, tuple(values)


def complete_steps(
    connection: sa.Connection,
    run: int,
    hello: Hello,
    columns: Sequence[str],
    ranges: Steps,
) -> dict[int, Floats]:
    """Return the steps in `ranges` that all ranks reported: step → values, [world, columns].

    Steps of earlier attempts are included if they are comparable (see `_known`).
    """
    c = worker_steps.c
    query = sa.select(c.step, *(c[name] for name in columns)).where(
        c.run == run,
        _known(connection, run, hello),
        c.rank.between(0, hello.world - 1),
        sa.or_(*(c.step.between(start, end - 1) for start, end in ranges)),
    )
    rows: dict[int, list[Any]] = {}
    for step, *values in connection.execute(query.order_by(c.step, c.rank)):
        rows.setdefault(step, []).append(values)
    return {step: np.array(values) for step, values in rows.items() if len(values) == hello.world}


def since(
    connection: sa.Connection,
    run: int,
    attempt: int,
    world: int,
    columns: Sequence[str],
    first: int,
) -> Floats:
    """Return an attempt's rows from step `first` on, [rows, 2 + columns].

    Each row has step, rank and the values of `columns`. The rows are ordered by step and rank.
    """
    c = worker_steps.c
    query = sa.select(c.step, c.rank, *(c[name] for name in columns)).where(
        c.run == run,
        c.attempt == attempt,
        c.rank.between(0, world - 1),
        c.step >= first,
    )
    return _table(connection.execute(query.order_by(c.step, c.rank)).all(), 2 + len(columns))


def reported(connection: sa.Connection, run: int, span: Range) -> tuple[int, int]:
    """Return the first and last step of a range that a rank reported; (0, -1) if there is none."""
    first, last = bounds(connection, worker_steps, run, span)
    return (0, -1) if first is None or last is None else (first, last)


def between(
    connection: sa.Connection, run: int, columns: Sequence[str], first: int, last: int
) -> Floats:
    """Return all rows of steps `first` to `last`, of any attempt, in the form of `since`."""
    c = worker_steps.c
    query = sa.select(c.step, c.rank, *(c[name] for name in columns)).where(
        c.run == run, c.step.between(first, last)
    )
    return _table(connection.execute(query.order_by(c.step, c.rank)).all(), 2 + len(columns))


def newest_complete(
    connection: sa.Connection,
    run: int,
    columns: Sequence[str],
    span: Range,
    *,
    count: int,
    most_rows: int,
) -> Records:
    """Return the rows of a range of steps up to the newest complete step, ascending by step.

    Rows that a restart discarded are left out. Without a first step in `span`, the range has
    `count` steps. If it has more than `most_rows` rows, the oldest steps are left out.
    """
    attempt, world, parts = counting(connection, run)
    newest = attempts.newest_complete(connection, run, parts)
    if newest is None or not world:
        return Records(world, _table([], 2 + len(columns)))
    first, last = span
    last = newest.step if last is None else min(last, newest.step)
    first = last - count + 1 if first is None else first
    first = max(first, last - most_rows // world + 1)
    rows = _rows_that_count(connection, run, columns, (first, last), (attempt, world, parts))
    return Records(world, _table(rows, 2 + len(columns)))


def newest(
    connection: sa.Connection,
    run: int,
    columns: Sequence[str],
    *,
    count: int,
    most_rows: int,
    fewest: int,
) -> Records:
    """Return the rows of the newest steps, complete or not, ascending by step.

    Rows that a restart discarded are left out. The range ends at the newest step and has `count`
    steps. If they have more than `most_rows` rows, the range has fewer steps, but at least
    `fewest`.
    """
    attempt, world, parts = counting(connection, run)
    row = attempts.newest(connection, run, parts)
    if row is None:
        return Records(world, _table([], 2 + len(columns)))
    count = min(count, max(fewest, most_rows // (world or 1)))
    span = (row.step - count + 1, row.step)
    rows = _rows_that_count(connection, run, columns, span, (attempt, world, parts))
    return Records(world, _table(rows, 2 + len(columns)))


def step_table(
    connection: sa.Connection,
    run: int,
    metrics: Sequence[str],
    span: Range = (None, None),
) -> Floats:
    """Return complete steps, ascending, as [steps, 2 + metrics]; NaN: unknown.

    Each row has step, load, and the values of `metrics`, which are names of
    `rollups.metrics.METRICS`.
    """
    columns = [METRICS[name] for name in metrics]
    query = sa.select(steps.c.step, steps.c.load_sum, *columns).where(steps.c.run == run)
    first, last = span
    if first is not None:
        query = query.where(steps.c.step >= first)
    if last is not None:
        query = query.where(steps.c.step <= last)
    rows = connection.execute(query.order_by(steps.c.step)).all()
    values = np.array([tuple(row) for row in rows], dtype=np.float64)
    return values.reshape(len(rows), 2 + len(metrics))


def newest_steps(
    connection: sa.Connection, run: int, names: Sequence[str], span: Range, most: int
) -> Floats:
    """Return the newest `most` complete steps of a range, ascending, like `step_table`.

    `names` are names of `rollups.metrics.METRICS`, or `samples`.
    """
    columns = [METRICS[name] if name in METRICS else steps.c[name] for name in names]
    query = sa.select(steps.c.step, steps.c.load_sum, *columns).where(steps.c.run == run)
    query = query.where(*within(steps.c.step, span)).order_by(steps.c.step.desc()).limit(most)
    return _table(connection.execute(query).all()[::-1], 2 + len(names))


def samples_before(connection: sa.Connection, run: int, step: int) -> int:
    """Return the total number of samples of the complete steps before a step."""
    total = sa.func.coalesce(sa.func.sum(steps.c.samples), 0)
    query = sa.select(total).where(steps.c.run == run, steps.c.step < step)
    return int(connection.execute(query).scalar_one())


def sums(
    connection: sa.Connection, run: int, attempt: int | None, world: int | None
) -> list[tuple[float, float, float, float, float]]:
    """Return (n, Σx, Σy, Σx², Σxy) for each rank, over its n rows with samples.

    x is the rank's load in a step, and y its compute time. `attempt` is the latest attempt (None:
    there was none), and `world` its number of ranks.
    """
    ranks, rolled = [], []
    if attempt is not None:
        ranks = attempts.present(attempt, world)
        rolled = attempts.present(attempt, world, rank_rollups)
    covered = rollups.cover(connection, run, *bounds(connection, worker_steps, run, (None, None)))
    rows: Sequence[Any]
    if covered is not None:
        rows = rollups.fit_sums(connection, covered, ranks, rolled)
    else:
        rows = _sums(connection, run, ranks)
    return [
        (float(row[1]), float(row[2]), float(row[3]), float(row[4]), float(row[5])) for row in rows
    ]


def _sums(
    connection: sa.Connection, run: int, ranks: Sequence[sa.ColumnElement[bool]]
) -> Sequence[Any]:
    c = worker_steps.c
    x, y = c.load, c.compute_s
    sums = [sa.func.sum(value) for value in (x, y, x * x, x * y)]
    columns: list[Any] = [c.rank, sa.func.count(), *sums]
    query = sa.select(*columns)
    query = query.where(c.run == run, c.samples > 0, *ranks)
    return connection.execute(query.group_by(c.rank).order_by(c.rank)).all()


_Attempts = tuple[int | None, int | None, list[attempts.AttemptSpan]]


def counting(connection: sa.Connection, run: int) -> _Attempts:
    """Return the latest attempt, its number of ranks, and the result of `attempts.spans`."""
    query = sa.select(runs.c.attempt, runs.c.world).where(runs.c.key == run)
    attempt, world = connection.execute(query).one()
    return attempt, world, attempts.spans(connection, run, attempt)


def _rows_that_count(
    connection: sa.Connection,
    run: int,
    columns: Sequence[str],
    span: tuple[int, int],
    counting: _Attempts,
) -> Sequence[sa.Row[Any]]:
    c = worker_steps.c
    attempt, world, parts = counting
    query = (
        sa.select(c.step, c.rank, *(c[name] for name in columns))
        .where(c.run == run, c.step.between(*span))
        .where(*attempts.present(attempt, world))
        .where(sa.or_(*(sa.and_(*part.rows()) for part in parts)))
    )
    return connection.execute(query.order_by(c.step, c.rank)).all()


def _table(rows: Sequence[sa.Row[Any]], width: int) -> Floats:
    numbers = np.fromiter(chain.from_iterable(rows), np.float64, len(rows) * width)
    return numbers.reshape(len(rows), width)
