"""Presets of counts that act on the ranks' times do no harm where ranks are equally fast."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from paceline import policies
from paceline.core.cost import SUM, Cost
from paceline.core.emulation import Emulation
from support.simulated import simulate

PRESETS = ("lbb", "dynamic-batching")
WORLD, STEPS = 4, 300


@cache
def taken_s(preset: str, spread: float, seed: int, cost: Cost, slower: float) -> float:
    """What the steps take: four samples a rank, lognormal sizes; half of the ranks are slower."""
    sizes = np.random.default_rng(seed).lognormal(4, spread, 64 * 4 * WORLD)
    devices = Emulation(
        a_s=np.resize([1e-3, slower * 1e-3], WORLD).tolist(),
        b_s=[0.005] * WORLD,
        cost=cost,
        noise=0.03,
        seed=seed,
    )
    ran = simulate(policies.make(preset), devices, sizes, 4 * WORLD, STEPS)
    return float(ran.step_s.sum())


def over_bsp(
    preset: str, spread: float, seed: int, *, cost: Cost = SUM, slower: float = 1.0
) -> float:
    """The preset's time over `bsp`'s."""
    plain_s = taken_s("bsp", spread, seed, cost, slower)
    return taken_s(preset, spread, seed, cost, slower) / plain_s


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("spread", "seed"), [(0.0, 4), (0.3, 0), (0.8, 1), (1.3, 2)])
def test_no_harm_on_equal_ranks(preset: str, spread: float, seed: int) -> None:
    assert over_bsp(preset, spread, seed) <= 1.01


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("cost", [Cost(padded=True), Cost(kappa=0.02)], ids=["padded", "quadratic"])
def test_no_harm_whatever_samples_cost(preset: str, cost: Cost) -> None:
    assert over_bsp(preset, 0.8, 3, cost=cost) <= 1.01


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("spread", [0.0, 0.8])
def test_uneven_ranks_gain(preset: str, spread: float) -> None:
    """The best whole counts take 0.75 of `bsp`'s time if sizes are equal: 3 and 5 samples."""
    assert over_bsp(preset, spread, 1, slower=2.0) < 0.9
