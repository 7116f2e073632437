"""An operator's target for a metric of a run, and when the run met it."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from paceline.wire import ENDED
from paceline_backend.store.attempts import AttemptSpan
from paceline_backend.store.database import Store
from paceline_backend.store.quality import evaluations
from paceline_backend.store.rollups.metrics import BLOCK, ratio
from paceline_backend.store.schema import runs, step_rollups, steps

# An ended run's result is cached only if its newest record was stored at least this many seconds
# ago. By then, all transactions with records of the run have been committed.
_SETTLE_S = 30.0
MEETS = {">=": operator.ge, "<=": operator.le}


def set_target(connection: sa.Connection, run: int, target: Mapping[str, Any] | None) -> None:
    """Set a run's target `{metric, value, direction}`, or remove it with None."""
    kept = None if target is None else dict(target)
    connection.execute(sa.update(runs).where(runs.c.key == run).values(target=kept))


def reached(
    store: Store,
    connection: sa.Connection,
    run: Mapping[str, Any],
    counting: Sequence[AttemptSpan],
) -> dict[str, Any] | None:
    """Return a run's target, when it was first met, and the best value; None without a target.

    The values come from evaluations of the metric. If there are none and the metric is the loss,
    they are means of the training loss over blocks of 100 steps. `run` has the columns of the
    run's row and the fields of `runs.HelloSummary`; `counting` comes from `store.attempts.spans`.
    """
    if run["target"] is None:
        return None
    target = {name: run["target"][name] for name in ("metric", "value", "direction")}
    wanted = target["metric"], target["value"], target["direction"]
    settled = _settled_at(connection, run)
    if settled is None:
        seen = _of_evaluations(connection, run["key"], counting, *wanted)
    else:
        seen = _of_settled(store, run["key"], settled, tuple(counting), *wanted)
    source = "evaluations" if seen.measured or target["metric"] != "loss" else "training"
    if source == "training":
        seen = _decided(_losses(connection, run, target), *wanted[1:])
    met = seen.met
    if met is not None:
        began = run["started_at"]
        met = {**met, "after_s": None if began is None else max(0.0, met["at"] - began)}
    best = {"best": seen.best, "best_step": seen.best_step}
    return {**target, "source": source, "met": met, **best}


@dataclass(frozen=True)
class _Found:
    """Result of comparing measurements with a target.

    `met` is the first measurement that meets the target, and `best_step` the step after which the
    best value was first measured.
    """

    measured: bool
    met: Mapping[str, Any] | None
    best: float | None
    best_step: int | None


def _settled_at(connection: sa.Connection, run: Mapping[str, Any]) -> float | None:
    """Return the time when an ended run's last record arrived; None if more records may arrive."""
    if run["state"] not in ENDED:
        return None
    query = sa.select(runs.c.seen_at).where(runs.c.key == run["key"])
    seen_at: float | None = connection.execute(query).scalar()
    return None if seen_at is None or seen_at > time.time() - _SETTLE_S else seen_at


@lru_cache(maxsize=1024)
def _of_settled(
    store: Store, run: int, seen_at: float, counting: tuple[AttemptSpan, ...], *wanted: Any
) -> _Found:
    """Return the result of `_of_evaluations`, cached until a new record changes `seen_at`."""
    with store.read() as connection:
        return _of_evaluations(connection, run, counting, *wanted)


def _of_evaluations(
    connection: sa.Connection,
    run: int,
    counting: Sequence[AttemptSpan],
    metric: str,
    value: float,
    direction: str,
) -> _Found:
    seen = evaluations.read(connection, run, counting, metric=metric)
    moments = [
        {name: getattr(each, name) for name in ("step", "epoch", "trained", "at")}
        | {"value": each.metrics[metric]}
        for each in seen
        if each.metrics[metric] is not None
    ]
    return replace(_decided(moments, value, direction), measured=bool(seen))


def _decided(moments: Sequence[Mapping[str, Any]], value: float, direction: str) -> _Found:
    meets = MEETS[direction]
    met = next((each for each in moments if meets(each["value"], value)), None)
    if not moments:
        return _Found(False, met, None, None)
    best = (max if direction == ">=" else min)(moments, key=itemgetter("value"))
    return _Found(True, met, best["value"], best["step"])


def _losses(
    connection: sa.Connection,
    run: Mapping[str, Any],
    target: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return the first block of steps whose mean loss meets a target, if any, and the best block.

    The best block has the lowest mean loss, or the highest if the direction is ">=".
    """
    c = step_rollups.c
    loss = ratio(c.loss_sum, c.loss_count)
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
        if run["steps_per_epoch"] is None:
            epoch, trained = _of_stream(connection, run, step)
        else:
            epoch, trained = _in_whole_epochs(run, step)
        moment = {"step": step, "epoch": epoch, "trained": trained, "at": row.ended_at}
        moments.append({**moment, "value": row.loss})
    return moments


def _of_stream(connection: sa.Connection, run: Mapping[str, Any], step: int) -> tuple[int, int]:
    """Return the epoch of a step of a stream, and the number of samples trained up to the step."""
    c = steps.c
    query = sa.select(c.epoch).where(c.run == run["key"], c.step <= step)
    epoch = connection.execute(query.order_by(c.step.desc()).limit(1)).scalar()
    return epoch or 0, (step + 1) * (run["global_batch"] or 1)


def _in_whole_epochs(run: Mapping[str, Any], step: int) -> tuple[int, int]:
    """Return the epoch of a step, and the number of samples trained up to and in the step."""
    batch, samples = run["global_batch"] or 1, run["samples"] or 0
    per_epoch = run["steps_per_epoch"]
    if run["token_budget"] is None:
        # Number of samples that an epoch trains on.
        samples = min(samples, per_epoch * batch)
    else:
        # Mean number of samples of a step.
        batch = round(samples / per_epoch)
    epoch, in_epoch = divmod(step, per_epoch)
    return epoch, epoch * samples + min((in_epoch + 1) * batch, samples)
