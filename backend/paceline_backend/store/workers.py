"""How each rank has been doing lately."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from paceline_backend.store.schema import worker_steps

Floats = npt.NDArray[np.float64]

_READ = (
    "step",
    "rank",
    "samples",
    "load",
    "compute_s",
    "ett_s",
    "data_s",
    "sync_s",
    "memory_bytes",
)


def summary(connection: sa.Connection, run: int, last: int) -> list[dict[str, Any]]:
    """Per rank, means over the run's last steps; `missing` counts over the whole run.

    `a`, `b` are the least-squares line of compute time over load (s per size unit, s), `c` is 0: it
    cannot be told from `a` and `b` where sizes do not vary.

    Args:
        connection: to read from.
        run: key of the run.
        last: over so many steps.
    """
    newest = connection.execute(
        sa.select(sa.func.max(worker_steps.c.step)).where(worker_steps.c.run == run)
    ).scalar()
    if newest is None:
        return []
    rows = connection.execute(
        sa.select(*(worker_steps.c[name] for name in _READ)).where(
            worker_steps.c.run == run, worker_steps.c.step > newest - last
        )
    ).all()
    # NULL (no ETT yet) becomes NaN.
    table = dict(zip(_READ, np.array(rows, dtype=np.float64).T, strict=True))
    table |= _against_others(table)
    missing = _missing(connection, run)
    ranks = sorted(missing)
    return [
        {"rank": rank, "missing": missing[rank], **_of_rank(table, table["rank"] == rank)}
        for rank in ranks
    ]


def fit(load: Floats, compute_s: Floats) -> tuple[float, float] | None:
    """Least squares of T on Λ: (a, b); None without two distinct loads."""
    if len(np.unique(load)) < 2:
        return None
    (a, b), *_ = np.linalg.lstsq(np.column_stack([load, np.ones_like(load)]), compute_s)
    return float(a), float(b)


def _against_others(table: dict[str, Floats]) -> dict[str, Floats]:
    """Of each row: its wait, its share of its step's load, and whether it was the slowest."""
    order, at = np.unique(table["step"], return_inverse=True)
    least = np.full(len(order), np.inf)
    np.minimum.at(least, at, table["sync_s"])
    slowest = np.zeros(len(order))
    np.maximum.at(slowest, at, table["compute_s"])
    total = np.bincount(at, weights=table["load"], minlength=len(order))
    return {
        "wait_s": table["sync_s"] - least[at],
        "share": np.divide(
            table["load"], total[at], out=np.zeros_like(total[at]), where=total[at] > 0
        ),
        "slowest": (table["compute_s"] >= slowest[at]).astype(np.float64),
        "ett_error": np.abs(table["ett_s"] - table["compute_s"])
        / np.where(table["compute_s"] > 0, table["compute_s"], np.nan),
    }


def _of_rank(table: dict[str, Floats], mine: npt.NDArray[np.bool_]) -> dict[str, Any]:
    busy = mine & (table["samples"] > 0)
    line = fit(table["load"][busy], table["compute_s"][busy])
    means = {
        name: _mean(table[name][mine])
        for name in ("samples", "load", "share", "compute_s", "ett_s", "data_s", "wait_s", "sync_s")
    }
    return {
        "steps": int(mine.sum()),
        **means,
        "memory_bytes": int(table["memory_bytes"][mine].max()) if mine.any() else None,
        "ett_error": _mean(table["ett_error"][mine]),
        "slowest_share": _mean(table["slowest"][mine]),
        "a": line[0] if line else None,
        "c": 0.0 if line else None,
        "b": line[1] if line else None,
        "last_step": int(table["step"][mine].max()) if mine.any() else None,
    }


def _mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _missing(connection: sa.Connection, run: int) -> dict[int, int]:
    """Gaps in each rank's sequence numbers: records that were sent but never arrived.

    Of an earlier attempt those rows are left that no later one trained again: from any seq on.
    """
    seq = worker_steps.c.seq
    rows = connection.execute(
        sa.select(
            worker_steps.c.attempt,
            worker_steps.c.rank,
            sa.func.min(seq),
            sa.func.max(seq),
            sa.func.count(),
        )
        .where(worker_steps.c.run == run)
        .group_by(worker_steps.c.attempt, worker_steps.c.rank)
    ).all()
    newest = max(row.attempt for row in rows)
    missing: dict[int, int] = {}
    for attempt, rank, first, last, count in rows:
        sent = last + 1 - (0 if attempt == newest else first)
        missing[rank] = missing.get(rank, 0) + sent - count
    return missing
