"""What a run can do against a cause: nothing that it does already, and nothing that it cannot."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from paceline.wire import OBSERVED
from paceline_backend.insight.verdict import ObservedSteps, facts_of, judge
from support.timings import observed, slow

ONE, TWO = ["a"] * 6, ["a", "a", "a", "b", "b", "b"]


def advice(seen: ObservedSteps, **about: Any) -> dict[str, str]:
    """Kind of each cause, and what to do against it."""
    facts = facts_of(judge(dataclasses.replace(seen, **about)))
    return {cause["kind"]: cause["to_do"] for cause in facts["causes"]}


def uneven() -> ObservedSteps:
    return observed(load=np.random.default_rng(0).lognormal(3.7, 0.5, (100, 6)))


@pytest.mark.parametrize("nodes", [ONE, TWO])
@pytest.mark.parametrize("policy", ["bsp", "sata", "paceline"])
def test_a_node_is_replaced_only_where_there_are_several(nodes: list[str], policy: str) -> None:
    seen = observed(speed=slow(3, 2.0))
    text = advice(seen, nodes=nodes, policy=policy, balances=policy == "paceline")["node"]
    assert ("replace" in text) == (nodes == TWO)
    assert ("all ranks share a machine" in text) == (nodes == ONE)
    assert ("`paceline`" in text) == (policy != "paceline")


@pytest.mark.parametrize("policy", ["paceline", "paceline-relaxed", "ad-psgd"])
def test_the_policy_in_force_is_not_recommended(policy: str) -> None:
    """Also where it is the batches of another policy."""
    for seen in (observed(speed=slow(3, 2.0)), uneven()):
        for text in advice(seen, nodes=TWO, policy=policy, balances=True).values():
            assert "such as" not in text
    assert (
        f"`{policy}` balances by size already"
        in advice(uneven(), policy=policy, balances=True)["data"]
    )
    assert "such as `paceline`, removes it" in advice(uneven(), policy="lbb")["data"]


@pytest.mark.parametrize("nodes", [(), ONE, TWO])
def test_where_all_ranks_are_slow_no_rank_takes_load_from_them(nodes: list[str]) -> None:
    speed = np.ones((200, 6))
    speed[100:] = 2.0
    seen = observed(steps=200, speed=speed, nodes=nodes)
    facts = facts_of(judge(seen))
    [cause] = facts["causes"]
    assert (cause["kind"], len(cause["ranks"])) == ("node", 6)
    assert "takes load" not in cause["to_do"]
    assert "replace" not in cause["to_do"]
    assert "no policy helps" in cause["to_do"]


def test_links_are_looked_at_where_there_are_some() -> None:
    seen = observed(reduce_s=0.4)
    assert "links" in advice(seen, nodes=TWO)["network"]
    assert "links" not in advice(seen, nodes=ONE)["network"]


def test_a_policy_needs_a_loss_that_allows_uneven_parts() -> None:
    for seen, kind in ((observed(speed=slow(3, 2.0)), "node"), (uneven(), "data")):
        text = advice(seen, nodes=ONE, policy="paceline", equal=True)[kind]
        assert "once the script's loss allows uneven batches, a policy" in text


def test_an_observed_run_has_no_policy_to_switch() -> None:
    for seen, kind in ((observed(speed=slow(3, 2.0)), "node"), (uneven(), "data")):
        text = advice(seen, nodes=ONE, policy=OBSERVED)[kind]
        assert "with a `paceline.Session` in the script, a policy" in text
