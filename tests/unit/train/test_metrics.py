"""Metrics of scripts: names and values are checked, and averaged as the loss is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from paceline.train.metrics import MetricNames
from paceline.train.plan_shard import LocalStep
from paceline.train.report import Reporter
from paceline.train.timing import CpuClock, RunningStep
from paceline.wire import MetricRecord, StepRecord
from paceline.wire.metrics import MOST_METRICS


def step(samples: int, load: float, **fields: Any) -> LocalStep:
    made = LocalStep(0, 3, 1, list(range(samples)), load, 0.0, 0.0, 0.5, None, 0)
    return replace(made, **fields)


class Kept:
    memory_bytes = 1

    def __init__(self) -> None:
        self.records: list[Any] = []

    def record(self, record: Any) -> None:
        self.records.append(record)


def reported(by_size: bool, *turns: tuple[LocalStep, dict[str, Any]]) -> list[Any]:
    """The records of some turns of a loop, each with its metrics."""
    kept: Any = Kept()
    reporter = Reporter(kept, 2, 1, by_size)
    for part, metrics in turns:
        running = RunningStep(part, CpuClock(), 0.0, None)
        if metrics:
            running.log(1.0, metrics)
        running.body_done()
        running.finish()
        reporter.accept(running)
    reporter.flush()
    return list(kept.records)


def test_a_step_without_further_metrics_sends_none() -> None:
    (record,) = reported(False, (step(4, 8.0), {}))
    assert isinstance(record, StepRecord)


def test_metrics_come_before_their_step_with_the_ranks_weight() -> None:
    logged = {"rate": 0.5, "norm": torch.tensor(2.0, requires_grad=True), "n": np.float32(1)}
    for by_size, weight in ((False, 4.0), (True, 8.0)):
        metrics, record = reported(by_size, (step(4, 8.0), logged))
        assert metrics == MetricRecord(2, 1, 3, weight, {"rate": 0.5, "norm": 2.0, "n": 1.0})
        assert isinstance(record, StepRecord)


def test_a_filler_has_no_metrics() -> None:
    (record,) = reported(False, (step(0, 0.0), {"rate": 0.5}))
    assert isinstance(record, StepRecord)


def test_micro_batches_are_averaged_by_their_weights() -> None:
    turns = ((step(1, 6.0, more=True), {"rate": 1.0}), (step(3, 2.0, micro_index=1), {"rate": 0.0}))
    for by_size, mean in ((False, 0.25), (True, 0.75)):
        metrics, record = reported(by_size, *turns)
        assert metrics.values == {"rate": mean}
        assert (metrics.weight, record.samples) == (8.0 if by_size else 4.0, 4)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"a b": 1.0}, r"session.log: 'a b' cannot name a metric: a name has 1 to 64 letters"),
        ({"": 1.0}, "cannot name a metric"),
        ({"1st": 1.0}, "begins with a letter"),
        ({"x" * 65: 1.0}, "cannot name a metric"),
        ({"rate": torch.zeros(3)}, r"session.log: rate has the shape \[3\]: give a number or a"),
        ({"rate": "high"}, "session.log: rate is 'high': give a number"),
        ({"rate": None}, "session.log: rate is None: give a number"),
        ({"rate": torch.tensor(1j)}, "session.log: rate is complex"),
    ],
)
def test_wrong_metrics_are_named(metrics: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        MetricNames("log").check(metrics)


def test_names_of_a_run_are_bounded() -> None:
    names = MetricNames("log")
    most = {f"m{k}": 1.0 for k in range(MOST_METRICS)}
    names.check(most)
    names.check(most)
    with pytest.raises(ValueError, match="z would exceed the limit: a run has"):
        names.check({"z": 1.0})
    names.check({"m3": 2.0})  # those that it has go on


def test_a_logged_tensor_may_change_afterwards() -> None:
    total = torch.tensor(1.0)
    running = RunningStep(step(4, 8.0), CpuClock(), 0.0, None)
    running.log(total, {"norm": total})
    total += 1
    running.body_done()
    assert (running.read()[2], running.metrics()) == (1.0, {"norm": 1.0})
