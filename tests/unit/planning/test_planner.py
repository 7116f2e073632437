"""`Planner`: what a controller and rank 0's planning process have in common."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from paceline import policies
from paceline.planning import planner as planners
from paceline.planning.feedback import Window
from paceline.planning.history import History
from paceline.planning.planner import GapError, InvalidPlanError, Planner
from paceline.wire import Hello, Plan, StepRecord


def planner(policy: str = "bsp", source: str = "controller") -> Planner:
    sizes = np.linspace(1.0, 5.0, 64).astype("<f8").tobytes()
    terms = (0, 2, 8, 0, sizes, "samples", False, 1, 2, 1.0, "0", "2", "cpu")
    made = Planner(History(Hello(*terms)), Window(2, 0), source)
    made.use(policies.make(policy), 0)
    return made


def record(plan: Plan, step: int, rank: int) -> StepRecord:
    times = 0.0, 0.1 * (rank + 1), 0.0, 0.2, 1.0
    return StepRecord(0, rank, step, step, 0, plan.seq, 4, 12.0, *times)


def test_it_plans_until_the_epochs_end() -> None:
    made, samples = planner(source="local"), []
    while made.is_due():
        plan = made.plan()
        assert plan.source == "local"
        assert not made.is_due(), "nothing has changed"
        made.adopt(plan)
        samples += plan.assignment.samples.tolist()
    assert sorted(samples) == list(range(64))
    assert made.history.finished


def test_new_feedback_makes_a_plan_due_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planners, "SPARE", 0.0)
    made = planner("paceline")
    first = made.plan()
    made.adopt(first)
    made.plan()
    assert not made.is_due()
    made._planned_at = -1e9
    made.add(record(first, step, rank) for step in range(first.steps) for rank in range(2))
    assert made.is_due()


def test_a_segment_may_arrive_again_but_none_may_be_missing() -> None:
    made = planner()
    first = made.plan()
    made.adopt(first)
    second = made.plan()
    made.adopt(first)
    other = planner()
    with pytest.raises(GapError):
        other.adopt(second)
    made.adopt(second)
    assert made.history.seq == 2


def test_an_invalid_segment_and_an_invalid_plan_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = planner()
    plan = made.plan()
    with pytest.raises(ValueError, match="moved is -1"):
        made.adopt(msgspec.structs.replace(plan, moved=-1))

    def offer(*_: object) -> tuple[Plan, None]:
        return msgspec.structs.replace(plan, moved=-1).keeping(plan.assignment), None

    monkeypatch.setattr(planners, "offer", offer)
    with pytest.raises(InvalidPlanError, match="moved is -1"):
        planner().plan()


def test_without_a_policy_nothing_is_due() -> None:
    made = planner()
    made.use(None, 1)
    assert not made.is_due()
