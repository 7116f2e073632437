"""`paceline.partition`, for loops that are not a Session's."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.balancing import Speeds, partition


def slowest(parts: list[Any], costs: list[float], speeds: list[float] | None = None) -> float:
    of = speeds or [1.0] * len(parts)
    return float(max(sum(costs[i] for i in part) / s for part, s in zip(parts, of, strict=True)))


def padded(parts: list[Any], costs: list[float]) -> float:
    return max(len(part) * max((costs[i] for i in part), default=0.0) for part in parts)


def divisions(items: int, ranks: int) -> list[list[list[int]]]:
    """All ways to divide items among ranks."""
    made = []
    for owners in itertools.product(range(ranks), repeat=items):
        made.append([[i for i in range(items) if owners[i] == r] for r in range(ranks)])
    return made


def largest_first(costs: list[float], speeds: list[float]) -> float:
    """The greedy cut: each item, largest first, to the rank that then ends first."""
    time_s = [0.0] * len(speeds)
    for cost in sorted(costs, reverse=True):
        rank = min(range(len(speeds)), key=lambda r: time_s[r] + cost / speeds[r])
        time_s[rank] += cost / speeds[rank]
    return max(time_s)


COSTS = st.lists(st.integers(0, 1000).map(float), min_size=1, max_size=60)


@given(costs=COSTS, ranks=st.integers(1, 9), data=st.data())
def test_each_item_once_and_never_worse_than_the_greedy_cut(
    costs: list[float], ranks: int, data: st.DataObject
) -> None:
    speeds = data.draw(st.lists(st.floats(0.1, 10), min_size=ranks, max_size=ranks))
    for given_speeds in (None, speeds):
        parts = partition(costs, ranks, speeds=given_speeds)
        assert sorted(np.concatenate(parts)) == list(range(len(costs)))
        of = given_speeds or [1.0] * ranks
        greedy = largest_first(costs, of)
        assert slowest(parts, costs, of) <= greedy * (1 + 1e-6) + 1e-9


@given(
    costs=st.lists(st.integers(1, 50).map(float), min_size=1, max_size=7),
    ranks=st.integers(2, 3),
)
def test_few_items_are_divided_best(costs: list[float], ranks: int) -> None:
    ways = divisions(len(costs), ranks)
    best = min(slowest(way, costs) for way in ways)
    assert slowest(partition(costs, ranks), costs) == pytest.approx(best)
    size = len(costs) // ranks
    even = [way for way in ways if all(size <= len(part) <= size + 1 for part in way)]
    best = min(slowest(way, costs) for way in even)
    equal = partition(costs, ranks, equal_count=True)
    assert max(map(len, equal)) - min(map(len, equal)) <= 1
    assert slowest(equal, costs) == pytest.approx(best)


@given(costs=COSTS, ranks=st.integers(1, 6), data=st.data())
def test_limits_are_kept(costs: list[float], ranks: int, data: st.DataObject) -> None:
    least = -(-len(costs) // ranks)
    limits = data.draw(st.lists(st.integers(least, 60), min_size=ranks, max_size=ranks))
    parts = partition(costs, ranks, limits=limits)
    assert sorted(np.concatenate(parts)) == list(range(len(costs)))
    assert all(len(part) <= most for part, most in zip(parts, limits, strict=True))


@given(seed=st.integers(0, 10_000), of=st.sampled_from([(20_000, 16), (2_000, 500), (300, 64)]))
@settings(max_examples=10)
def test_equal_counts_are_levelled(seed: int, of: tuple[int, int]) -> None:
    items, ranks = of
    costs = np.random.default_rng(seed).lognormal(5, 0.5, items // ranks * ranks)
    parts = partition(costs, ranks, equal_count=True)
    assert {len(part) for part in parts} == {items // ranks}
    few = 1.25 if items // ranks < 10 else 1.001
    even = max(costs.sum() / ranks, costs.max())
    assert slowest(parts, list(costs)) <= few * even


def test_padded_batches_hold_items_of_similar_lengths() -> None:
    lengths = [100.0] * 2 + [10.0] * 18
    parts = partition(lengths, 2, padded=True)
    assert padded(parts, lengths) <= 200


def test_speeds_are_learned() -> None:
    speeds, rng = Speeds(3), np.random.default_rng(0)
    costs = rng.lognormal(3, 1, 240)
    for _ in range(20):
        parts = partition(costs, 3, speeds=speeds)
        loads = [costs[part].sum() for part in parts]
        seconds = [load / speed + 0.1 for load, speed in zip(loads, [1, 1, 4], strict=True)]
        speeds.add(loads, seconds, [len(part) for part in parts])
    assert np.array(seconds) == pytest.approx(np.mean(seconds), rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([1, 2], 0), ValueError, "ranks=0: give 1 or more"),
        (([1, 2], 2.0), TypeError, "ranks=2.0: give a whole number"),
        (([1, -2], 2), ValueError, r"costs\[1\] = -2.0"),
        (([1, float("nan")], 2), ValueError, r"costs\[1\] = nan"),
        ((["a"], 2), TypeError, "costs: give a list of numbers"),
        (([[1.0]], 2), ValueError, r"costs: its shape is \[1, 1\]"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: tuple[Any, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        partition(*arguments)


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="speeds: its shape is"):
        partition([1, 2], 2, speeds=[1.0])
    with pytest.raises(ValueError, match="give numbers above 0"):
        partition([1, 2], 2, speeds=[1.0, 0.0])
    with pytest.raises(ValueError, match="limits: all ranks together hold 2 items, not 3"):
        partition([1, 2, 3], 2, limits=1)
    with pytest.raises(ValueError, match="speeds: they are of 3 ranks, not of 2"):
        partition([1, 2], 2, speeds=Speeds(3))
    with pytest.raises(ValueError, match="equal_count gives each rank 1 items"):
        partition([1, 2, 3, 4, 5], 3, limits=[1, 1, 9], equal_count=True)


def test_no_items() -> None:
    assert [part.tolist() for part in partition([], 2)] == [[], []]


def test_the_items_left_over_go_to_fast_ranks_with_room() -> None:
    limited = partition([1.0] * 5, 2, limits=[2, 3], equal_count=True)
    assert [len(part) for part in limited] == [2, 3]
    fast = partition([1.0] * 3, 2, speeds=[1, 10], equal_count=True)
    assert [len(part) for part in fast] == [1, 2]
