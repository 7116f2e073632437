"""The min–max program over counts: the optimum, whatever the times."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from paceline.policies.base import Floats, Ints
from paceline.policies.solve.minmax import Times, minmax


def linear(slope: Floats, start: Floats) -> Times:
    return lambda counts: np.where(counts > 0, slope * counts + start, 0.0)


@settings(max_examples=3 * settings.default.max_examples)
@given(data=st.data())
def test_no_other_counts_are_better(data: st.DataObject) -> None:
    """Against brute force: any times that do not decrease, equal and zero ones included."""
    world, total = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 7))
    steps = st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0, 1e-9])
    row = st.lists(steps, min_size=total, max_size=total)
    table = np.cumsum([[0.0, *data.draw(row)] for _ in range(world)], axis=1)
    limits = np.array(data.draw(st.lists(st.integers(0, 7), min_size=world, max_size=world)))

    def times(counts: Ints) -> Floats:
        return np.asarray(table[np.arange(world), counts])

    allowed = itertools.product(*(range(min(limit, total) + 1) for limit in limits))
    makespans = [times(np.array(c)).max() for c in allowed if sum(c) == total]
    if not makespans:
        with pytest.raises(ValueError, match="fewer than the"):
            minmax(times, total, limits)
        return
    counts = minmax(times, total, limits)
    assert counts.sum() == total
    assert (counts >= 0).all()
    assert (counts <= limits).all()
    assert times(counts).max() == min(makespans)


@pytest.mark.parametrize("seed", range(4))
def test_as_good_as_an_integer_program(seed: int) -> None:
    """Against HiGHS: min t, s_j·n_j + o_j·y_j ≤ t, n_j ≤ limit_j·y_j, y_j whether j takes part."""
    rng = np.random.default_rng(seed)
    world, total = 6, 200
    slope, start = rng.uniform(1e-3, 1e-2, world), rng.uniform(0, 0.3, world)
    limits = rng.integers(30, 200, world)
    eye = np.eye(world)
    within = np.hstack([np.diag(slope), np.diag(start), -np.ones((world, 1))])
    taking_part = np.hstack([eye, -np.diag(limits), np.zeros((world, 1))])
    whole = np.concatenate([np.ones(world), np.zeros(world + 1)])
    solved = milp(
        np.append(np.zeros(2 * world), 1.0),
        integrality=np.append(np.ones(2 * world), 0),
        bounds=Bounds(0, np.concatenate([limits, np.ones(world), [np.inf]])),
        constraints=[
            LinearConstraint(within, ub=0),
            LinearConstraint(taking_part, ub=0),
            LinearConstraint(whole, total, total),
        ],
        options={"mip_rel_gap": 0},
    )
    times = linear(slope, start)
    assert times(minmax(times, total, limits)).max() == pytest.approx(solved.fun, rel=1e-6)


def test_many_workers_are_as_level_as_whole_samples_allow() -> None:
    """No worker could take over a sample of the slowest and be done before it."""
    rng = np.random.default_rng(1)
    world, total = 1024, 16_384
    times = linear(rng.uniform(1e-3, 1e-2, world), rng.uniform(0, 0.02, world))
    counts = minmax(times, total, np.full(world, total))
    assert counts.sum() == total
    assert times(counts + 1).min() >= times(counts).max()


@pytest.mark.parametrize("seed", range(15))
def test_of_equally_good_counts_the_first_worker_waits_least(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world, total = int(rng.integers(2, 5)), int(rng.integers(3, 9))
    times = linear(rng.integers(1, 7, world).astype(float), rng.integers(0, 5, world).astype(float))
    every = [np.array(c) for c in itertools.product(range(total + 1), repeat=world)]
    made = {tuple(c): times(c) for c in every if c.sum() == total}
    makespan = min(float(each.max()) for each in made.values())
    latest = max(float(each.min()) for each in made.values() if each.max() == makespan)
    mine = times(minmax(times, total, np.full(world, total)))
    assert (mine.max(), mine.min()) == (makespan, latest)
