"""Numbers of samples and padded lengths on a grid."""

from __future__ import annotations

from itertools import chain, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batch_limits.shapes import Shapes, moved, moved_on_nodes, on_grid
from paceline.core.cost import PaddedCost, features
from paceline.core.ledger import BatchRules, Ledger
from paceline.core.terms import Terms

COUNTS = st.lists(st.integers(0, 60), min_size=1, max_size=7)


@given(COUNTS, st.integers(1, 20))
def test_counts_go_to_the_nearest_multiples(given_counts: list[int], grid: int) -> None:
    counts = np.array(given_counts)
    made = on_grid(counts, grid)
    assert made.sum() == counts.sum()
    assert made.min() >= 0
    off = made % grid
    assert off.sum() == counts.sum() % grid
    assert np.count_nonzero(off) <= 1
    assert (np.abs(made - counts) < 2 * grid).all()
    np.testing.assert_array_equal(on_grid(made, grid), made)


@given(st.data())
def test_limits_hold_and_leave_the_grid_only_where_they_must(data: st.DataObject) -> None:
    counts = np.array(data.draw(COUNTS))
    grid = data.draw(st.integers(1, 20))
    more = data.draw(st.lists(st.integers(0, 30), min_size=len(counts), max_size=len(counts)))
    limits = counts + np.array(more)
    made = on_grid(counts, grid, limits)
    assert made.sum() == counts.sum()
    assert (made >= 0).all()
    assert (made <= limits).all()
    fits = (np.minimum(limits, counts.sum()) // grid).sum() >= counts.sum() // grid
    if fits and counts.sum() % grid == 0:
        assert (made % grid == 0).all()


@given(st.data())
def test_ranks_with_samples_may_keep_some(data: st.DataObject) -> None:
    counts = np.array(data.draw(COUNTS))
    grid = data.draw(st.integers(1, 20))
    limits = counts + data.draw(st.sampled_from([0, 7, 60]))
    made = on_grid(counts, grid, limits, keep=True)
    assert made.sum() == counts.sum()
    assert (made <= limits).all()
    able = (counts > 0) & (limits >= grid)
    if grid * able.sum() <= counts.sum():
        assert (made[able] >= grid).all()
    else:
        np.testing.assert_array_equal(made, on_grid(counts, grid, limits))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.randoms())
def test_as_few_samples_as_possible_change_their_rank(ranks: list[int], random: Any) -> None:
    before = np.array(ranks)
    counts = np.bincount([random.randrange(5) for _ in ranks], minlength=5)
    after = moved(before, counts)
    np.testing.assert_array_equal(np.bincount(after, minlength=5), counts)
    surplus = np.maximum(np.bincount(before, minlength=5) - counts, 0).sum()
    assert np.count_nonzero(after != before) == surplus


@given(st.integers(1, 6), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_coasting_keeps_the_grid(world: int, grid: int, shared: bool) -> None:
    samples, batch = 83, 24
    shares = [1.0 + j for j in range(world)] if shared else []
    sizes = np.random.default_rng(1).lognormal(size=samples)
    order = np.random.default_rng(2).permutation(samples)
    seen = []
    ledger = Ledger(0, order, BatchRules(batch, grid=grid))
    for step in ledger.coast(99, world, sizes, shares):
        rests = [len(part) % grid for part in step]
        assert sum(rests) == sum(map(len, step)) % grid
        assert np.count_nonzero(rests) <= 1
        seen += list(chain(*step))
    assert sorted(seen) == list(range(samples))


def leaving(counts: Any, grid: int) -> int:
    """The fewest samples that leave their nodes, of all sums of nodes on the grid."""
    total = int(sum(counts))
    whole = range(total // grid + 1)
    least = total
    for blocks in product(whole, repeat=len(counts)):
        if sum(blocks) == total // grid:
            for rest in range(len(counts)):
                sums = grid * np.array(blocks)
                sums[rest] += total % grid
                least = min(least, int(np.maximum(counts - sums, 0).sum()))
    return least


@given(st.lists(st.integers(0, 25), min_size=3, max_size=6), st.integers(2, 9), st.data())
def test_as_few_samples_as_possible_change_their_node(
    given_counts: list[int], grid: int, data: st.DataObject
) -> None:
    counts, world = np.array(given_counts), len(given_counts)
    nodes = np.array([0, 1, 2] + [data.draw(st.integers(0, 2)) for _ in range(world - 3)])
    target = on_grid(counts, grid, None, nodes)
    assert target.sum() == counts.sum()
    assert np.count_nonzero(target % grid) <= 1
    ranks = np.random.default_rng(1).permutation(np.repeat(np.arange(world), counts))
    at_home = np.random.default_rng(2).random(len(ranks)) < data.draw(st.sampled_from([0.5, 1.0]))
    after = moved_on_nodes(ranks, target, nodes, at_home)
    np.testing.assert_array_equal(np.bincount(after, minlength=world), target)
    before = np.bincount(nodes, counts)
    left = nodes[ranks] != nodes[after]
    assert left.sum() == leaving(before, grid)
    given_away = np.maximum(before - np.bincount(nodes, target), 0)
    strange = np.bincount(nodes[ranks][~at_home], minlength=3)
    assert (left & at_home).sum() == np.maximum(given_away - strange, 0).sum()


@given(st.data())
def test_limits_hold_on_nodes_too(data: st.DataObject) -> None:
    counts = np.array(data.draw(COUNTS))
    grid, world = data.draw(st.integers(1, 20)), len(counts)
    limits = counts + np.array(
        data.draw(st.lists(st.integers(0, 30), min_size=world, max_size=world))
    )
    nodes = np.unique(
        data.draw(st.lists(st.integers(0, 2), min_size=world, max_size=world)), return_inverse=True
    )[1]
    made = on_grid(counts, grid, limits, nodes)
    assert made.sum() == counts.sum()
    assert (made >= 0).all()
    assert (made <= limits).all()
    blocks = min(int((np.minimum(limits, counts.sum()) // grid).sum()), int(counts.sum()) // grid)
    assert (made // grid).sum() >= blocks


def test_coasting_keeps_the_grid_where_samples_have_homes() -> None:
    sizes, order = np.random.default_rng(1).lognormal(size=83), np.arange(83)
    nodes = np.array([0, 0, 1, 1])
    of = np.random.default_rng(2).choice([0, 0, 1, -1], size=83)
    ledger = Ledger(0, order, BatchRules(24, grid=4))
    steps = ledger.coast(99, 4, sizes, [0.4, 0.2, 0.2, 0.2], (nodes, of))
    assert sorted(chain(*chain(*steps))) == list(range(83))
    for step in steps:
        assert np.count_nonzero([len(part) % 4 for part in step]) <= 1
        away = sum(
            int((of[part] == 1 - node).sum()) for part, node in zip(step, nodes, strict=True)
        )
        assert away <= 2, "half a step of the grid"


def test_padded_lengths_are_multiples() -> None:
    shapes = Shapes(samples=4, length=64)
    assert [shapes.padded(n) for n in (1, 64, 65, 128)] == [64, 64, 128, 128]
    assert Shapes().padded(37) == 37
    cost = PaddedCost(padded=True, grid=0.1)
    sizes, counts = np.array([0.3, 0.21, 0.05]), np.array([2, 1, 0])
    np.testing.assert_allclose(cost.sizes(sizes), [0.3, 0.3, 0.1])
    np.testing.assert_allclose(cost.load(features(sizes, counts)), [0.6, 0.1, 0.0])


@pytest.mark.parametrize("bad", [0, -8, 1.5, True, "8", Shapes])
def test_a_bad_grid_is_refused_by_name(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="shapes: samples is"):
        Shapes.of(bad)


def test_bad_lengths_and_grids_that_do_not_divide_the_global_batch_are_refused() -> None:
    for bad in (-1.0, float("nan"), float("inf"), "64"):
        with pytest.raises((TypeError, ValueError), match="shapes: length is"):
            Shapes(1, bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not divide global_batch=60"):
        Terms(100, 60, 0, False, "samples", 2, Shapes(8))
    assert Shapes.of(None) == Shapes()
    assert Shapes.of(8) == Shapes(8)
