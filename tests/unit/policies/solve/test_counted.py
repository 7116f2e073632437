"""From counts to batches: rounding, bounds, dealing, and what an allocator remembers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline import policies
from paceline.core.cost import Cost
from paceline.core.emulation import Emulation
from paceline.policies import plan
from paceline.policies.base import Feedback, Floats, Ints, Models, Problem
from paceline.policies.solve import counts as counted
from support.cluster import Cluster, plaid_like
from support.simulated import simulate

PRESETS = ["boa", "sata", "lbb", "static-batching", "dynamic-batching"]


def problem(world: int, batch: int, **fields: Any) -> Problem:
    training = Cluster(np.ones(10 * batch), np.ones(world), np.zeros(world), batch)
    return replace(training.problem(1, shuffle=False), **fields)


@given(data=st.data())
def test_spread_keeps_sum_bounds_and_proportions(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 6))
    vector = st.lists(st.integers(0, 20), min_size=world, max_size=world).map(np.array)
    low, room, shares = data.draw(vector), data.draw(vector), data.draw(vector).astype(float)
    high = low + room
    total = data.draw(st.integers(int(low.sum()), int(high.sum())))
    target = counted.spread(shares, total, low, high)
    assert target.sum() == pytest.approx(total)
    assert (target >= low).all()
    assert (target <= high).all()
    # Optimal: at one level of `target / shares`, those below it are at their upper bound, …
    inside = (target > low + 1e-9) & (target < high - 1e-9) & (shares > 0)
    if inside.any():
        level = (target[inside] / shares[inside]).mean()
        assert target[inside] == pytest.approx(level * shares[inside])
        outside = ~inside & (shares > 0)
        wanted = np.clip(level * shares, low, high)
        assert target[outside] == pytest.approx(wanted[outside])
    counts = counted.rounded(target)
    assert counts.sum() == total
    assert (counts >= low).all()
    assert (counts <= high).all()
    assert np.abs(counts - target).max() < 1


@pytest.mark.parametrize(
    ("target", "counts"),
    [
        ([1.5, 0.5], [2, 0]),
        ([3.34, 3.33, 3.33], [4, 3, 3]),
        ([0.4, 0.4, 0.2], [1, 0, 0]),
        ([127.99999999999, 2.00000000001], [128, 2]),
    ],
)
def test_largest_remainder(target: list[float], counts: list[int]) -> None:
    assert counted.rounded(np.array(target)).tolist() == counts


def test_bounds_give_way_where_no_counts_are_left() -> None:
    low, high = counted.bounds(problem(3, 12, limits=np.array([2, 5, 40])), least=1)
    assert (low.tolist(), high.tolist()) == ([1, 1, 1], [2, 5, 12])
    _, high = counted.bounds(problem(3, 12), most=np.array([2, 3, 8]))
    assert high.tolist() == [2, 3, 8]
    _, high = counted.bounds(problem(3, 12, limits=np.array([9, 9, 9])), most=np.array([1, 2, 3]))
    assert high.tolist() == [9, 9, 9]
    low, _ = counted.bounds(problem(5, 3), least=1)
    assert low.tolist() == [0] * 5
    _, high = counted.bounds(problem(2, 12, limits=np.array([2, 4])))
    assert high.tolist() == [4, 8]
    _, high = counted.bounds(problem(2, 12, limits=np.array([0, 0])))
    assert high.tolist() == [12, 12]


@pytest.mark.parametrize("world", [1, 3, 4, 7])
def test_equal_counts_are_plain_ddp(world: int) -> None:
    """Sample by sample, in an epoch's last, smaller batch too."""
    training = Cluster(plaid_like(107), np.ones(world), np.zeros(world), 20)
    steps = training.problem(9, shuffle=True)
    parts = [
        plan(policies.make(name), steps, Feedback.empty(), shuffle=True)[0].assignment.parts
        for name in ("bsp", "static-batching", "sata")
    ]
    for other in parts[1:]:
        for step, expected in zip(other, parts[0], strict=True):
            for part, ddp in zip(step, expected, strict=True):
                np.testing.assert_array_equal(part, ddp)


def batches(which: str, counts: Ints, sizes: Floats, batch: int) -> list[list[Ints]]:
    world = len(counts)
    training = Cluster(sizes, np.ones(world), np.zeros(world), batch)
    given = {"capacity": counts.tolist(), "which": which}
    made = training.plan(policies.make("static-batching", given), 100)
    return made.assignment.parts


@pytest.mark.parametrize("which", ["order", "levelled"])
def test_batches_hold_the_same_samples_whatever_the_counts(which: str) -> None:
    sizes = plaid_like(203)
    ddp = batches("order", np.array([1, 1, 1]), sizes, 30)
    for step, expected in zip(batches(which, np.array([3, 2, 1]), sizes, 30), ddp, strict=True):
        assert set(np.concatenate(step)) == set(np.concatenate(expected))
        share = sum(map(len, expected)) / 30
        assert [len(part) for part in step] == pytest.approx(
            [15 * share, 10 * share, 5 * share], abs=0.99
        )


def test_levelled_loads_are_in_proportion_to_the_counts() -> None:
    sizes, counts = plaid_like(960), np.array([12, 8, 6, 6])

    def error(which: str) -> float:
        steps = batches(which, counts, sizes, 32)
        loads = np.array([[sizes[part].sum() for part in step] for step in steps])
        wanted = loads.sum(axis=1, keepdims=True) * counts / counts.sum()
        return float(np.abs(loads / wanted - 1).max())

    assert error("levelled") < 0.02
    assert error("order") > 0.2


def test_levelled_by_what_batches_cost() -> None:
    """Quadratic in length, which is learned: until then by the sum of the sizes."""
    devices = Emulation(a_s=[1e-6, 1e-6, 2e-6], b_s=[0.0] * 3, cost=Cost(kappa=0.01))
    policy = policies.make("static-batching", {"capacity": [2, 2, 1], "which": "levelled"})
    ran = simulate(policy, devices, plaid_like(960), 40, 48)
    spread = np.ptp(ran.compute_s, axis=1) / ran.compute_s.mean(axis=1)
    assert spread[:2].max() > 0.05
    assert spread[-24:].max() < 0.012


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    "memory",
    [
        {},
        {"counts": [3, 3, 2]},  # of another world
        {"counts": [5, 5]},  # of another global batch
        {"counts": [4, 4], "weights": "?"},
        {"other": [1, 2]},
    ],
)
def test_a_memory_that_does_not_fit_is_a_beginning(name: str, memory: dict[str, Any]) -> None:
    fresh, _ = plan(policies.make(name), problem(2, 8), Feedback.empty(), shuffle=True)
    made, _ = plan(
        policies.make(name), problem(2, 8, memory=memory), Feedback.empty(), shuffle=True
    )
    assert made.assignment.counts.tolist() == [[4, 4]]
    assert made.memory == fresh.memory


@pytest.mark.parametrize("name", PRESETS)
def test_memory_survives_its_way_and_memory_limits_hold(name: str) -> None:
    training = Cluster(np.ones(2_000), np.array([1e-3, 1e-3, 4e-3]), np.zeros(3), 60)
    policy = policies.make(name)
    limits = np.array([60, 22, 60])
    memory: dict[str, Any] = {}
    seen = []
    for step in range(0, 60, 2):
        shuffle = training.placement is None
        made, shuffled = plan(
            policy,
            replace(training.problem(2, shuffle=shuffle), limits=limits, memory=memory),
            training.feedback(),
            shuffle=shuffle,
        )
        assert training.step == step
        training.placement, training.order = shuffled.placement, shuffled.order
        memory = msgspec.msgpack.decode(msgspec.msgpack.encode(made.memory))
        assert memory == made.memory
        assert (made.assignment.counts <= limits).all()
        training.train(made.assignment.parts, epoch_end=made.epoch_end)
        seen.append(made.assignment.counts[0].tolist())
    if name != "static-batching":
        assert seen[-1] == pytest.approx([31, 22, 7], abs=1.1)
    assert any(a != b for a, b in pairwise(seen)) == (name != "static-batching")


@given(
    arrays(np.float64, st.integers(1, 30), elements=st.floats(1, 100)),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
)
def test_typical_times_are_those_of_batches_drawn_at_random(
    sizes: Floats, counts: list[int]
) -> None:
    """Summed: linear in the samples. Padded: between the mean and the longest size."""
    n, world = np.array(counts), len(counts)
    models = Models(np.arange(1.0, world + 1), np.full(world, 0.5), np.full(world, 2.0))
    plain = models.a * n * sizes.mean() + 0.5 * n + 2.0
    summed = counted.typical_s(models, n, sizes)
    assert summed == pytest.approx(np.where(n > 0, plain, 0.0))
    padded = counted.typical_s(replace(models, cost=Cost(padded=True)), n, sizes)
    assert (padded >= summed - 1e-6).all()
    longest = models.a * n * sizes.max() + 0.5 * n + 2.0
    assert (padded <= np.where(n > 0, longest, 0.0) + 1e-6).all()
    assert padded[n == 1] == pytest.approx(summed[n == 1])


def test_padded_typical_times_against_drawn_batches() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(4, 0.5, 20_000)
    models = Models(np.ones(2), np.zeros(2), np.zeros(2), cost=Cost(0.01, padded=True))
    longest = rng.choice(sizes, (100_000, 8)).max(axis=1)
    drawn = 8 * float((longest + 0.01 * longest**2).mean())
    assert counted.typical_s(models, np.array([8, 0]), sizes) == pytest.approx(
        [drawn, 0.0], rel=0.02
    )
