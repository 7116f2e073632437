"""The verdict at the end of scripted scenarios whose policy is switched on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline_backend.insight.verdict import facts_of, judge
from paceline_backend.simulator import Scenario
from support.marks import some_long
from support.timings import simulated

FILE = Path(__file__).parents[3] / "benchmarks" / "scenarios" / "switches.yaml"
SCENARIOS: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())
NEAR = 10  # steps by which a beginning or an end may be off


@pytest.mark.parametrize("name", some_long(SCENARIOS, 3))
def test_the_verdict_at_the_end(name: str) -> None:
    expected = SCENARIOS[name]
    facts = facts_of(judge(simulated(Scenario.of(expected["scenario"] | {"name": name}))))
    assert facts["level"] in expected["levels"], facts["words"]
    causes = {(cause["kind"], tuple(cause["ranks"])): cause for cause in facts["causes"]}
    assert set(causes) == {(each["kind"], tuple(each["ranks"])) for each in expected["causes"]}
    for each in expected["causes"]:
        cause = causes[each["kind"], tuple(each["ranks"])]
        assert each["hidden"] in (None, cause["hidden"]), cause["words"]
        for when in ("since", "until"):
            if each.get(when) is not None:
                assert cause[when] == pytest.approx(each[when], abs=NEAR), cause["words"]


def compensated(policy: str, spread: float, **devices: Any) -> Scenario:
    """A rank that is twice as slow, for which the policy makes up by counts of samples."""
    given = {"unit_s": 4e-4, "step_s": 0.012, "noise": 0.02, "factors": [1.0] * 8}
    return Scenario.of(
        {
            "name": "compensated",
            "workers": 8,
            "global_batch": 64,
            "steps": 300,
            "seed": 17,
            "policy": policy,
            "sizes": {"distribution": "lognormal", "mean": 60, "dif": spread, "samples": 5120},
            "devices": given | devices,
            "communication": {"fixed_s": 0.008},
        }
    )


SLOW = {"factors": [1, 1, 2, 1, 1, 1, 1, 1]}
TWO = {
    "slowdowns": [
        {"ranks": [2], "factor": 2.0, "first_step": 0, "steps": 300},
        {"ranks": [5], "factor": 1.7, "first_step": 150, "steps": 150},
    ]
}


COUNTED = [(policy, spread) for spread in (40, 20, 60) for policy in ("lbb", "sata", "boa")]
COUNTED += [("dynamic-batching", spread) for spread in (20, 40, 60)]


@pytest.mark.parametrize(("policy", "spread"), some_long(COUNTED, 6))
def test_a_slow_rank_that_the_plan_makes_up_for_and_uneven_sizes(
    policy: str, spread: float
) -> None:
    facts = facts_of(judge(simulated(compensated(policy, spread, **SLOW))))
    causes = {cause["kind"]: cause for cause in facts["causes"]}
    assert causes["node"]["ranks"] == [2]
    assert causes["node"]["hidden"]
    assert set(causes) == {"node", "data"}
    assert "nobody waits" not in causes["node"]["words"]
    # What ranks wait is lost, and so is what the others do of the slow rank's work.
    assert facts["cost_s"] > 0.9 * facts["waste"] * facts["wall_s"]


BOTH = [
    (policy, spread)
    for policy in ("lbb", "sata", "dynamic-batching", "paceline")
    for spread in (40, 5)
]


@pytest.mark.parametrize(("policy", "spread"), some_long(BOTH, 4))
def test_two_slow_ranks_that_the_plan_makes_up_for(policy: str, spread: float) -> None:
    facts = facts_of(judge(simulated(compensated(policy, spread, **TWO))))
    nodes = {cause["ranks"][0]: cause for cause in facts["causes"] if cause["kind"] == "node"}
    assert set(nodes) == {2, 5}
    assert nodes[5]["since"] == pytest.approx(150, abs=NEAR)
    assert all(cause["hidden"] for cause in nodes.values())
    assert all(cause["cost_s"] > 0.02 * facts["wall_s"] for cause in nodes.values())
