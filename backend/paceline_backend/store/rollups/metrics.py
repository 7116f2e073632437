"""Define the metrics of a step, and of a rank's step, as SQL expressions over stored rows."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from paceline_backend.store.schema import OPTIONAL_METRICS, step_rollups, steps, worker_steps

# Number of steps of a roll-up.
BLOCK = 100


def ratio(value: sa.ColumnElement[Any], by: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Divide `value` by `by`, one of which must be a double; NULL if `by` is 0.

    SQLAlchemy's own division would cast the divisor to a decimal number first, which is slow.
    """
    return value.op("/", precedence=8, return_type=sa.Double())(sa.func.nullif(by, 0))


_w = sa.cast(steps.c.workers, sa.Double)
_mean_square = ratio(steps.c.load_sum * steps.c.load_sum, _w)
_variance = ratio(steps.c.load_sq - _mean_square, _w - 1)

# Metrics of one step, defined in docs/glossary.md. For `dif`, a negative variance counts as 0,
# because rounding can make the variance of equal loads negative.
METRICS: dict[str, sa.ColumnElement[Any]] = {
    "step_s": steps.c.step_s,
    "compute_max": steps.c.compute_max,
    "compute_min": steps.c.compute_min,
    "compute_mean": ratio(steps.c.compute_sum, _w),
    "se": ratio((steps.c.compute_max - steps.c.compute_min) * _w, steps.c.compute_sum),
    "sp": steps.c.compute_max - steps.c.compute_min,
    "dif": sa.func.sqrt(sa.case((_variance < 0, 0.0), else_=_variance)),
    "waste": 1 - ratio(steps.c.compute_sum, _w * steps.c.compute_max),
    "ett_error": ratio(steps.c.ett_error_sum, steps.c.ett_count),
    "comm_s": steps.c.sync_min,
    "loss": steps.c.loss,
}

# Columns of a cell, that is, of one rank's step. Values that depend on all ranks are NULL until all
# ranks have reported the step.
CELLS: dict[str, sa.ColumnElement[Any]] = {
    "compute_s": worker_steps.c.compute_s,
    "ett_s": worker_steps.c.ett_s,
    "wait_s": worker_steps.c.sync_s - steps.c.sync_min,
    "samples": worker_steps.c.samples,
    "load": worker_steps.c.load,
    "share": ratio(worker_steps.c.load, steps.c.load_sum),
}
# Further columns of a rank's step, which roll-ups do not have.
MORE_CELLS: dict[str, sa.ColumnElement[Any]] = {
    name: worker_steps.c[name]
    for name in (
        *("data_s", "sync_s", "step_s", "loss", "memory_bytes", "squares", "longest"),
        *("recompiles", "ended_at", "epoch", "segment", "attempt"),
    )
}
of_same_step = (steps.c.run == worker_steps.c.run) & (steps.c.step == worker_steps.c.step)


def rolled_count(name: str) -> sa.ColumnElement[Any]:
    """Return the column that counts the steps of a roll-up that have a value of a metric.

    For a metric that each step has, return the constant `BLOCK` with the label of such a column.
    """
    if name in OPTIONAL_METRICS:
        return step_rollups.c[f"{name}_count"]
    return sa.literal_column(str(BLOCK), sa.Integer).label(f"{name}_count")


def named(values: dict[str, sa.ColumnElement[Any]]) -> list[sa.Label[Any]]:
    """Label the expressions with their names."""
    return [value.label(name) for name, value in values.items()]
