"""Time of ranks, and what they wait of it, added up as steps complete.

The sums are by run, node, day and price: `store.fleet.costs` turns them into money when it is
asked, with the price that held at each span's begin. So a price that is put right later counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from paceline_backend.store import attempts as all_attempts
from paceline_backend.store import nodes, segments
from paceline_backend.store.database import insert
from paceline_backend.store.fleet.tables import node_prices, run_progress, waiting_days
from paceline_backend.store.rollups.metrics import of_same_step, over
from paceline_backend.store.schema import attempts, runs, steps, worker_steps

DAY_S = 86_400.0
MOST_STEPS = 20_000  # one transaction counts no more steps,
_MOST_ROWS = 200_000  # and reads no more rows of ranks that are on several nodes
_TIMES = ("worker_s", "waited_s", "node_s", "node_waited_s")
_LATE_STEPS = 20  # the newest steps of a run that trains may still be reported again


def count(connection: sa.Connection, run: int, *, ended: bool) -> bool:
    """Counts steps of a run that are not counted yet.

    A step that is trained again after a restart counts again, because its time was spent again. It
    counts once the new attempt has trained it.

    Args:
        connection: to write with.
        run: key of the run.
        ended: whether it has ended, so that all of its steps count.

    Returns:
        Whether there may be more steps to count.
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
    end = _reach(connection, run, counted, last, _most_steps(connection, run))
    if end > counted:
        _add(connection, public, spans_of(connection, run, counted + 1, end))
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


def _most_steps(connection: sa.Connection, run: int) -> int:
    """How many steps one transaction counts."""
    several = sa.select(runs.c.world).where(runs.c.key == run, runs.c.nodes_max > 1)
    world = connection.execute(several).scalar()
    return max(1, min(MOST_STEPS, _MOST_ROWS // (world or 1)))


def _reach(connection: sa.Connection, run: int, counted: int, last: int, most: int) -> int:
    """The last step of one transaction. Numbers of steps may be far apart, so rows are counted."""
    c = steps.c
    between = (c.run == run, c.step > counted, c.step <= last)
    query = sa.select(c.step).where(*between).order_by(c.step).offset(most - 1).limit(1)
    step = connection.execute(query).scalar()
    return last if step is None else int(step)


def spans_of(connection: sa.Connection, run: int, first: int, last: int) -> list[dict[str, Any]]:
    """Rows of `waiting_days`, without the run, over a range of its complete steps.

    Args:
        connection: to read from.
        run: key of the run.
        first: step,
        last: and the last one, which counts, too.
    """
    rows: list[dict[str, Any]] = []
    for begin, end, placement in all_attempts.placed(connection, run, first, last):
        names = sorted(set(placement)) or [_only_node(connection, run)]
        types = nodes.types(connection, names)
        if len(names) == 1:
            rows += _of_one_node(connection, run, begin, end, names[0], types[names[0]])
            continue
        for node_type in sorted(set(types.values())):
            ranks = [rank for rank, node in enumerate(placement) if types[node] == node_type]
            rows += _of_ranks(connection, run, begin, end, placement, node_type, ranks)
    return rows


def _only_node(connection: sa.Connection, run: int) -> str:
    """The node of a run that has one alone and whose ranks do not say where they are."""
    c = runs.c
    query = sa.select(c.node).where(c.key == run, c.nodes_max == 1)
    return connection.execute(query).scalar() or ""


def _of_one_node(
    connection: sa.Connection, run: int, first: int, last: int, node: str, node_type: str
) -> list[dict[str, Any]]:
    """Rows of steps whose ranks are all on one node."""
    c = steps.c
    waits = c.workers * c.compute_max - c.compute_sum
    waited = sa.case((_apart(connection, run, first, last), 0.0), (waits < 0, 0.0), else_=waits)
    step = (
        sa.select(
            _since(node_type).label("since"),
            (c.workers * c.step_s).label("worker_s"),
            waited.label("waited_s"),
            c.step_s.label("node_s"),
            over(waited, c.workers).label("node_waited_s"),
        )
        .where(c.run == run, c.step.between(first, last))
        .subquery()
        .c
    )
    sums = [sa.func.sum(step[name]).label(name) for name in _TIMES]
    query = sa.select(step.since, sa.func.count().label("steps"), *sums).group_by(step.since)
    return [_span(row, node, node_type) for row in connection.execute(query).mappings()]


def _of_ranks(
    connection: sa.Connection,
    run: int,
    first: int,
    last: int,
    placement: Sequence[str],
    node_type: str,
    ranks: Sequence[int],
) -> list[dict[str, Any]]:
    """Rows of the nodes of one type, which have these ranks."""
    c, w = steps.c, worker_steps.c
    waits = c.compute_max - w.compute_s
    waited = sa.case((_apart(connection, run, first, last), 0.0), (waits < 0, 0.0), else_=waits)
    world = len(placement)
    # An earlier attempt's steps may have ranks that this smaller world does not have.
    of_rank = w.rank.in_(ranks) if len(ranks) < world else w.rank < world
    step = (
        sa.select(
            _since(node_type).label("since"),
            w.rank,
            w.step_s.label("worker_s"),
            waited.label("waited_s"),
        )
        .select_from(steps.join(worker_steps, of_same_step))
        .where(c.run == run, c.step.between(first, last), of_rank)
        .subquery()
        .c
    )
    sums = [sa.func.sum(step[name]).label(name) for name in ("worker_s", "waited_s")]
    query = sa.select(step.since, step.rank, sa.func.count().label("steps"), *sums)
    there = Counter(placement)
    spans: dict[tuple[str, float], dict[str, Any]] = {}
    for row in connection.execute(query.group_by(step.since, step.rank)):
        node = placement[row.rank]
        empty = {"since": row.since, "steps": row.steps, **dict.fromkeys(_TIMES, 0.0)}
        span = spans.setdefault((node, row.since), empty)
        span["worker_s"] += row.worker_s
        span["waited_s"] += row.waited_s
        span["node_s"] += row.worker_s / there[node]
        span["node_waited_s"] += row.waited_s / there[node]
    return [_span(span, node, node_type) for (node, _), span in spans.items()]


def _span(sums: Mapping[Any, Any], node: str, node_type: str) -> dict[str, Any]:
    return {"day": int(sums["since"] // DAY_S), "node": node, "type": node_type, **sums}


def _since(node_type: str) -> sa.ColumnElement[Any]:
    """Where the span of a step begins: its day, or the price of a type that holds at its end."""
    c, p = steps.c, node_prices.c
    day = sa.func.floor(c.ended_at / DAY_S) * DAY_S
    priced = (
        sa.select(sa.func.max(p.since))
        .where(p.type == node_type, p.since <= c.ended_at)
        .correlate(steps)
        .scalar_subquery()
    )
    return sa.case((priced > day, priced), else_=day)


def _apart(connection: sa.Connection, run: int, first: int, last: int) -> sa.ColumnElement[bool]:
    """Whether nobody waits in a step for the slowest rank: the synchroniser is relaxed."""
    spans = _merged(segments.apart(connection, run, first, last))
    return sa.or_(sa.false(), *(steps.c.step.between(begin, stop - 1) for begin, stop in spans))


def _merged(spans: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, stop in sorted((begin, stop) for _, begin, stop in spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((begin, stop))
    return merged


def _add(connection: sa.Connection, run: str, spans: Iterable[Mapping[str, Any]]) -> None:
    rows = [{**span, "run": run} for span in spans]
    if not rows:
        return
    c, keys = waiting_days.c, ("day", "run", "node", "type", "since")
    added = insert(connection, waiting_days)
    sums_of = {name: c[name] + added.excluded[name] for name in ("steps", *_TIMES)}
    connection.execute(added.on_conflict_do_update(index_elements=keys, set_=sums_of), rows)
