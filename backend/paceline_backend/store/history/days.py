"""Sum up the complete steps of each run, by day and by the policy version that planned them.

The worker process writes these sums from roll-ups, so that lists can sort runs by waste and reports
can add up days without reading steps. A roll-up of 100 steps belongs to the day in which its last
step ended. The sums of an active run are some seconds old.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from paceline_backend.store import attempts, segments
from paceline_backend.store.database import Store
from paceline_backend.store.reads import Range, bounds, within
from paceline_backend.store.rollups import reading as rollups
from paceline_backend.store.rollups.metrics import BLOCK, METRICS, named, rolled_count
from paceline_backend.store.schema import run_days, runs, step_rollups, steps, switches

DAY_S = 86_400.0
# Maximum time in seconds from the storing of a record until its transaction is committed.
_SETTLE_S = 30.0
# Minimum time in seconds between two computations of a run's sums.
_INTERVAL_S = 10.0
_SUMMED = ("step_s", "compute_max", "compute_mean", "se", "waste")
# Columns of `steps` that roll-ups lack. For a roll-up, the values of its first step are used.
_OF_RANKS = (steps.c.workers, segments.apart_in(steps).label("apart"))


def due(connection: sa.Connection, limit: int) -> list[int]:
    """Return the keys of runs whose sums may lack newer steps, runs with the oldest sums first.

    `runs.seen_at` is when the run's last message was stored, but this message's transaction may be
    committed later. So the sums of a run are recomputed until `_SETTLE_S` seconds after `seen_at`.
    """
    c = runs.c
    stale = c.summed_at < sa.func.coalesce(c.seen_at, c.created_at) + _SETTLE_S
    again = sa.and_(c.summed_at < time.time() - _INTERVAL_S, stale)
    known = (c.attempt.is_not(None), c.pruned_at.is_(None))
    query = sa.select(c.key).where(sa.or_(c.summed_at.is_(None), again), *known)
    query = query.order_by(sa.func.coalesce(c.summed_at, 0.0), c.key.desc()).limit(limit)
    return [int(key) for key in connection.scalars(query)]


def sum_up(store: Store, run: int) -> None:
    """Recompute the sums of a run."""
    # Read the clock before the steps, so that steps stored meanwhile are summed up the next time.
    at = time.time()
    with store.read() as connection:
        rows = [{"run": run, **row} for row in _sums(connection, run)]
    with store.write() as connection:
        # The update locks the row first, so that two workers write one after the other.
        kept = sa.update(runs).where(runs.c.key == run, runs.c.pruned_at.is_(None))
        if not connection.execute(kept.values(summed_at=at)).rowcount:
            return
        connection.execute(sa.delete(run_days).where(run_days.c.run == run))
        if rows:
            connection.execute(sa.insert(run_days), rows)


def _sums(connection: sa.Connection, run: int) -> list[dict[str, Any]]:
    ranges = _planned(connection, run)
    ends = [first - 1 for first, _ in ranges[1:]]
    return [
        {"version": version, **row}
        for (first, version), last in zip(ranges, [*ends, None], strict=True)
        for row in _sums_of(connection, run, (first, last))
    ]


def _planned(connection: sa.Connection, run: int) -> list[tuple[int, int]]:
    """Return (first step, policy version) of all ranges of steps that no restart discarded.

    The steps that an attempt repeats may have a later policy version than in the earlier attempt.
    """
    s = switches.c
    query = sa.select(s.version, s.effective_step).where(
        s.run == run, s.effective_step.is_not(None)
    )
    began = [tuple(row) for row in connection.execute(query.order_by(s.version))]
    attempt = connection.scalar(sa.select(runs.c.attempt).where(runs.c.key == run))
    if len(began) < 2:
        return [(0, began[0][0] if began else 0)]
    ranges: list[tuple[int, int]] = []
    for span in reversed(attempts.spans(connection, run, attempt)):
        at_first = segments.first_version(connection, run, span.attempt)
        later = [
            (step, version)
            for version, step in began
            if step > span.first and (span.end is None or step < span.end)
        ]
        for step, version in [(span.first, at_first), *later]:
            if not ranges or version > ranges[-1][1]:
                ranges.append((step, version))
    return [(0, ranges[0][1] if ranges else 0), *ranges[1:]]


def _sums_of(connection: sa.Connection, run: int, span: Range) -> list[dict[str, Any]]:
    """Sum up a range of steps by day, from roll-ups and from the steps that no roll-up covers."""
    first, last = bounds(connection, steps, run, span)
    covered = rollups.cover(connection, run, first, last)
    alone = [steps.c.run == run, *within(steps.c.step, span)]
    if covered is not None:
        alone = covered.single(steps)
    metrics = {name: METRICS[name] for name in _SUMMED}
    row = sa.select(steps.c.ended_at, *_OF_RANKS, *named(metrics)).where(*alone).subquery().c
    one_step: list[Any] = [row.ended_at, row.workers, row.apart]
    one_step.append(sa.literal_column("1").label("steps"))
    for name in _SUMMED:
        known = sa.case((row[name].is_not(None), 1), else_=0)
        one_step += [row[name].label(f"{name}_sum"), known.label(f"{name}_count")]
    parts: Any = sa.select(*one_step)
    if covered is not None:
        r = step_rollups.c
        block: list[Any] = [r.ended_at, *_OF_RANKS, sa.literal_column(str(BLOCK)).label("steps")]
        for name in _SUMMED:
            block += [r[f"{name}_sum"], rolled_count(name)]
        first_step = (steps.c.run == r.run) & (steps.c.step == r.step)
        rolled = sa.select(*block).select_from(step_rollups.join(steps, first_step))
        parts = rolled.where(*covered.rolled(step_rollups)).union_all(parts)
    return _by_day(connection, parts)


def _by_day(connection: sa.Connection, parts: Any) -> list[dict[str, Any]]:
    c = parts.subquery().c
    day = sa.cast(sa.func.floor(c.ended_at / DAY_S), sa.Integer)

    def total(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        return sa.func.coalesce(sa.cast(sa.func.sum(value), sa.Double), 0.0)

    waits = c.workers * (c.compute_max_sum - c.compute_mean_sum)
    waited = sa.case((c.apart, 0.0), (waits < 0, 0.0), else_=waits)
    query = sa.select(
        day.label("day"),
        sa.func.sum(c.steps).label("steps"),
        total(c.step_s_sum).label("step_s_sum"),
        total(c.workers * c.step_s_sum).label("worker_s"),
        total(waited).label("waited_s"),
        total(c.se_sum).label("se_sum"),
        sa.func.sum(c.se_count).label("se_count"),
        total(c.waste_sum).label("waste_sum"),
        sa.func.sum(c.waste_count).label("waste_count"),
    ).group_by(day)
    return [
        {name: int(v) if name in _WHOLE else float(v) for name, v in sums.items()}
        for sums in connection.execute(query).mappings()
    ]


_WHOLE = ("day", "steps", "se_count", "waste_count")


def of_runs(
    connection: sa.Connection,
    where: Sequence[sa.ColumnElement[bool]],
    first: int | None,
    last: int | None,
) -> list[dict[str, Any]]:
    """Return rows of `run_days`, each with columns of its run, such as name, policy and device.

    `where` comes from `RunFilter.conditions`. `first` and `last` are days since 1970-01-01 UTC.
    """
    d, c = run_days.c, runs.c
    # If a version has no row in `switches`, use the policy that was requested last.
    policy = sa.func.coalesce(switches.c.policy, c.policy).label("policy")
    of_run = (c.key, c.id, c.name, policy, c.device, c.backend, c.node)
    sums = [column for column in d if column.name != "run"]
    query = sa.select(*of_run, *sums).join(runs, c.key == d.run)
    of_version = sa.and_(switches.c.run == d.run, switches.c.version == d.version)
    query = query.outerjoin(switches, of_version)
    query = query.where(c.pruned_at.is_(None), *where)
    if first is not None:
        query = query.where(d.day >= first)
    if last is not None:
        query = query.where(d.day <= last)
    rows = connection.execute(query.order_by(d.day, c.key, d.version)).mappings()
    return [{str(name): value for name, value in row.items()} for row in rows]


def spent(connection: sa.Connection, run: int, span: Range) -> tuple[float, float]:
    """Return a pair: the time of a range of steps, and the time that ranks waited in these steps.

    Both are in seconds, summed over all ranks.
    """
    rows = _sums_of(connection, run, span)
    return sum(row["worker_s"] for row in rows), sum(row["waited_s"] for row in rows)


def figures(connection: sa.Connection, keys: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the `means` of runs by their keys, without runs that have no steps."""
    d = run_days.c
    names = [name for name in d.keys() if name not in ("run", "day", "version")]  # noqa: SIM118
    sums = [sa.func.sum(d[name]).label(name) for name in names]
    query = sa.select(d.run, *sums).where(d.run.in_(keys)).group_by(d.run)
    return {row["run"]: means(row) for row in connection.execute(query).mappings()}


def means(sums: Any) -> dict[str, Any]:
    """Compute totals and means from sums that are named like the columns of `run_days`."""
    steps_done = int(sums["steps"])

    def mean(name: str, count: int) -> float | None:
        return float(sums[f"{name}_sum"]) / count if count else None

    return {
        "steps": steps_done,
        "wall_s": float(sums["step_s_sum"]),
        "worker_s": float(sums["worker_s"]),
        "waited_s": float(sums["waited_s"]),
        "step_s": mean("step_s", steps_done),
        "se": mean("se", int(sums["se_count"])),
        "waste": mean("waste", int(sums["waste_count"])),
    }
