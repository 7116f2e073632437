"""Every preset plans on rank 0 without a server, or is refused by name with the reason."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from paceline import policies
from paceline.planning.feedback import Window
from paceline.planning.history import History
from paceline.planning.planner import Planner
from paceline.planning.policy_in_force import PolicyInForce
from paceline.wire import ALLREDUCE, Hello, Plan, StepRecord
from support.records import hello

WORLD, SAMPLES = 4, 240
# The presets that also keep a token budget, and those that also plan a stream.
BUDGETED = [name for name in policies.names() if policies.make(name).changes == "nothing"]
STREAMED = ["bsp", "paceline"]


def begun() -> Hello:
    sizes = np.linspace(1.0, 5.0, SAMPLES).astype("<f8").tobytes()
    return hello(WORLD, global_batch=24, sizes=sizes, epochs=2, seed=1)


def measured(plan: Plan) -> list[StepRecord]:
    records = []
    for k, counts in enumerate(plan.counts):
        step = plan.first_step + k
        for rank, count in enumerate(counts):
            times = 0.0, 0.01 * (rank + 1) * count, 0.0, 0.5, 1.0
            records.append(
                StepRecord(0, rank, step, step, plan.epoch, plan.seq, count, 3.0 * count, *times)
            )
    return records


@pytest.mark.parametrize("name", policies.names())
def test_a_preset_plans_an_epoch(name: str) -> None:
    start = begun()
    PolicyInForce(name).refuse(WORLD, None, stream=False)
    planner = Planner(History(start), Window(WORLD, start.attempt), "local")
    policy = PolicyInForce(name).made(WORLD, None, stream=False)
    planner.use(policy, 0)
    plans, samples = list[Plan](), list[int]()
    while planner.history.epoch == 0:
        # As rank 0's process sends it, and the leader validates it.
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(planner.plan()), type=Plan)
        assert plan.defect(WORLD, SAMPLES) is None
        planner.adopt(plan)
        planner.add(msgspec.structs.replace(r, attempt=start.attempt) for r in measured(plan))
        plans.append(plan)
        samples += plan.assignment.samples.tolist()
    assert sorted(samples) == list(range(SAMPLES))
    assert {(plan.policy, plan.source) for plan in plans} == {(name, "local")}
    assert policy.relaxed or all(plan.synchroniser == ALLREDUCE for plan in plans)


@pytest.mark.parametrize("name", policies.names())
def test_a_preset_that_keeps_no_token_budget_is_refused(name: str) -> None:
    if name in BUDGETED:
        PolicyInForce(name).refuse(WORLD, 100.0, stream=False)
        return
    with pytest.raises(ValueError, match=f"policy='{name}': {name} .* cannot keep a token budget"):
        PolicyInForce(name).refuse(WORLD, 100.0, stream=False)


@pytest.mark.parametrize("name", policies.names())
def test_a_preset_that_plans_no_stream_is_refused(name: str) -> None:
    if name in STREAMED:
        PolicyInForce(name).refuse(WORLD, None, stream=True)
        return
    with pytest.raises(ValueError, match=f"policy='{name}': {name} cannot plan a stream"):
        PolicyInForce(name).refuse(WORLD, None, stream=True)


def test_too_few_ranks_are_named() -> None:
    policy = PolicyInForce("backup-workers", {"backups": 4})
    with pytest.raises(ValueError, match="policy='backup-workers': "):
        policy.refuse(WORLD, None, stream=False)


@pytest.mark.parametrize("what", ["policy", "PACELINE_POLICY"])
def test_auto_needs_a_control_plane(what: str) -> None:
    with pytest.raises(ValueError, match=f"{what}='auto': only a control plane .*`paceline auto`"):
        PolicyInForce.of("auto", what)
