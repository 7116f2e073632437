"""Sum up each worker's steps in an epoch, and count the samples that moved between workers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from paceline_backend.store import runs
from paceline_backend.store.details.samples import effective
from paceline_backend.store.schema import steps, worker_steps

Ints = npt.NDArray[np.int64]


def workers(connection: sa.Connection, run: int, epoch: int) -> list[dict[str, Any]]:
    """Return sums over an epoch's complete steps by rank; empty if the run has none.

    `epoch` counts from 0.
    """
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
    """Return the sample standard deviation of the sizes of a worker's samples.

    Return None for fewer than two samples, and for ranks too old to report the sum of squares.
    """
    if samples < 2 or not squares:
        return None
    return math.sqrt(max(0.0, squares - load * load / samples) / (samples - 1))


_UNKNOWN: dict[str, Any] = dict.fromkeys(("came", "came_load", "went", "went_load"))


def _moves(
    connection: sa.Connection, run: int, epoch: int, world: int
) -> dict[int, dict[str, Any]]:
    """Count by rank the samples that another worker had in the epoch before; empty if unknown."""
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
    for _, segment, end in effective(connection, run, first, last):
        if segment.epoch != epoch:
            continue
        for step in segment.assignments()[: end - segment.first_step]:
            for rank, assigned in enumerate(step):
                owners[assigned] = rank
    return owners
