"""Verdicts name the node on which all slow ranks sit."""

from __future__ import annotations

import numpy as np
import pytest

from paceline_backend.insight.attribution import (
    FEWEST_STEPS,
    Rows,
    SlowNode,
    attribute,
    slow_node,
)

STEPS = 40


def rows(speeds: list[float], late: dict[int, float] | None = None, steps: int = STEPS) -> Rows:
    """Steps of equal batches: ranks take their speed in seconds a sample, with a little noise."""
    rng = np.random.default_rng(1)
    world = len(speeds)
    load = np.full((steps, world), 8.0)
    noise = 1 + 0.005 * rng.standard_normal((steps, world))
    data_s = np.zeros((steps, world))
    for rank, seconds in (late or {}).items():
        data_s[:, rank] = seconds
    compute_s = load * np.array(speeds) * noise
    return Rows(np.arange(steps), load, load, load, np.ones_like(load), data_s, compute_s)


def named(
    speeds: list[float], placement: list[str] | None, late: dict[int, float] | None = None
) -> SlowNode | None:
    return slow_node(attribute(rows(speeds, late)), placement)


@pytest.mark.parametrize(
    ("factor", "pace"),
    [(3.0, "a third"), (2.0, "half"), (1.5, "two thirds"), (4.0, "a quarter"), (1.2, "83 %")],
)
def test_a_slow_node_is_named_with_its_pace(factor: float, pace: str) -> None:
    slow = named([0.01, 0.01, 0.01 * factor, 0.01 * factor], ["n1", "n1", "n2", "n2"])
    assert slow is not None
    assert (slow.node, slow.cause, slow.ranks, slow.count) == ("n2", "node", [2, 3], 2)
    assert slow.factor == pytest.approx(factor, rel=0.02)
    assert slow.words == f"n2 computes at {pace} of the others' pace."


def test_the_first_steps_name_no_node() -> None:
    speeds, placement = [0.01, 0.03], ["n1", "n2"]
    few = attribute(rows(speeds, steps=FEWEST_STEPS - 1))
    assert few.cause == "node"
    assert slow_node(few, placement) is None
    assert slow_node(attribute(rows(speeds, steps=FEWEST_STEPS)), placement) is not None


def test_of_two_ranks_the_slower_one_is_named() -> None:
    slow = named([0.03, 0.01], ["n1", "n2"])
    assert slow is not None
    assert slow.words == "n1 computes at a third of the others' pace."


def test_a_slow_device_of_a_node_does_not_make_the_whole_node_slow() -> None:
    slow = named([0.01, 0.01, 0.01, 0.03], ["n1", "n1", "n2", "n2"])
    assert slow is not None
    assert slow.words == "All slow ranks are on n2: 1 of its 2."


def test_a_slow_loader_of_a_node_names_it() -> None:
    slow = named([0.01, 0.01], ["n1", "n2"], late={1: 0.1})
    assert slow is not None
    assert (slow.cause, slow.words) == ("input", "The slow rank is that of n2.")


@pytest.mark.parametrize(
    ("speeds", "placement"),
    [
        ([0.01, 0.01, 0.01, 0.01], ["n1", "n1", "n2", "n2"]),  # nobody is slow
        ([0.01, 0.03, 0.01, 0.03], ["n1", "n1", "n2", "n2"]),  # on several nodes
        ([0.01, 0.01, 0.03, 0.03], ["n1"] * 4),  # there is one node only
        ([0.01, 0.01, 0.03, 0.03], None),
        ([0.01, 0.01, 0.03, 0.03], ["n1", "n2"]),  # of another attempt
    ],
)
def test_no_node_is_named(speeds: list[float], placement: list[str] | None) -> None:
    assert named(speeds, placement) is None
