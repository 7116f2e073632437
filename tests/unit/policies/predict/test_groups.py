"""RNA's groups of ranks, and the preset that trains in them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import policies
from paceline.policies import Choice, Feedback
from paceline.policies.presets.rna_hierarchical import Grouping, groups, step_times
from support.simulated import feedback_of

PARTIAL = {"probes": 2, "staleness": 4, "mean": True}
TIMES = st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=12)
SPREADS = st.floats(0.05, 2.0)


@pytest.mark.parametrize(
    ("times", "spread", "expected"),
    [
        ([1, 1, 1], 1.0, [[0, 1, 2]]),
        ([1, 3, 1, 3], 1.0, [[0, 1, 2, 3]]),  # ζ = v
        ([5, 1, 5, 1], 1.0, [[0, 2], [1, 3]]),  # ζ = 4, v = 3
        ([1, 1, 4, 20], 1.0, [[0, 1], [2], [3]]),  # and again: ζ = 3, v = 2
        # RNA's two groups (Sec. 8): delays of 0 to 50 and of 50 to 100 ms, and a step of 30 ms.
        # Their ranks' means, 55 and 105 ms, are not ζ > v: that takes less spread.
        ([55, 55, 105, 105], 1.0, [[0, 1, 2, 3]]),
        ([55, 55, 105, 105], 0.5, [[0, 1], [2, 3]]),
    ],
)
def test_groups_worked_by_hand(
    times: list[float], spread: float, expected: list[list[int]]
) -> None:
    assert groups(np.array(times, float), spread) == expected


@given(TIMES, SPREADS)
def test_each_rank_is_in_one_group_and_none_is_spread_wider(
    times: list[float], spread: float
) -> None:
    of = np.array(times)
    grouped = groups(of, spread)
    assert sorted(rank for group in grouped for rank in group) == list(range(len(times)))
    for group in grouped:
        assert np.ptp(of[group]) <= spread * of[group].mean() * (1 + 1e-9)
    by_speed = sorted(grouped, key=lambda group: of[group].min())
    for faster, slower in pairwise(by_speed):
        assert of[faster].max() < of[slower].min()


@given(TIMES, SPREADS, st.randoms(use_true_random=False))
def test_groups_do_not_depend_on_numbers(times: list[float], spread: float, random: Any) -> None:
    order = random.sample(range(len(times)), len(times))
    of = np.array(times)
    again = groups(of[order], spread)
    assert sorted(sorted(order[k] for k in group) for group in again) == groups(of, spread)


def test_steps_without_samples_do_not_count() -> None:
    times_s = step_times(
        np.array([[1.0, 9.0, 0.0], [3.0, 0.0, 0.0]]), np.array([[1, 1, 0], [1, 0, 0]])
    )
    assert times_s.tolist() == pytest.approx([2, 9, 13 / 3])


def test_steps_without_a_time_make_no_rank_fast() -> None:
    """A rank that compiled code again has samples in the step, and no time."""
    times_s = step_times(np.array([[2.0, 0.0], [2.0, 4.0]]), np.ones((2, 2), np.int64))
    assert times_s.tolist() == [2, 4]
    chooser = Grouping(spread=1.0, every=4, probes=2, staleness=4)
    speeds = np.tile([1.0, 1.0, 5.0, 5.0], (48, 1))
    plain = chooser.choose(feedback_of(speeds, 4), 4, {})
    speeds[1::3, 2] = 0.0
    assert chooser.choose(feedback_of(speeds, 4), 4, {}) == plain


def rules(choice: Choice) -> dict[str, Any]:
    return dict(msgspec.to_builtins(choice.synchroniser.parameters))


def test_ranks_are_grouped_by_what_lasts() -> None:
    chooser = Grouping(spread=1.0, every=4, probes=2, staleness=4)
    speeds = np.array([1.0, 1.0, 5.0, 5.0])
    few = chooser.choose(feedback_of(np.tile(speeds, (31, 1)), 4), 4, {})
    assert few.synchroniser.name == "partial" and rules(few) == PARTIAL
    known = chooser.choose(feedback_of(np.tile(speeds, (32, 1)), 4), 4, few.memory)
    assert known.synchroniser.name == "hierarchical"
    assert rules(known) == PARTIAL | {"groups": [[0, 1], [2, 3]], "every": 4}
    assert known.why == "2 groups by what a step takes: 2 ranks at 1e+03 ms, 2 ranks at 5e+03 ms"
    # All are as fast in the newer half only: one group, once that is so in all parts.
    level = np.ones((16, 4))
    half = feedback_of(np.concatenate([np.tile(speeds, (16, 1)), level]), 4)
    assert chooser.choose(half, 4, known.memory).synchroniser == known.synchroniser
    whole = chooser.choose(feedback_of(np.concatenate([level, level]), 4), 4, known.memory)
    assert rules(whole) == PARTIAL


@pytest.mark.parametrize("memory", [{}, {"groups": [[0, 1], [2, 3]]}, {"groups": "a"}, {"a": 1}])
def test_what_other_ranks_were_is_forgotten(memory: dict[str, Any]) -> None:
    chooser = Grouping(spread=1.0, every=4, probes=2, staleness=4)
    choice = chooser.choose(Feedback.empty(), 3, memory)
    assert choice.memory == {"groups": [[0, 1, 2]]}


def test_noise_near_the_limit_moves_no_rank() -> None:
    """A rank at the mean is now above it and now below, by chance."""
    chooser = Grouping(spread=1.0, every=4, probes=2, staleness=4)
    rng = np.random.default_rng(0)
    memory: Any = {}
    seen, wanted = [], []
    for _ in range(60):
        times = np.array([1.0, 1.0, 4.0, 8.0, 6.0]) * rng.normal(1, 0.05, (32, 5))
        choice = chooser.choose(feedback_of(times, 4), 5, memory)
        memory = choice.memory
        seen.append(memory["groups"])
        wanted.append(groups(times.mean(axis=0)))
    changes, naive = (sum(a != b for a, b in pairwise(groupings)) for groupings in (seen, wanted))
    assert changes < naive / 4


@pytest.mark.parametrize(
    ("times", "nodes", "expected"),
    [
        ([1, 1, 2, 2], [0, 0, 1, 1], [[0, 1, 2, 3]]),  # ζ = 1, v = 1.5
        ([1, 1, 5, 5], [0, 0, 1, 1], [[0, 1], [2, 3]]),  # ζ = 4, v = 3
        ([1, 5, 1, 5], [0, 1, 0, 1], [[0, 2], [1, 3]]),
        # Two of three nodes are about as fast: they are one group.
        ([1, 1, 1.5, 1.5, 9, 9], [0, 0, 1, 1, 2, 2], [[0, 1, 2, 3], [4, 5]]),
        # Nodes are alike, but each has a slow rank.
        ([1, 1, 1, 5, 1, 1, 1, 5], [0, 0, 0, 0, 1, 1, 1, 1], [[0, 1, 2, 4, 5, 6], [3, 7]]),
        # A slow node, and a slow rank in the other node: ranks alone would be one group with it.
        ([1, 1, 1, 5, 6, 6, 7, 8], [0, 0, 0, 0, 1, 1, 1, 1], [[0, 1, 2], [3], [4, 5, 6, 7]]),
        # A rank on each node.
        ([1, 1, 4, 20], [0, 1, 2, 3], [[0, 1], [2], [3]]),
    ],
)
def test_nodes_worked_by_hand(
    times: list[float], nodes: list[int], expected: list[list[int]]
) -> None:
    assert groups(np.array(times, float), 1.0, nodes) == expected


@given(st.data(), TIMES, SPREADS)
def test_nodes_are_divided_only_where_speeds_differ(
    data: st.DataObject, times: list[float], spread: float
) -> None:
    """On several nodes there are several groups if and only if ζ > v, and ζ ≤ v in each."""
    of, each = np.array(times), st.integers(0, 3)
    nodes = data.draw(st.lists(each, min_size=len(times), max_size=len(times)))
    grouped = groups(of, spread, nodes)
    assert sorted(rank for group in grouped for rank in group) == list(range(len(times)))
    for group in grouped:
        assert np.ptp(of[group]) <= spread * of[group].mean() * (1 + 1e-9)
    if np.ptp(of) <= spread * of.mean() * (1 - 1e-9):
        assert len(grouped) == 1
    assert groups(of, spread, [7] * len(of)) == groups(of, spread)


def test_several_nodes_are_grouped_by_speed() -> None:
    nodes = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    policy = policies.make("rna-hierarchical")
    even = feedback_of(np.ones((32, 8)), 8)
    assert rules(policy.choose(even, 8, {}, nodes)) == PARTIAL
    assert rules(policy.choose(Feedback.empty(), 8, {}, nodes)) == PARTIAL
    uneven = feedback_of(np.tile([1.0, 1, 1, 5, 6, 6, 7, 8], (32, 1)), 8)
    choice = policy.choose(uneven, 8, {}, nodes)
    assert rules(choice)["groups"] == [[0, 1, 2], [3], [4, 5, 6, 7]]
    assert choice.why.startswith("3 groups by what a step takes: 3 ranks at 1e+03 ms, 1 ranks at")
    by_speed = policies.make("rna-hierarchical", {"groups": "speed"})
    expected = [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert rules(by_speed.choose(uneven, 8, {}, nodes))["groups"] == expected
    assert rules(policy.choose(uneven, 8, {}))["groups"] == expected
