"""Sum up each epoch of a run: its steps, each worker's steps, and the data that moved to nodes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from paceline_backend.store import runs
from paceline_backend.store.details.samples import effective
from paceline_backend.store.rollups.metrics import METRICS, named
from paceline_backend.store.schema import data_epochs, step_rollups, steps, worker_steps

_MEANS = ("step_s", "se", "waste", "dif", "ett_error", "comm_s", "loss")


def epochs(connection: sa.Connection, run: int, limit: int) -> list[dict[str, Any]]:
    """Return sums and means over the complete steps of the newest `limit` epochs, oldest first."""
    s = steps.c
    metrics = {name: METRICS[name] for name in _MEANS}
    where = [s.run == run]
    if (first := _before(connection, run, limit)) is not None:
        where.append(s.step >= first)
    row = sa.select(s.epoch, s.step, s.samples, s.ended_at, *named(metrics)).where(*where)
    c = row.subquery().c
    query = sa.select(
        c.epoch,
        sa.func.min(c.step).label("first_step"),
        sa.func.max(c.step).label("last_step"),
        sa.func.count().label("steps"),
        sa.func.sum(c.samples).label("samples"),
        sa.func.sum(c.step_s).label("wall_s"),
        sa.func.min(c.ended_at).label("first_ended_at"),
        sa.func.max(c.ended_at).label("ended_at"),
        *(sa.func.avg(c[name]).label(name) for name in _MEANS),
    )
    newest = query.group_by(c.epoch).order_by(c.epoch.desc()).limit(limit)
    rows = [dict(each) for each in connection.execute(newest).mappings()]
    return [{**each, "samples": int(each["samples"])} for each in reversed(rows)]


def _before(connection: sa.Connection, run: int, limit: int) -> int | None:
    """Return a lower bound of the steps of the newest `limit` epochs; None if unknown.

    Each roll-up has the epoch of its first step. The function skips the newest `limit` epochs
    that have roll-ups, and returns the first step of the last roll-up before them. Later steps of
    this roll-up may belong to the next epoch.
    """
    r = step_rollups.c
    begun = sa.select(sa.func.max(r.step)).where(r.run == run).group_by(r.epoch)
    first = connection.execute(begun.order_by(r.epoch.desc()).offset(limit).limit(1)).scalar()
    return None if first is None else int(first)


Ints = npt.NDArray[np.int64]


def workers(connection: sa.Connection, run: int, epoch: int) -> list[dict[str, Any]]:
    """Return sums over an epoch's complete steps by rank; empty if it has no complete step."""
    rows = [dict(row) for row in connection.execute(_sums(run, epoch)).mappings()]
    if not rows:
        return []
    total = sum(row["load"] for row in rows)
    moves = _moves(connection, run, epoch, max(row["rank"] for row in rows) + 1)
    return [_worker(row, total) | moves.get(row["rank"], _UNKNOWN) for row in rows]


def _sums(run: int, epoch: int) -> sa.Select[Any]:
    w, s = worker_steps.c, steps.c
    waited = w.sync_s - s.sync_min
    expected = sa.case((w.ett_s.is_not(None), w.compute_s))
    slowest = sa.case((w.compute_s >= s.compute_max, 1), else_=0)
    sums = {
        "samples": w.samples,
        "load": w.load,
        "squares": w.squares,
        "compute_s": w.compute_s,
        "ett_s": w.ett_s,
        "expected_s": expected,
        "data_s": w.data_s,
        "wait_s": waited,
        "wall_s": w.step_s,
        "slowest_steps": slowest,
    }
    first, last = (
        sa.select(bound(s.step)).where(s.run == run, s.epoch == epoch).scalar_subquery()
        for bound in (sa.func.min, sa.func.max)
    )
    return (
        sa.select(
            w.rank,
            sa.func.count().label("steps"),
            *(sa.func.sum(value).label(name) for name, value in sums.items()),
        )
        .join(steps, (s.run == w.run) & (s.step == w.step))
        .where(
            w.run == run,
            # Restrict the range of the primary key; by the epoch alone, the database would read all
            # rows.
            w.step.between(first, last),
            s.epoch == epoch,
        )
        .group_by(w.rank)
        .order_by(w.rank)
    )


def _worker(row: dict[str, Any], total: float) -> dict[str, Any]:
    wall, expected = row["wall_s"], row["expected_s"]
    plain = ("rank", "steps", "compute_s", "ett_s", "data_s", "wait_s", "wall_s")
    return {
        **{name: row[name] for name in plain},
        "samples": int(row["samples"]),
        "load": row["load"],
        "share": row["load"] / total if total else 0.0,
        "dif": _dif(int(row["samples"]), row["load"], row["squares"]),
        "ett_error": abs(row["ett_s"] - expected) / expected if expected else None,
        "waste": row["wait_s"] / wall if wall else None,
        "slowest_share": int(row["slowest_steps"]) / row["steps"],
    }


def _dif(samples: int, load: float, squares: float) -> float | None:
    """Return the sample standard deviation of the sizes of a worker's samples."""
    if samples < 2 or not squares:
        return None
    return math.sqrt(max(0.0, squares - load * load / samples) / (samples - 1))


_UNKNOWN: dict[str, Any] = dict.fromkeys(("came", "came_load", "went", "went_load"))


def _moves(
    connection: sa.Connection, run: int, epoch: int, world: int
) -> dict[int, dict[str, Any]]:
    """Return, by rank, number and load of the samples that moved to or from the rank.

    A sample moves to a rank if another rank had it in the epoch before. The result is empty for
    the first epoch, for a stream, and if the assignment in the epoch before is unknown.
    """
    hello = runs.hello(connection, run)
    # All samples of a stream are new.
    if hello is None or hello.samples is None or epoch == 0:
        return {}
    samples = hello.samples
    before, now = (_owners(connection, run, each, samples) for each in (epoch - 1, epoch))
    moved = (before >= 0) & (now >= 0) & (before != now)
    if not np.any(before >= 0):
        return {}
    sizes = hello.sizes_array()
    world = max(world, int(before.max(initial=-1)) + 1, int(now.max(initial=-1)) + 1)
    sums = {}
    for name, owners in (("came", now[moved]), ("went", before[moved])):
        sums[name] = np.bincount(owners, minlength=world).tolist()
        sums[f"{name}_load"] = np.bincount(owners, sizes[moved], minlength=world).tolist()
    return {rank: {name: values[rank] for name, values in sums.items()} for rank in range(world)}


def _owners(connection: sa.Connection, run: int, epoch: int, samples: int) -> Ints:
    """Return the rank that each sample was assigned to in an epoch, [samples]; -1: none."""
    owners = np.full(samples, -1, np.int64)
    c = steps.c
    bounds = sa.select(sa.func.min(c.step), sa.func.max(c.step))
    first, last = connection.execute(bounds.where(c.run == run, c.epoch == epoch)).one()
    if first is None:
        return owners
    for _, plan, end in effective(connection, run, first, last):
        if plan.epoch != epoch:
            continue
        for step in plan.assignment.parts[: end - plan.first_step]:
            for rank, assigned in enumerate(step):
                owners[assigned] = rank
    return owners


def data_moved(connection: sa.Connection, run: int, limit: int) -> list[dict[str, Any]]:
    """Return how much data moved to each node in each epoch, and how long steps waited for data.

    There is one row for each attempt, epoch and node, with sums over the node's ranks. Only the
    newest `limit` rows are returned.
    """
    c, func = data_epochs.c, sa.func
    sums = (
        "planned_bytes",
        "moved_bytes",
        "moved",
        "moved_s",
        "read_bytes",
        "read",
        "waits",
        "waited_s",
        "held_bytes",
    )
    keys = (c.attempt, c.epoch, c.node)
    query = (
        sa.select(
            *keys,
            # Sum doubles, because a sum of integers may overflow.
            *(func.sum(sa.cast(c[name], sa.Double)).label(name) for name in sums),
            func.max(c.at).label("at"),
        )
        .where(c.run == run)
        .group_by(*keys)
        .order_by(*(key.desc() for key in keys))
        .limit(limit)
    )
    summed = reversed(connection.execute(query).mappings().all())
    whole = {name for name in sums if not name.endswith("_s")}
    return [
        {name: int(value) if name in whole else value for name, value in row.items()}
        for row in summed
    ]
