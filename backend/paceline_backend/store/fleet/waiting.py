"""Time of ranks, and what they wait of it: added up by run and day as steps complete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from paceline_backend.store import attempts as all_attempts
from paceline_backend.store import segments
from paceline_backend.store.database import insert
from paceline_backend.store.fleet.tables import run_progress, waiting_days
from paceline_backend.store.history import labels
from paceline_backend.store.schema import attempts, audit, runs, steps

DAY_S = 86_400.0
MOST_STEPS = 20_000  # that one transaction counts
_LATE_STEPS = 20  # the newest steps of a run that trains may still be reported again


def count(connection: sa.Connection, run: int, *, ended: bool) -> bool:
    """Counts steps of a run that are not counted yet; False: there are no more for now.

    A step that is trained again after a restart counts again, as its time was spent again: once
    the new attempt has trained it, not before.

    Args:
        connection: to write with.
        run: key of the run.
        ended: whether it has ended, so that all of its steps count.
    """
    state = _state(connection, run)
    if state is None:
        return False
    public, attempt, counted, seen_attempt = state
    if attempt != seen_attempt:
        first = _first_step(connection, run, attempt)
        counted = counted if first is None else min(counted, first - 1)
        attempt = seen_attempt if first is None and counted >= 0 else attempt
    last = _newest(connection, run) - (0 if ended else _LATE_STEPS)
    end = _reach(connection, run, counted, last)
    if end > counted:
        _add(connection, public, _sums(connection, run, counted + 1, end))
    done = ended and end >= last
    values = {"counted": max(end, counted), "counted_attempt": attempt, "done": done}
    mine = run_progress.c.run == run
    connection.execute(sa.update(run_progress).where(mine).values(**values))
    return bool(end < last)


def _state(connection: sa.Connection, run: int) -> Any:
    """Public id, attempt, last counted step and its attempt; adds the row if there is none."""
    p, c = run_progress.c, runs.c
    at = {"attempt": -1, "step": -1, "step_at": 0.0, "lost": 0, "counted": -1, "done": False}
    rows = insert(connection, run_progress).values(run=run, counted_attempt=-1, **at)
    connection.execute(rows.on_conflict_do_nothing())
    attempt = sa.func.coalesce(c.attempt, 0)
    query = sa.select(c.id, attempt, p.counted, p.counted_attempt).join(
        run_progress, p.run == c.key
    )
    return connection.execute(
        query.where(c.key == run).with_for_update(of=run_progress)
    ).one_or_none()


def _first_step(connection: sa.Connection, run: int, attempt: int) -> int | None:
    """Where an attempt began; None: it has not begun yet."""
    c = attempts.c
    query = sa.select(c.step).where(c.run == run, c.attempt == attempt)
    step = connection.execute(query).scalar()
    return None if step is None else int(step)


def _newest(connection: sa.Connection, run: int) -> int:
    """The newest complete step that counts: none that a later attempt has undone. -1: none."""
    attempt = connection.execute(sa.select(runs.c.attempt).where(runs.c.key == run)).scalar()
    spans = all_attempts.spans(connection, run, attempt)
    last = all_attempts.newest_complete(connection, run, spans)
    return -1 if last is None else int(last.step)


def _reach(connection: sa.Connection, run: int, counted: int, last: int) -> int:
    """The last step of one transaction. Numbers of steps may be far apart, so rows are counted."""
    c = steps.c
    between = (c.run == run, c.step > counted, c.step <= last)
    query = sa.select(c.step).where(*between).order_by(c.step).offset(MOST_STEPS - 1).limit(1)
    step = connection.execute(query).scalar()
    return last if step is None else int(step)


def _sums(connection: sa.Connection, run: int, first: int, last: int) -> list[tuple[Any, ...]]:
    """Day, steps, time of the ranks and what they waited, of a range of steps."""
    # Under a relaxed synchroniser nobody waits for the slowest rank.
    apart = [
        steps.c.step.between(begin, stop - 1)
        for begin, stop in _merged(segments.apart(connection, run, first, last))
    ]
    waits = steps.c.workers * steps.c.compute_max - steps.c.compute_sum
    waited = sa.case(
        (sa.or_(sa.false(), *apart), 0.0), else_=sa.case((waits < 0, 0.0), else_=waits)
    )
    day = sa.cast(sa.func.floor(steps.c.ended_at / DAY_S), sa.Integer)
    query = sa.select(
        day, sa.func.count(), sa.func.sum(steps.c.workers * steps.c.step_s), sa.func.sum(waited)
    ).where(steps.c.run == run, steps.c.step.between(first, last))
    return [tuple(row) for row in connection.execute(query.group_by(day))]


def _merged(spans: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, stop in sorted((begin, stop) for _, begin, stop in spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((begin, stop))
    return merged


def _add(connection: sa.Connection, run: str, sums: Iterable[tuple[Any, ...]]) -> None:
    names = ("day", "steps", "worker_s", "waited_s")
    rows = [dict(zip(names, row, strict=True)) | {"run": run} for row in sums]
    if not rows:
        return
    c = waiting_days.c
    added = insert(connection, waiting_days)
    sums_of = {name: c[name] + added.excluded[name] for name in names[1:]}
    connection.execute(
        added.on_conflict_do_update(index_elements=["day", "run"], set_=sums_of), rows
    )


def days(connection: sa.Connection, first: int, last: int) -> list[dict[str, Any]]:
    """Of a range of days, what each run's ranks spent and waited.

    Each row has the run's `name`, its `owner` (who started it; None: nobody knows) and its `tags`.
    A run that was pruned has neither name nor tags.
    """
    c, a = waiting_days.c, audit.c
    owners = sa.select(a.run, sa.func.min(a.who).label("owner"))
    shown = sa.select(c.run).where(c.day.between(first, last))
    of = owners.where(a.action == "run.create", a.run.in_(shown)).group_by(a.run).subquery()
    query = (
        sa.select(
            c.day, c.run, c.steps, c.worker_s, c.waited_s, runs.c.name, runs.c.key, of.c.owner
        )
        .outerjoin(of, of.c.run == c.run)
        .outerjoin(runs, runs.c.id == c.run)
        .where(c.day.between(first, last))
        .order_by(c.day, c.run)
    )
    rows = [dict(row) for row in connection.execute(query).mappings()]
    tags = labels.tags(connection, sorted({row["key"] for row in rows} - {None}))
    return [{**row, "tags": tags[row["key"]]} for row in rows]


def of_runs(connection: sa.Connection, names: Iterable[str]) -> dict[str, tuple[float, float]]:
    """The time of the ranks of some runs so far, and what they waited of it, in seconds."""
    c = waiting_days.c
    query = sa.select(c.run, sa.func.sum(c.worker_s), sa.func.sum(c.waited_s))
    rows = connection.execute(query.where(c.run.in_(list(names))).group_by(c.run))
    return {run: (worker_s, waited_s) for run, worker_s, waited_s in rows}
