"""Metrics that scripts report: of training, step by step, and of evaluations."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import msgspec

# Maximum number of metric names in a run's training metrics, and in a run's evaluations.
MOST_METRICS = 32

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,63}")


class MetricRecord(msgspec.Struct, frozen=True, array_like=True):
    """One rank's training metrics of one step; not sent for a script that logs only a loss."""

    # Number of times that all ranks were started before.
    attempt: int
    rank: int
    # The same step as `StepRecord.step`.
    step: int
    # Weight of this rank in means over ranks: its samples or its load, as for the loss.
    weight: float
    # Means over the rank's batch, by metric name.
    values: dict[str, float]


class MetricBatch(msgspec.Struct, frozen=True, tag="metrics"):
    """Metric records that one rank's telemetry thread sends together."""

    records: list[MetricRecord]


class Evaluation(msgspec.Struct, frozen=True, tag="evaluation"):
    """A rank's measurements on held-out data, sent each time that the script reports them."""

    attempt: int
    rank: int
    # The last step before the evaluation; -1: there was no step yet.
    step: int
    epoch: int
    # Number of samples that the run had trained on by then, over all ranks.
    trained: int
    at: float  # Unix time
    # Number of samples over which the values are means; None: only rank 0's values count.
    samples: int | None
    # Values by metric name. NaN and infinite values are allowed.
    values: dict[str, float]


def of_names(names: Iterable[str]) -> str | None:
    """Return the first defect in names of metrics; None if there is none."""
    for name in names:
        if _NAME.fullmatch(name) is None:
            return (
                f"{name[:100]!a} cannot name a metric: a name has 1 to 64 letters, digits and "
                "_ . / -, and begins with a letter or _"
            )
    return None


def of_metrics(record: MetricRecord) -> str | None:
    """Return the first defect in the values of a record; None if there is none."""
    if not 0 <= record.weight < math.inf:
        return f"weight is {record.weight}, not a finite number of at least 0"
    return _of_count(record.values) or of_names(record.values)


def of_evaluation(message: Evaluation) -> str | None:
    """Return the first defect in the values of an evaluation; None if there is none."""
    if not message.values:
        return "values is empty"
    return _of_count(message.values) or of_names(message.values)


def _of_count(values: dict[str, float]) -> str | None:
    if len(values) > MOST_METRICS:
        return f"values has {len(values)} metrics: give at most {MOST_METRICS}"
    return None
