"""Summary of each rank's newest steps, for REST, the HTML report and monitoring."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.cost import SUM
from paceline.planning.feedback import without_recompiles
from paceline.policies import Feedback, Models, Predictor
from paceline.policies.predict.estimators import EstimatorPredictor
from paceline.policies.predict.linear import LinearPredictor
from paceline_backend.store import Connection, attempts, records

Floats = npt.NDArray[np.float64]

# Maximum number of rows that are read.
_MOST_WORKER_ROWS = 100_000
# Number of newest steps that are read even if they have more rows than `_MOST_WORKER_ROWS`.
_FEWEST_READ = 8  # steps

_READ = (
    "samples",
    "load",
    "compute_s",
    "ett_s",
    "data_s",
    "sync_s",
    "memory_bytes",
    "squares",
    "longest",
    "recompiles",
)


def summary(
    connection: Connection, run: int, last: int, predictor: Predictor | None
) -> list[dict[str, Any]]:
    """Return means over the run's `last` newest steps, for each rank with records in these steps.

    For thousands of ranks, fewer steps are read. `missing` counts steps that a rank did but whose
    records were lost. `a`, `c` and `b` are the rank's model, which `predictor` fits to these steps;
    they are None if `predictor` is None or there are too few steps. `device` comes from the latest
    attempt; None: unknown.
    """
    read = records.newest(
        connection, run, _READ, count=last, most_rows=_MOST_WORKER_ROWS, fewest=_FEWEST_READ
    )
    if not len(read.table):
        return []
    table = dict(zip(("step", "rank", *_READ), read.table.T, strict=True))
    table |= _against_others(table)
    ranks, at = np.unique(table["rank"].astype(np.int64), return_inverse=True)
    columns = {"rank": ranks.tolist(), **_by_rank(table, at, len(ranks))}
    # An earlier attempt may have had more ranks.
    world = max(read.world or 0, int(ranks[-1]) + 1)
    columns |= _fitted(table, ranks, world, predictor)
    devices = attempts.devices(connection, run)
    columns["device"] = [devices[r] if r < len(devices) else None for r in columns["rank"]]
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _fitted(
    table: dict[str, Floats], ranks: npt.NDArray[np.int64], world: int, predictor: Predictor | None
) -> dict[str, list[Any]]:
    """Return the predictor's `a`, `c` and `b` of each of `ranks`; None where they are unknown.

    The models are fitted again for each request, and scikit-learn's regressors take milliseconds
    per rank, so the linear predictor replaces them here.
    """
    models = Models.unknown(0)
    if isinstance(predictor, EstimatorPredictor):
        predictor = LinearPredictor(predictor.window, "sum" if predictor.cost == SUM else "auto")
    if predictor is not None:
        models = predictor.fit(_feedback(table, world), world)
    unknown = [None] * len(ranks)
    return {
        name: getattr(models, name)[ranks].tolist() if models.known else unknown
        for name in ("a", "c", "b")
    }


def _feedback(table: dict[str, Floats], world: int) -> Feedback:
    _, at, count = np.unique(table["step"], return_inverse=True, return_counts=True)
    whole = count[at] == world
    return Feedback(
        table["step"][whole].astype(np.int64),
        table["rank"][whole].astype(np.int64),
        table["samples"][whole].astype(np.int64),
        table["load"][whole],
        without_recompiles(table["compute_s"][whole], table["recompiles"][whole], world),
        table["squares"][whole],
        table["longest"][whole],
    )


def _against_others(table: dict[str, Floats]) -> dict[str, Floats]:
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


def _by_rank(
    table: dict[str, Floats], at: npt.NDArray[np.int64], count: int
) -> dict[str, list[Any]]:
    """Return each rank's means over its rows; `at` has the index of the rank for each row."""
    steps = np.bincount(at, minlength=count)
    last = np.full(count, -1.0)
    np.maximum.at(last, at, table["step"])
    memory = np.zeros(count)
    np.maximum.at(memory, at, table["memory_bytes"])
    # Number of steps, up to the rank's last step, whose records were lost.
    missing = last - table["step"].min() + 1 - steps
    means = ("samples", "load", "share", "compute_s", "ett_s", "data_s", "wait_s", "sync_s")
    return {
        "steps": steps.tolist(),
        "missing": missing.astype(np.int64).tolist(),
        **{name: _means(table[name], at, count) for name in means},
        "memory_bytes": memory.astype(np.int64).tolist(),
        "ett_error": _means(table["ett_error"], at, count),
        "slowest_share": _means(table["slowest"], at, count),
        "recompiles": np.bincount(at, table["recompiles"], count).astype(np.int64).tolist(),
        "last_step": last.astype(np.int64).tolist(),
    }


def _means(values: Floats, at: npt.NDArray[np.int64], count: int) -> list[float | None]:
    known = ~np.isnan(values)
    total = np.bincount(at[known], weights=values[known], minlength=count)
    rows = np.bincount(at[known], minlength=count)
    return [t / n if n else None for t, n in zip(total.tolist(), rows.tolist(), strict=True)]
