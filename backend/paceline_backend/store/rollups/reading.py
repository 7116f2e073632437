"""Read ranges of steps from roll-ups, and steps without a roll-up individually."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.rollups.metrics import (
    BLOCK,
    CELLS,
    METRICS,
    named,
    of_same_step,
    ratio,
    rolled_count,
)
from paceline_backend.store.schema import rank_rollups, step_rollups, steps, worker_steps

# Maximum number of gaps in a range. If there are more, all steps are read individually, because the
# SQL grows with the number of gaps.
_MOST_GAPS = 50
# Columns of `CELLS` that a record may lack. For these, roll-ups also store the number of records
# that have a value.
_OWN_COUNT = ("ett_s", "share")
_Where = list[sa.ColumnElement[bool]]


def bucket_of(bucket: int, first: int | None, last: int | None, points: int) -> int:
    """Round a bucket's size to a multiple of `BLOCK`; keep a size below half of `BLOCK`.

    `bucket` is the minimum size for at most `points` buckets of the steps `first` to `last`.
    """
    if first is None or last is None or bucket < BLOCK // 2:
        return bucket
    lower = bucket // BLOCK * BLOCK
    if lower and last // lower - first // lower < points:
        return lower
    return -(-bucket // BLOCK) * BLOCK


@dataclass(frozen=True)
class Cover:
    """Division of a run's range of steps into roll-ups and gaps.

    `gaps` has first and last step of each part without a roll-up.
    """

    run: int
    first: int
    last: int
    gaps: list[tuple[int, int]]

    def rolled(self, table: sa.Table) -> _Where:
        """Return the SQL conditions for the range's roll-ups.

        A roll-up that was written in a gap after this object was made is left out, because the
        steps of gaps are read individually.
        """
        c = table.c
        inside = c.step.between(-(-self.first // BLOCK) * BLOCK, self.last - BLOCK + 1)
        return [c.run == self.run, inside, *(~c.step.between(a, b) for a, b in self.gaps)]

    def single(self, table: sa.Table) -> _Where:
        """Return the SQL conditions for the steps that are read individually."""
        c = table.c
        gaps = (c.step.between(a, b) for a, b in self.gaps)
        return [c.run == self.run, sa.or_(sa.false(), *gaps)]


def cover(connection: sa.Connection, run: int, first: int | None, last: int | None) -> Cover | None:
    """Divide a range of steps into roll-ups and gaps; None if there are too few roll-ups to help.

    `first` and `last` are the bounds of the range, or None if it has no steps.
    """
    if first is None or last is None:
        return None
    c = step_rollups.c
    inside = c.step.between(-(-first // BLOCK) * BLOCK, last - BLOCK + 1)
    query = sa.select(c.step).where(c.run == run, inside).order_by(c.step)
    gaps, at = [], first
    for step in connection.execute(query).scalars():
        if at < step:
            gaps.append((at, step - 1))
        at = step + BLOCK
    if at <= last:
        gaps.append((at, last))
    return (
        None if len(gaps) > _MOST_GAPS or gaps == [(first, last)] else Cover(run, first, last, gaps)
    )


def step_buckets(connection: sa.Connection, of: Cover, bucket: int) -> Sequence[Any]:
    """Return first step, epoch, end time and values of `METRICS` for each bucket of steps.

    The values are the mean of each metric, and then the minimum and maximum of each metric.
    """
    s, r = steps.c, step_rollups.c
    row = (
        sa.select(s.step, s.epoch, s.ended_at, *named(METRICS))
        .where(*of.single(steps))
        .subquery()
        .c
    )
    single: list[Any] = [row.step, row.epoch, row.ended_at]
    rolled: list[Any] = [r.step, r.epoch, r.ended_at]
    for name in METRICS:
        value = row[name]
        known = sa.case((value.is_not(None), 1), else_=0)
        single += [known.label(f"{name}_count"), value.label(f"{name}_sum")]
        single += [value.label(f"{name}_min"), value.label(f"{name}_max")]
        rolled += [rolled_count(name), *(r[f"{name}_{kind}"] for kind in ("sum", "min", "max"))]
    parts = sa.select(*rolled).where(*of.rolled(step_rollups)).union_all(sa.select(*single))
    c = parts.subquery().c
    columns: list[Any] = [sa.func.min(c.step), sa.func.min(c.epoch), sa.func.max(c.ended_at)]
    columns += [_mean(c[f"{name}_sum"], c[f"{name}_count"]) for name in METRICS]
    for name in METRICS:
        columns += [sa.func.min(c[f"{name}_min"]), sa.func.max(c[f"{name}_max"])]
    cell = c.step // bucket
    return connection.execute(sa.select(*columns).group_by(cell).order_by(cell)).all()


@dataclass(frozen=True)
class RankChoice:
    """Selection of the ranks in a result: `ranks` (None: all), or every n-th rank (`every`)."""

    ranks: Sequence[int] | None = None
    every: int = 1

    def conditions(self, column: sa.ColumnElement[int]) -> _Where:
        """Return the SQL conditions that a column of ranks has one of the selected ranks."""
        if self.ranks is not None:
            return [column.in_(self.ranks)]
        return [column % self.every == 0] if self.every > 1 else []


ALL_RANKS = RankChoice()


def rank_buckets(
    connection: sa.Connection,
    of: Cover,
    bucket: int,
    which: RankChoice,
    cells: Sequence[str] = tuple(CELLS),
    together: int = 1,
) -> Sequence[Any]:
    """Return a row for each rank and bucket, ordered by rank and step.

    A row has rank, first step, means of `cells`, and minimum and maximum compute time.

    Args:
        bucket: size of a bucket, in steps.
        cells: names of `CELLS`.
        together: number of consecutive ranks that are combined; the rank is then the group's index.
    """
    w, r = worker_steps.c, rank_rollups.c
    joined = worker_steps.outerjoin(steps, of_same_step)
    query = sa.select(w.step, w.rank, *named(CELLS)).select_from(joined)
    row = query.where(*of.single(worker_steps), *which.conditions(w.rank)).subquery().c
    single: list[Any] = [row.step, row.rank]
    single += [row.compute_s.label("compute_s_min"), row.compute_s.label("compute_s_max")]
    rolled: list[Any] = [r.step, r.rank, r.compute_s_min, r.compute_s_max]
    for name in cells:
        known = sa.case((row[name].is_not(None), 1), else_=0)
        single += [row[name].label(f"{name}_sum"), known.label(f"{name}_count")]
        count = r[f"{name}_count"] if name in _OWN_COUNT else r["count"]
        rolled += [r[f"{name}_sum"], count.label(f"{name}_count")]
    whole = sa.select(*rolled).where(*of.rolled(rank_rollups), *which.conditions(r.rank))
    # Without a union, the database reads in the order of the key, in two thirds of the time.
    c = (whole.union_all(sa.select(*single)) if of.gaps else whole).subquery().c
    # If each bucket is exactly one roll-up, no aggregation is needed.
    if bucket == BLOCK and not of.gaps and together == 1:
        means = [ratio(sa.cast(c[f"{name}_sum"], sa.Double), c[f"{name}_count"]) for name in cells]
        query = sa.select(c.rank, c.step, *means, c.compute_s_min, c.compute_s_max)
        return connection.execute(query.order_by(c.rank, c.step)).all()
    means = [_mean(c[f"{name}_sum"], c[f"{name}_count"]) for name in cells]
    extremes = [sa.func.min(c.compute_s_min), sa.func.max(c.compute_s_max)]
    first = c.step - c.step % sa.literal_column(str(bucket))
    rank = c.rank if together == 1 else c.rank // together
    query = sa.select(rank, first, *means, *extremes)
    return connection.execute(query.group_by(rank, first).order_by(rank, first)).all()


def fit_sums(
    connection: sa.Connection,
    of: Cover,
    rows: Sequence[sa.ColumnElement[bool]],
    rolled: Sequence[sa.ColumnElement[bool]],
) -> Sequence[Any]:
    """Return, for each rank: rank, n, Σx, Σy, Σx² and Σxy, where x is load and y compute time.

    The sums are over the n records of the rank that have samples. `rows` are conditions for
    ``worker_steps``, and `rolled` those for ``rank_rollups``.
    """
    w, r = worker_steps.c, rank_rollups.c
    x, y = w.load, w.compute_s
    single = sa.select(
        w.rank,
        sa.literal_column("1").label("fit_count"),
        x.label("fit_load"),
        y.label("fit_time"),
        (x * x).label("fit_load_sq"),
        (x * y).label("fit_load_time"),
    ).where(w.samples > 0, *of.single(worker_steps), *rows)
    names = ("fit_count", "fit_load", "fit_time", "fit_load_sq", "fit_load_time")
    whole = sa.select(r.rank, *(r[name] for name in names)).where(
        r.fit_count > 0, *of.rolled(rank_rollups), *rolled
    )
    c = whole.union_all(single).subquery().c
    sums = [sa.func.sum(c[name]) for name in names]
    return connection.execute(sa.select(c.rank, *sums).group_by(c.rank).order_by(c.rank)).all()


def _mean(total: sa.ColumnElement[Any], count: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return ratio(sa.cast(sa.func.sum(total), sa.Double), sa.func.sum(count))
