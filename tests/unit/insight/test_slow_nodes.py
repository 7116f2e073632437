"""Verdicts name the node on which all slow ranks sit."""

from __future__ import annotations

import numpy as np
import pytest

from paceline_backend.insight.verdict import (
    THRESHOLDS,
    SlowNode,
    Verdict,
    judge,
    slow_node,
)
from support.timings import in_steps, observed

STEPS = 40


def verdict(
    speeds: list[float],
    placement: list[str],
    late: dict[int, float] | None = None,
    steps: int = STEPS,
) -> Verdict:
    """Of steps of equal batches: ranks take multiples of 80 ms, with a little noise."""
    data_s = np.zeros(len(speeds))
    for rank, seconds in (late or {}).items():
        data_s[rank] = seconds
    return judge(
        observed(len(speeds), steps, noise=0.005, speed=speeds, data_s=data_s, nodes=placement)
    )


def named(
    speeds: list[float], placement: list[str], late: dict[int, float] | None = None
) -> SlowNode | None:
    return slow_node(verdict(speeds, placement, late))


@pytest.mark.parametrize(
    ("factor", "pace"),
    [(3.0, "a third"), (2.0, "half"), (1.5, "two thirds"), (4.0, "a quarter"), (1.2, "83 %")],
)
def test_a_slow_node_is_named_with_its_pace(factor: float, pace: str) -> None:
    slow = named([1.0, 1.0, factor, factor], ["n1", "n1", "n2", "n2"])
    assert slow is not None
    assert (slow.node, slow.cause, slow.ranks, slow.count) == ("n2", "node", [2, 3], 2)
    assert slow.factor == pytest.approx(factor, rel=0.02)
    assert slow.words == f"n2 computes at {pace} of the others' pace."


def test_the_first_steps_name_no_node() -> None:
    speeds, placement = [1.0, 3.0], ["n1", "n2"]
    few = verdict(speeds, placement, steps=THRESHOLDS.node_steps - 1)
    assert [cause.kind for cause in few.causes] == ["node"]
    assert slow_node(few) is None
    assert slow_node(verdict(speeds, placement, steps=THRESHOLDS.node_steps)) is not None


def test_of_two_ranks_the_slower_one_is_named() -> None:
    slow = named([3.0, 1.0], ["n1", "n2"])
    assert slow is not None
    assert slow.words == "n1 computes at a third of the others' pace."


def test_a_slow_device_of_a_node_does_not_make_the_whole_node_slow() -> None:
    slow = named([1.0, 1.0, 1.0, 3.0], ["n1", "n1", "n2", "n2"])
    assert slow is not None
    assert slow.words == "All slow ranks are on n2: 1 of its 2."


def test_a_slow_loader_of_a_node_names_it() -> None:
    slow = named([1.0, 1.0], ["n1", "n2"], late={1: 0.1})
    assert slow is not None
    assert (slow.cause, slow.words) == ("input", "The slow rank is the only rank of n2.")


@pytest.mark.parametrize(("steps", "node"), [((40, 59), None), ((90, 99), "n2")])
def test_a_slowness_that_has_passed_names_no_node(steps: tuple[int, int], node: str | None) -> None:
    """Only one that lasts into the newest steps does."""
    speed = in_steps(*steps, 2, 4.0, world=4)
    seen = judge(observed(4, 100, noise=0.005, speed=speed, nodes=["n1", "n1", "n2", "n2"]))
    assert [(cause.kind, cause.ranks) for cause in seen.causes] == [("transient", (2,))]
    slow = slow_node(seen)
    assert (slow and slow.node) == node


@pytest.mark.parametrize(
    ("speeds", "placement"),
    [
        ([1.0, 1.0, 1.0, 1.0], ["n1", "n1", "n2", "n2"]),  # nobody is slow
        ([1.0, 3.0, 1.0, 3.0], ["n1", "n1", "n2", "n2"]),  # on several nodes
        ([1.0, 1.0, 3.0, 3.0], ["n1"] * 4),  # there is one node only
        ([1.0, 1.0, 3.0, 3.0], []),  # unknown
    ],
)
def test_no_node_is_named(speeds: list[float], placement: list[str]) -> None:
    assert named(speeds, placement) is None
