"""Dynamic batching: Eqs. 4–5, dead band, smoothing, bounds, and convergence."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import policies
from paceline.core.cost import Cost
from paceline.core.emulation import Emulation, Slowdown
from paceline.policies.base import Feedback, Floats, Models
from paceline.policies.presets.dynamic_batching import DynamicAllocator, margin, proportional
from support.cluster import Cluster
from support.simulated import Trained, feedback_of, simulate

# Workers of Fig. 4: 3, 5 and 12 cores, which begin with equal batches.
CORES = np.array([3, 5, 12])


class Loop:
    """An allocator, called as for one segment after the other."""

    def __init__(
        self, world: int, batch: int, allocator: DynamicAllocator, sizes: Floats | None = None
    ) -> None:
        sizes = np.ones(batch) if sizes is None else sizes
        self.training = Cluster(sizes, np.ones(world), np.zeros(world), batch)
        self.allocator = allocator
        self.memory: dict[str, Any] = {}
        self.models = Models.unknown(world)
        self.counts = self({})

    def __call__(self, feedback: Feedback | dict[str, Any]) -> list[int]:
        problem = self.training.problem(1, shuffle=False)
        object.__setattr__(problem, "memory", self.memory)
        rows = feedback if isinstance(feedback, Feedback) else Feedback.empty()
        made = self.allocator.allocate(problem, self.models, rows)
        self.memory, self.counts = dict(made.memory), made.counts.tolist()
        return self.counts

    def trained(self, times: list[list[float]]) -> list[int]:
        """What comes of steps with such times, of the counts in force."""
        first = self.training.step
        self.training.step += len(times)
        return self(feedback_of(times, self.counts, first))


def test_equations_4_and_5_as_printed() -> None:
    counts, mean_s = np.array([12, 20, 7]), np.array([0.3, 0.1, 0.2])
    rate: Floats = counts / mean_s
    printed = counts - rate * (mean_s - mean_s.mean())
    assert proportional(counts, mean_s) == pytest.approx(printed)


@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_rounding_does_not_swing_with_noise(slower: float) -> None:
    """Batches of 4 and 5: one sample is more than the dead band, but what it came from is not."""
    devices = Emulation(a_s=[1e-3, slower * 1e-3], b_s=[0.0] * 2, noise=0.02)
    ran = simulate(policies.make("dynamic-batching"), devices, np.ones(900), 9, 900)
    assert len(ran.changes()) <= 1


def test_a_batch_that_made_a_worker_slower_becomes_its_bound() -> None:
    loop = Loop(2, 100, DynamicAllocator(smoothing=1.0, every_steps=1, forget_steps=50))
    assert loop.trained([[1.0, 3.0]]) == [75, 25]
    # Rank 0 did 50 samples/s with 50, and 45 with 75: by the times alone it would get 73.
    assert loop.trained([[75 / 45, 1.5]]) == [50, 50]
    assert loop.memory["most"] == [50, 100]
    assert loop.trained([[1.0, 3.0]]) == [50, 50]
    loop.training.step += 50
    assert loop.trained([[1.0, 3.0]]) == [75, 25]


def test_a_bound_is_learned_from_a_raise_alone() -> None:
    """Slower with fewer samples, or long after the change, says nothing of larger batches."""
    loop = Loop(2, 100, DynamicAllocator(smoothing=1.0, every_steps=1))
    assert loop.trained([[1.0, 3.0]]) == [75, 25]
    assert loop.trained([[1.5, 3.0]])[1] < 25
    loop.trained([[1.5, 1.5]])
    loop.trained([[9.0, 1.5]])
    assert loop.memory["most"] == [100, 100]


@pytest.mark.parametrize("level", [1, 4, 7, 10])
def test_converges_within_two_adjustments(level: int) -> None:
    """Heterogeneity levels 1–10 of the paper: 39 cores on three workers, slowest : fastest."""
    small, large = 2 * 39 / (3 * (1 + level)), 2 * 39 * level / (3 * (1 + level))
    cores = np.array([small, 39 - small - large, large])
    devices = Emulation(a_s=(0.1 / cores).tolist(), b_s=[0.0] * 3)
    ran = simulate(policies.make("dynamic-batching"), devices, np.ones(3_900), 390, 40)
    bsp = simulate(policies.make("bsp"), devices, np.ones(3_900), 390, 40)
    assert len(ran.changes()) <= 2
    assert ran.counts[-1] == pytest.approx(390 * cores / 39, abs=1)
    # What the paper reaches too, up to its network: uniform batches last (1 + level) / 2 times.
    assert bsp.step_s[-1] / ran.step_s[-1] == pytest.approx((1 + level) / 2, rel=0.03)


def uneven(steps: int, seed: int, *slowdowns: Slowdown, **parameters: Any) -> Trained:
    """Fig. 4: equal batches at first, times with 5 % noise."""
    devices = Emulation(
        a_s=(1 / CORES).tolist(),
        b_s=[0.0] * 3,
        noise=0.05,
        slowdowns=list(slowdowns),
        seed=seed,
    )
    policy = policies.make("dynamic-batching", parameters)
    return simulate(policy, devices, np.ones(30_000), 300, steps, seed=seed)


@pytest.mark.parametrize("seed", range(12))
def test_settles_after_two_adjustments_in_spite_of_noise(seed: int) -> None:
    ran = uneven(120, seed)
    assert 1 <= len(ran.changes()) <= 2
    assert ran.counts[-1] == pytest.approx(300 * CORES / 20, rel=0.06)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_a_change_of_speed_is_followed(factor: float, seed: int) -> None:
    """The fastest worker gets slower at step 100; batches fit again 40 steps later."""
    ran = uneven(200, seed, Slowdown([2], factor, first_step=100))
    speeds = CORES / [1, 1, factor]
    assert ran.counts[150] == pytest.approx(300 * speeds / speeds.sum(), rel=0.1)
    assert 1 <= sum(step > 100 for step in ran.changes()) <= 4


def test_without_smoothing_or_dead_band_batches_follow_the_noise() -> None:
    settled = len(uneven(120, 0).changes())
    assert len(uneven(120, 0, smoothing=1.0).changes()) > settled + 5
    assert len(uneven(120, 0, dead_band=0.0).changes()) > settled + 5


def test_smoothing_has_no_effect_where_sizes_differ() -> None:
    """The page hides it there, see `ONE_SIZE`."""
    sizes = np.resize([0.5, 1.0, 1.5], 3000)
    devices = Emulation(a_s=(1 / CORES).tolist(), b_s=[0.0] * 3, noise=0.05)
    ran = [
        simulate(policies.make("dynamic-batching", given), devices, sizes, 300, 60, lookahead=0)
        for given in ({"smoothing": 1.0}, {"smoothing": 0.01})
    ]
    assert (ran[0].counts == ran[1].counts).all()
    assert policies.properties(policies.get("dynamic-batching").parameters)["smoothing"]["oneSize"]


def test_small_steps_do_not_count() -> None:
    """An epoch's last step of four samples: whole counts are far from the proportions."""
    devices = Emulation(a_s=(1 / CORES).tolist(), b_s=[0.05] * 3)
    ran = simulate(policies.make("dynamic-batching"), devices, np.ones(3 * 300 + 4), 300, 160)
    full = ran.counts[ran.counts.sum(axis=1) == 300]
    assert (full[60:] == full[-1]).all()


def test_small_steps_do_not_bring_the_next_change_closer() -> None:
    loop = Loop(2, 100, DynamicAllocator(every_steps=2, dead_band=0.0))
    assert loop.trained([[1.0, 3.0]]) == [50, 50]
    loop.training.step += 1
    small = feedback_of([[0.5, 0.5]], [20, 20], first=loop.training.step - 1)
    assert loop(small) == [50, 50]
    assert loop.memory["steps"] == 1
    assert loop.trained([[1.0, 3.0]]) == [75, 25]


@given(st.floats(0, 1), st.floats(0.01, 1), st.integers(0, 1000))
def test_the_dead_band_narrows_to_its_width(dead_band: float, smoothing: float, steps: int) -> None:
    now, later = (margin(dead_band, smoothing, n) for n in (steps, steps + 1))
    assert now >= later >= dead_band
    assert margin(dead_band, smoothing, 200) == dead_band
    assert margin(dead_band, 1.0, steps) == dead_band


@pytest.mark.parametrize(("slower", "bounded"), [(1.0, False), (1.2, True)])
def test_bounds_are_learned_from_what_models_do_not_explain(slower: float, bounded: bool) -> None:
    """Rank 1 gives samples to rank 0, which then takes longer for each than expected, or not."""
    loop = Loop(2, 100, DynamicAllocator(every_steps=1), np.resize([0.5, 1.5], 100))
    loop.models = Models(np.array([1.0, 3.0]), np.zeros(2), np.zeros(2))
    before = feedback_of([[50.0, 150.0]], [50, 50])
    loop.training.step = 1
    assert loop(before) == [75, 25]
    after = feedback_of([[75.0 * slower, 75.0]], [75, 25], first=1)
    both = Feedback(
        *(
            np.concatenate([getattr(part, field.name) for part in (before, after)])
            for field in fields(Feedback)
        )
    )
    loop.training.step = 2
    loop(both)
    assert loop.memory["most"] == ([50, 100] if bounded else [100, 100])


def test_steps_back_and_forth_are_halved() -> None:
    """Padded batches: the whole change would give the long batches to the others."""
    sizes = np.random.default_rng(0).lognormal(4, 0.8, 1024)
    devices = Emulation(a_s=[1e-3] * 4, b_s=[5e-3] * 4, cost=Cost(0.02, padded=True), noise=0.03)
    ran = simulate(policies.make("dynamic-batching"), devices, sizes, 16, 200)
    assert ran.counts[-1].tolist() == [4, 4, 4, 4]
    assert len(ran.changes()) < 10
