"""Reports of epochs: what was measured, and what equal batches would have taken."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import policies
from paceline.core.epoch_report import EpochReport
from paceline.planning.epochs import Epochs
from paceline.planning.feedback import Window
from paceline.planning.history import History
from paceline.planning.planner import Planner
from paceline.policies.base import Floats
from paceline.wire import Hello, Plan, StepRecord
from support.records import hello

WORLD, SAMPLES, BATCH, STEP_S = 3, 600, 24, 0.004


def begun(**fields: Any) -> Hello:
    sizes = np.round(np.random.default_rng(1).lognormal(3.0, 0.7, SAMPLES)).clip(1)
    fields = {"sizes": sizes.astype("<f8").tobytes(), "epochs": 2, "seed": 5} | fields
    return hello(WORLD, global_batch=BATCH, **fields)


class Training:
    """Ranks whose compute times are a_s · load + `STEP_S`, planned with a policy."""

    def __init__(self, policy: str, a_s: list[float], **fields: Any) -> None:
        self.hello = begun(**fields)
        history, window = History(self.hello), Window(WORLD, self.hello.attempt)
        self.planner = Planner(history, window, "local")
        self.planner.use(policies.make(policy), 0)
        self.epochs = Epochs(self.hello, history, window, policy)
        self._a_s = np.array(a_s)
        self._seq = 0

    def plan(self, **fields: Any) -> Plan:
        plan = self.planner.plan()
        made = msgspec.structs.replace(plan, **fields).keeping(plan.assignment)
        self.planner.adopt(made)
        self.epochs.adopt(made)
        return made

    def measure(self, plan: Plan) -> list[StepRecord]:
        records, sizes = [], self.hello.sizes_array()
        for k, parts in enumerate(plan.assignment.parts):
            load = np.array([sizes[part].sum() for part in parts])
            compute_s: Floats = np.where(load > 0, self._a_s * load + STEP_S, 0.0)
            sync_s = compute_s.max() - compute_s + 0.001
            for rank, part in enumerate(parts):
                step = plan.first_step + k
                times = 0.0, compute_s[rank], sync_s[rank], compute_s.max() + 0.001, float(step)
                records.append(
                    StepRecord(
                        *(self.hello.attempt, rank, step, step, plan.epoch, plan.seq),
                        *(len(part), float(load[rank]), *times),
                        squares=float((sizes[part] ** 2).sum()),
                        longest=float(sizes[part].max(initial=0.0)),
                    )
                )
        return records

    def hear(self, records: list[StepRecord]) -> list[EpochReport]:
        self.planner.add(records)
        self.epochs.add(records)
        return list(self.epochs.finished())

    def run(self) -> list[EpochReport]:
        reports = []
        while not self.planner.history.finished:
            reports += self.hear(self.measure(self.plan()))
        return reports


@given(st.lists(st.floats(1e-4, 5e-4), min_size=WORLD, max_size=WORLD))
def test_the_estimate_is_what_equal_batches_take(a_s: list[float]) -> None:
    *_, balanced = Training("paceline", a_s).run()
    *_, equal = Training("bsp", a_s).run()
    assert balanced.equal is not None
    assert balanced.equal.epoch_s == pytest.approx(equal.epoch_s, rel=0.02)
    assert balanced.equal.waiting == pytest.approx(equal.waiting, abs=0.02)


def test_measurements_are_those_of_the_ranks() -> None:
    run = Training("paceline", [1e-4, 1e-4, 3e-4])
    steps, records = dict[int, float](), list[StepRecord]()
    reports = list[EpochReport]()
    while not run.planner.history.finished:
        measured = run.measure(run.plan())
        records += measured
        reports += run.hear(measured)
    second = [record for record in records if record.epoch == 1]
    steps = {record.step: record.step_s for record in second}
    report = reports[1]
    assert [each.epoch for each in reports] == [0, 1]
    assert (report.first_step, report.steps, report.whole) == (25, 25, True)
    assert report.epoch_s == pytest.approx(sum(steps.values()))
    waited = sum(record.sync_s - 0.001 for record in second)
    assert report.waiting == pytest.approx(waited / (WORLD * report.epoch_s))
    assert sum(report.shares) == pytest.approx(1.0, abs=1e-3)
    assert report.speeds[0] > 1.5 * report.speeds[2]


def test_nothing_is_estimated_from_a_few_steps() -> None:
    run = Training("paceline", [1e-4, 1e-4, 3e-4], epochs=1, sizes=np.ones(240).tobytes())
    [report] = run.run()
    assert report.steps == 10
    assert report.equal is None


def test_coasted_steps_count_as_equal_batches() -> None:
    run = Training("bsp", [1e-4, 1e-4, 3e-4])
    run.epochs = Epochs(run.hello, History(run.hello), run.planner.window, "paceline")
    *_, report = run.run()
    assert report.policy == "paceline"
    assert report.equal is not None
    assert report.equal.epoch_s == pytest.approx(report.epoch_s)


def test_nothing_is_estimated_under_relaxed_synchronisation() -> None:
    run = Training("local-sgd", [1e-4, 1e-4, 3e-4])
    assert [report.equal for report in run.run()] == [None, None]


def test_an_epoch_is_reported_once_all_records_of_its_last_step_are_there() -> None:
    run, reports = Training("paceline", [1e-4] * WORLD, epochs=1), list[EpochReport]()
    while not run.planner.history.finished:
        *records, last = run.measure(run.plan())
        assert not reports
        assert not run.hear(records)
        reports += run.hear([last])
    assert [report.steps for report in reports] == [25]


def test_an_epoch_that_the_script_left_is_reported_with_the_next() -> None:
    run = Training("paceline", [1e-4] * WORLD)
    assert not run.hear(run.measure(run.plan()))
    first = run.plan()
    assert not run.hear(run.measure(first)[:-1])
    run.planner.history._begin_epoch(1)
    [report] = run.hear(run.measure(run.plan()))
    assert (report.epoch, report.steps) == (0, first.first_step + first.steps - 1)


def test_what_is_open_is_reported_at_the_end() -> None:
    run = Training("paceline", [1e-4] * WORLD)
    plan = run.plan()
    assert not run.hear(run.measure(plan))
    run.epochs.close()
    [report] = run.epochs.finished()
    assert report.steps == plan.steps
    assert not list(run.epochs.finished())


def test_an_epoch_that_was_resumed_is_a_part() -> None:
    used = np.arange(0, SAMPLES, 2)
    run = Training(
        "paceline", [1e-4, 1e-4, 3e-4], epoch=0, step=12, used=used.astype("<u4").tobytes()
    )
    first, second = run.run()
    assert (first.whole, first.first_step, first.steps) == (False, 12, 13)
    assert (second.whole, second.first_step, second.steps) == (True, 25, 25)
    assert second.equal is not None


def test_a_stream_is_measured_only() -> None:
    run = Training("paceline", [1e-4] * WORLD)
    streamed = msgspec.structs.replace(run.hello, sizes=b"", stream=True)
    epochs = Epochs(streamed, History(streamed), run.planner.window, "paceline")
    plan = run.plan()
    epochs.adopt(plan)
    epochs.add(run.measure(plan))
    epochs.close()
    [report] = epochs.finished()
    assert report.equal is None


def test_fitted_times_that_are_not_above_0_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fitted cost per sample may be negative."""
    run = Training("paceline", [1e-4, 1e-4, 3e-4])
    models = policies.Models(np.full(WORLD, 1e-4), np.full(WORLD, -1.0), np.zeros(WORLD))
    monkeypatch.setattr(run.epochs, "_models", lambda: models)
    assert [report.equal for report in run.run()] == [None, None]
