"""Partitions while the cost of a batch is not decided."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.cost import SUM, Cost, features
from paceline.policies import Models
from paceline.policies.solve.balance import grouped, partition
from paceline.policies.solve.hedged import partition_hedged

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def models(speeds: Floats, cost: Cost = SUM) -> Models:
    nothing = np.zeros(len(speeds))
    return Models(speeds, nothing, nothing, cost=cost)


def undecided(speeds: Floats, chance: float = 0.5) -> Models:
    rival = models(speeds, Cost(padded=True))
    return Models(speeds, rival.c, rival.b, rivals=((chance, rival),))


def slowest(sizes: Floats, of: Models, ranks: Ints) -> float:
    order, counts = grouped(ranks, of.world)
    return float(of.ett(features(sizes[order], counts)).max())


def lengths(count: int, seed: int = 0) -> Floats:
    return np.asarray(np.random.default_rng(seed).lognormal(0, 1, count))


@pytest.mark.parametrize("speeds", [[1.0, 1.0], [1.0, 2.0], [1.0] * 8, [1.0, 1.5, 2.0, 3.0]])
def test_is_good_under_both_costs(speeds: list[float]) -> None:
    a = np.array(speeds)
    sizes = lengths(32 * len(a))
    ranks = partition_hedged(sizes, undecided(a))
    for cost in (SUM, Cost(padded=True)):
        of = models(a, cost)
        assert slowest(sizes, of, ranks) < 1.35 * slowest(sizes, of, partition(sizes, of))


@given(
    st.integers(0, 99),
    st.integers(1, 40),
    st.lists(st.floats(0.5, 4), min_size=1, max_size=6),
    st.floats(0.01, 0.99),
)
def test_no_costs_own_partition_is_better_on_average(
    seed: int, count: int, speeds: list[float], chance: float
) -> None:
    a, sizes = np.array(speeds), lengths(count, seed)
    either = undecided(a, chance)
    weighed = either.weighed()
    own = [partition(sizes, of) for _, of in weighed]
    best = [min(slowest(sizes, of, ranks) for ranks in own) for _, of in weighed]

    def over(ranks: Ints) -> float:
        return sum(
            share * slowest(sizes, of, ranks) / least
            for (share, of), least in zip(weighed, best, strict=True)
        )

    ranks = partition_hedged(sizes, either)
    assert len(ranks) == count
    assert over(ranks) <= min(over(each) for each in own) * (1 + 1e-9)


@given(st.integers(0, 99), st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_keeps_memory_limits(seed: int, limits: list[int]) -> None:
    a, most = np.array([1.0, 1.0, 2.0, 3.0]), np.array(limits)
    count = int(most.sum())
    ranks = partition_hedged(lengths(count, seed), undecided(a), most)
    assert (np.bincount(ranks, minlength=4) <= most).all()


def test_without_rivals_it_is_the_costs_own_partition() -> None:
    sizes, sure = lengths(64), models(np.array([1.0, 2.0]))
    assert (partition_hedged(sizes, sure) == partition(sizes, sure)).all()
