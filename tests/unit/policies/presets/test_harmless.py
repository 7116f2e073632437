"""Presets of counts that act on the ranks' times do no harm where ranks are equally fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.core.cost import SUM, Cost
from paceline.core.emulation import Emulation
from paceline_backend import policies
from support.simulated import simulate

PRESETS = ("lbb", "dynamic-batching")
STEPS = 300


def over_bsp(
    preset: str,
    parameters: dict[str, Any],
    world: int,
    *,
    spread: float,
    seed: int,
    cost: Cost = SUM,
    factors: tuple[float, ...] = (1.0,),
) -> float:
    """The preset's time for 300 steps over `bsp`'s; four samples a rank, lognormal sizes."""
    sizes = np.random.default_rng(seed).lognormal(4, spread, 64 * 4 * world)
    devices = Emulation(
        a_s=np.resize([1e-3 * factor for factor in factors], world).tolist(),
        b_s=[0.005] * world,
        cost=cost,
        noise=0.03,
        seed=seed,
    )
    of_preset, of_bsp = (
        simulate(policies.make(name, values), devices, sizes, 4 * world, STEPS).step_s.sum()
        for name, values in ((preset, parameters), ("bsp", {}))
    )
    return float(of_preset / of_bsp)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("spread", "seed"), [(0.3, 0), (0.8, 1), (1.3, 2)])
def test_no_harm_on_equal_ranks(preset: str, spread: float, seed: int) -> None:
    assert over_bsp(preset, {}, 4, spread=spread, seed=seed) <= 1.01


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("cost", [Cost(padded=True), Cost(kappa=0.02)], ids=["padded", "quadratic"])
def test_no_harm_whatever_samples_cost(preset: str, cost: Cost) -> None:
    assert over_bsp(preset, {}, 4, spread=0.8, seed=3, cost=cost) <= 1.01


@pytest.mark.parametrize("preset", PRESETS)
def test_uneven_ranks_gain_as_much_as_by_measured_times(preset: str) -> None:
    """A seventh of a rank's time is one sample of its batch here."""
    figures = [
        over_bsp(preset, {"times": times}, 4, spread=0.8, seed=1, factors=(1.0, 2.0))
        for times in ("typical", "measured")
    ]
    assert figures[0] <= figures[1]
    assert figures[0] < 0.9
