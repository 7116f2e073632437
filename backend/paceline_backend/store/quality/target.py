"""What an operator wants of a run's model, and when the run met it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.attempts import Span
from paceline_backend.store.quality import evaluations
from paceline_backend.store.rollups.metrics import over
from paceline_backend.store.rollups.tables import BLOCK, step_rollups
from paceline_backend.store.schema import runs, steps

MEETS = {">=": operator.ge, "<=": operator.le}


def set_target(connection: sa.Connection, run: int, target: Mapping[str, Any] | None) -> None:
    """Keeps a run's target in place of the one before.

    Args:
        connection: to write with.
        run: key of the run.
        target: `{metric, value, direction}`; None: none.
    """
    kept = None if target is None else dict(target)
    connection.execute(sa.update(runs).where(runs.c.key == run).values(target=kept))


def reached(
    connection: sa.Connection,
    run: Mapping[str, Any],
    counting: Sequence[Span],
    per_epoch: int | None,
) -> dict[str, Any] | None:
    """A run's target, with when it was first met, and the best value so far. None: it has none.

    Evaluations of the metric decide. If there are none and the metric is the loss, the training
    loss does: its means over blocks of 100 steps.

    Args:
        connection: to read from.
        run: its row.
        counting: which of its steps count; `store.attempts.spans`.
        per_epoch: steps of a whole epoch; None: not known.
    """
    if run["target"] is None:
        return None
    target = {name: run["target"][name] for name in ("metric", "value", "direction")}
    seen = evaluations.read(connection, run["key"], counting, metric=target["metric"])
    moments: list[dict[str, Any]] = [
        {name: getattr(each, name) for name in ("step", "epoch", "trained", "at")}
        | {"value": each.metrics[target["metric"]]}
        for each in seen
        if each.metrics[target["metric"]] is not None
    ]
    source = "evaluations" if seen or target["metric"] != "loss" else "training"
    if source == "training":
        moments = _losses(connection, run, target, per_epoch)
    meets = MEETS[target["direction"]]
    met = next((each for each in moments if meets(each["value"], target["value"])), None)
    values: list[float] = [each["value"] for each in moments]
    best = (max if target["direction"] == ">=" else min)(values) if values else None
    if met is not None:
        began = run["started_at"]
        met = {**met, "after_s": None if began is None else max(0.0, met["at"] - began)}
    return {**target, "source": source, "met": met, "best": best}


def _losses(
    connection: sa.Connection,
    run: Mapping[str, Any],
    target: Mapping[str, Any],
    per_epoch: int | None,
) -> list[dict[str, Any]]:
    """The first block of steps whose mean loss meets a target, and the best one."""
    c = step_rollups.c
    loss = over(c.loss_sum, c.loss_count)
    query = sa.select(c.step, c.ended_at, loss.label("loss"))
    query = query.where(c.run == run["key"], c.loss_count > 0, c.loss_sum.is_not(None))
    rising = target["direction"] == ">="
    meets = loss >= target["value"] if rising else loss <= target["value"]
    first = query.where(meets).order_by(c.step).limit(1)
    best = query.order_by(loss.desc() if rising else loss).limit(1)
    rows = [*connection.execute(first), *connection.execute(best)]
    moments = []
    for row in rows:
        step = row.step + BLOCK - 1
        if per_epoch is None:
            epoch, trained = _of_stream(connection, run, step)
        else:
            epoch, trained = _in_whole_epochs(run, step, per_epoch)
        moment = {"step": step, "epoch": epoch, "trained": trained, "at": row.ended_at}
        moments.append({**moment, "value": row.loss})
    return moments


def _of_stream(connection: sa.Connection, run: Mapping[str, Any], step: int) -> tuple[int, int]:
    """As `_in_whole_epochs`, where nobody knows how long an epoch is before it is over."""
    c = steps.c
    query = sa.select(c.epoch).where(c.run == run["key"], c.step <= step)
    epoch = connection.execute(query.order_by(c.step.desc()).limit(1)).scalar()
    return epoch or 0, (step + 1) * (run["global_batch"] or 1)


def _in_whole_epochs(run: Mapping[str, Any], step: int, per_epoch: int) -> tuple[int, int]:
    """A step's epoch, and the samples that a run has trained on after it."""
    batch = run["global_batch"] or 1
    samples = min(run["samples"] or 0, per_epoch * batch)  # that an epoch trains on
    epoch, in_epoch = divmod(step, per_epoch)
    return epoch, epoch * samples + min((in_epoch + 1) * batch, samples)
