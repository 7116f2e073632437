"""A slow node: what it would save to be without it, and which of its steps count afterwards."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.core.emulation import Emulation
from paceline.wire import StepBatch
from paceline_backend.insight.verdict import judge, read_observed, slow_node
from paceline_backend.insight.whatif.forecast import of_state
from paceline_backend.insight.whatif.simulate import Effort
from paceline_backend.store import Store, attempts, runs, telemetry
from paceline_backend.store.planning import load
from support.forecasts import COMMUNICATION_S, Training, drawn
from support.leading import new_run
from support.records import adopted, hello, record

NODES = ["n1", "n1", "n2", "n2"]
SLOW = [1e-5, 1e-5, 3e-5, 3e-5]


def training(
    policy: str, a_s: list[float], placement: list[str], global_batch: int = 64
) -> Training:
    devices = Emulation(a_s, [0.005] * 4, noise=0.02)
    made = Training(drawn(6_000, 1.0), devices, global_batch, policy)
    assert made.simulation.history is not None
    made.hello = msgspec.structs.replace(made.hello, placement=placement)
    made.simulation.history.hello = made.hello
    return made


@pytest.mark.parametrize("policy", ["bsp", "paceline"])
def test_the_forecast_is_what_another_node_then_gives(policy: str) -> None:
    """Also where the policy hides the slowness, so that no rank waits."""
    slow = training(policy, SLOW, NODES)
    slow.train(150)
    made = of_state("run", slow.state(), [], effort=Effort(replicates=2, budget_s=1e9))
    assert made.reason is None
    node = made.slow_node
    assert node is not None
    # b_s, the time that each step takes, is not slower there.
    assert (node.node, node.ranks, node.factor) == ("n2", [2, 3], pytest.approx(2.5, rel=0.2))
    fast = training(policy, [1e-5] * 4, NODES)
    fast.train(300)
    assert node.step_time_s == pytest.approx(fast.time(50, 300), rel=0.1)
    assert node.low_s < node.step_time_s < node.high_s
    assert 0.05 < node.saving_low <= node.saving <= node.saving_high < 1
    percent = f"{100 * node.saving:.0f} %"
    assert node.words.startswith(f"if n2 were as fast as the others, steps would take {percent}")
    assert "all-reduce" not in node.words  # takes 4 ms of some 80


def test_a_long_all_reduce_may_be_the_nodes_too() -> None:
    made = training("bsp", SLOW, NODES, global_batch=8)
    made.train(150)
    node = of_state("run", made.state(), [], effort=Effort(replicates=2, budget_s=1e9)).slow_node
    assert node is not None
    said = re.search(r"slows the all-reduce down: (\d+) % of a step", node.words)
    assert said is not None, node.words
    step_s = np.concatenate([segment.step_s for segment in made.ran])
    assert int(said[1]) == pytest.approx(100 * COMMUNICATION_S / step_s.mean(), abs=2)


@pytest.mark.parametrize(
    ("a_s", "placement"), [([1e-5] * 4, NODES), (SLOW, ["n1"] * 4), (SLOW, [])]
)
def test_without_a_slow_node_there_is_no_such_forecast(
    a_s: list[float], placement: list[str]
) -> None:
    made = training("bsp", a_s, placement)
    made.train(100)
    forecast = of_state("run", made.state(), [], effort=Effort(replicates=1))
    assert forecast.reason is None
    assert forecast.slow_node is None


def attempt(number: int, first: int, placement: list[str], factor: float) -> list[Any]:
    """An attempt of 40 steps, in which the second rank takes `factor` times as long."""
    sizes = np.ones(1_000).tobytes()
    said: list[Any] = [
        hello(2, number, step=first, placement=placement, sizes=sizes),
        adopted(0, first, attempt=number, counts=[[4, 4]] * 40),
    ]
    for rank, seconds in enumerate((0.01, 0.01 * factor)):
        steps = [
            record(step, rank, number, seq=step - first, compute_s=seconds, load=4.0, samples=4)
            for step in range(first, first + 40)
        ]
        said.append(StepBatch(steps))
    return said


def test_steps_on_other_nodes_do_not_count(store: Store) -> None:
    """Neither for the verdict nor for the plans, which would take the new node for a slow one."""
    run = new_run(store)
    telemetry.write(store, [(run, message) for message in attempt(0, 0, ["n1", "n2"], 3.0)])
    with store.read() as connection:
        key = runs.key_of(connection, run)
        before = attempts.placement(connection, key)
        assert before is not None
        rows = read_observed(connection, key, (None, None), before)
        assert (before.nodes, before.since, len(rows.step)) == (["n1", "n2"], 0, 40)
        slow = slow_node(judge(rows))
        assert slow is not None
        assert slow.node == "n2"
    telemetry.write(store, [(run, message) for message in attempt(1, 40, ["n1", "n3"], 1.0)])
    with store.read() as connection:
        placed = attempts.placement(connection, key)
        assert placed is not None
        assert (placed.nodes, placed.since, placed.attempt) == (["n1", "n3"], 40, 1)
        rows = read_observed(connection, key, (None, None), placed)
        assert rows.step.tolist() == list(range(40, 80))
        assert attempts.placement(connection, key, 39) == before
        loaded = load(connection, key)
        assert loaded is not None
        assert np.unique(loaded[1].feedback().step).min() >= 40
    telemetry.write(store, [(run, message) for message in attempt(2, 80, ["n1", "n3"], 1.0)])
    with store.read() as connection:
        placed = attempts.placement(connection, key)
        assert placed is not None
        assert (placed.since, placed.attempt) == (40, 2)
        loaded = load(connection, key)
        assert loaded is not None
        assert np.unique(loaded[1].feedback().step).min() < 80
