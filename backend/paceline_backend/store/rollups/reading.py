"""Reads roll-ups, and what no roll-up covers step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.rollups.metrics import CELLS, METRICS, named, of_same_step, over
from paceline_backend.store.rollups.tables import BLOCK, rank_rollups, step_rollups
from paceline_backend.store.schema import steps, worker_steps

_MOST_GAPS = (
    50  # of a range with more holes than that, every step is read: SQL would grow with them
)
_OWN_COUNT = ("ett_s", "share")  # cells that a record may lack
_Where = list[sa.ColumnElement[bool]]


def bucket_of(bucket: int, first: int | None, last: int | None, points: int) -> int:
    """A bucket's size such that roll-ups fill it: from half a block on a multiple of a block.

    Args:
        bucket: the least size that `points` allow.
        first: step that there is.
        last: step that there is.
        points: at most so many buckets.
    """
    if first is None or last is None or bucket < BLOCK // 2:
        return bucket
    lower = bucket // BLOCK * BLOCK
    if lower and last // lower - first // lower < points:
        return lower
    return -(-bucket // BLOCK) * BLOCK


@dataclass(frozen=True)
class Cover:
    """How a run's range of steps is read."""

    run: int
    first: int
    last: int
    gaps: list[tuple[int, int]]  # first and last step of each part that has no roll-up

    def rolled(self, table: sa.Table) -> _Where:
        """The condition for the roll-ups; gaps are named, as one may have been filled meanwhile."""
        c = table.c
        inside = c.step.between(-(-self.first // BLOCK) * BLOCK, self.last - BLOCK + 1)
        return [c.run == self.run, inside, *(~c.step.between(a, b) for a, b in self.gaps)]

    def single(self, table: sa.Table) -> _Where:
        """The condition for the steps that are read by themselves."""
        c = table.c
        gaps = (c.step.between(a, b) for a, b in self.gaps)
        return [c.run == self.run, sa.or_(sa.false(), *gaps)]


def cover(connection: sa.Connection, run: int, first: int | None, last: int | None) -> Cover | None:
    """How to read a range of steps; None: its roll-ups are too few to help.

    Args:
        connection: to read from.
        run: key of the run.
        first: step of the range; None: there is no step.
        last: step of the range.
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
    """Step, epoch, end, the means of `METRICS`, and of each least and greatest, per bucket."""
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
        rolled += [r[f"{name}_{kind}"] for kind in ("count", "sum", "min", "max")]
    parts = sa.select(*rolled).where(*of.rolled(step_rollups)).union_all(sa.select(*single))
    c = parts.subquery().c
    columns: list[Any] = [sa.func.min(c.step), sa.func.min(c.epoch), sa.func.max(c.ended_at)]
    columns += [_mean(c[f"{name}_sum"], c[f"{name}_count"]) for name in METRICS]
    for name in METRICS:
        columns += [sa.func.min(c[f"{name}_min"]), sa.func.max(c[f"{name}_max"])]
    cell = c.step // bucket
    return connection.execute(sa.select(*columns).group_by(cell).order_by(cell)).all()


def rank_buckets(
    connection: sa.Connection,
    of: Cover,
    bucket: int,
    ranks: Sequence[int] | None,
    every: int,
    cells: Sequence[str] = tuple(CELLS),
    together: int = 1,
) -> Sequence[Any]:
    """Rank, first step of each bucket, the means of `cells`, least and greatest time of computing.

    Args:
        connection: to read from.
        of: the range of steps.
        bucket: in steps.
        ranks: only these.
        every: only each so many-th of them.
        cells: names of `CELLS`.
        together: so many ranks in a row are one; then their number in rows stands for the rank.
    """
    w, r = worker_steps.c, rank_rollups.c
    joined = worker_steps.outerjoin(steps, of_same_step)
    query = sa.select(w.step, w.rank, *named(CELLS)).select_from(joined)
    row = query.where(*of.single(worker_steps), *chosen(w.rank, ranks, every)).subquery().c
    single: list[Any] = [row.step, row.rank]
    single += [row.compute_s.label("compute_s_min"), row.compute_s.label("compute_s_max")]
    rolled: list[Any] = [r.step, r.rank, r.compute_s_min, r.compute_s_max]
    for name in cells:
        known = sa.case((row[name].is_not(None), 1), else_=0)
        single += [row[name].label(f"{name}_sum"), known.label(f"{name}_count")]
        count = r[f"{name}_count"] if name in _OWN_COUNT else r["count"]
        rolled += [r[f"{name}_sum"], count.label(f"{name}_count")]
    whole = sa.select(*rolled).where(*of.rolled(rank_rollups), *chosen(r.rank, ranks, every))
    # Without a union the database reads in the order of the key, in two thirds of the time.
    c = (whole.union_all(sa.select(*single)) if of.gaps else whole).subquery().c
    if bucket == BLOCK and not of.gaps and together == 1:  # a bucket is one roll-up
        means = [over(sa.cast(c[f"{name}_sum"], sa.Double), c[f"{name}_count"]) for name in cells]
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
    """Rank, n, Σx, Σy, Σx² and Σxy over records with samples: x the load, y the time of computing.

    Args:
        connection: to read from.
        of: the range of steps.
        rows: which rows of ``worker_steps`` count,
        rolled: and which of ``rank_rollups``.
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


def chosen(column: sa.ColumnElement[int], ranks: Sequence[int] | None, every: int) -> _Where:
    """The condition for some ranks, or for each so many-th."""
    if ranks is not None:
        return [column.in_(ranks)]
    return [column % every == 0] if every > 1 else []


def _mean(total: sa.ColumnElement[Any], count: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return over(sa.cast(sa.func.sum(total), sa.Double), sa.func.sum(count))
