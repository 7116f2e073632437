"""Metrics that scripts report: of training, step by step, and of evaluations."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import msgspec

MOST_METRICS = 32  # names of a run: of its training, and as many of its evaluations

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,63}")


class MetricRecord(msgspec.Struct, frozen=True, array_like=True):
    """One rank's training metrics of one step. A script that logs only a loss sends none."""

    attempt: int  # how often all ranks were started before
    rank: int
    step: int  # as `StepRecord.step`
    weight: float  # of this rank in the global batch: its samples or its load, as for the loss
    values: dict[str, float]  # by name; means over the rank's batch


class MetricBatch(msgspec.Struct, frozen=True, tag="metrics"):
    """What one rank's telemetry thread flushes at once."""

    records: list[MetricRecord]


class Evaluation(msgspec.Struct, frozen=True, tag="evaluation"):
    """What a rank measured on held-out data. Sent once for each call of the script."""

    attempt: int
    rank: int
    step: int  # the last one before it; -1: none
    epoch: int  # of that step
    trained: int  # samples that the run had trained on by then, over all ranks
    at: float  # Unix time
    samples: int | None  # that the values are means over; None: rank 0's values count alone
    values: dict[str, float]  # by name; NaN or infinite if the script measured that


def of_names(names: Iterable[str]) -> str | None:
    """What is wrong with names of metrics; None: nothing is."""
    for name in names:
        if _NAME.fullmatch(name) is None:
            return (
                f"{name[:100]!a} cannot name a metric: a name has 1 to 64 letters, digits and "
                "_ . / -, and begins with a letter or _"
            )
    return None


def of_metrics(record: MetricRecord) -> str | None:
    """What is wrong with the values of a record; None: nothing is."""
    if not 0 <= record.weight < math.inf:
        return f"weight is {record.weight}, not a finite number of at least 0"
    return _of_count(record.values) or of_names(record.values)


def of_evaluation(message: Evaluation) -> str | None:
    """What is wrong with the values of an evaluation; None: nothing is."""
    if not message.values:
        return "values are empty"
    return _of_count(message.values) or of_names(message.values)


def _of_count(values: dict[str, float]) -> str | None:
    if len(values) > MOST_METRICS:
        return f"values are {len(values)}: at most {MOST_METRICS} metrics"
    return None
