"""Static batching: counts in proportion to capacities, whatever happens."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.emulation import Emulation
from paceline_backend import policies
from paceline_backend.policies.presets.static_batching import counts_of
from support.cluster import Cluster
from support.simulated import simulate


@pytest.mark.parametrize(
    ("capacity", "counts"),
    [
        ((9.0, 12.0, 18.0), [9, 12, 18]),  # the paper's 39 cores at heterogeneity level 2
        ((2.0, 17.0, 20.0), [2, 17, 20]),  # and at 10
        ((1e13, 1e13, 2e13), [10, 10, 19]),  # FLOP/s
        ((1e-9, 1.0, 1.0), [0, 20, 19]),
        ((), [13, 13, 13]),
        ((1.0, 2.0), [13, 13, 13]),  # the run came back with other ranks
    ],
)
def test_counts_are_in_proportion(capacity: tuple[float, ...], counts: list[int]) -> None:
    problem = Cluster(np.ones(390), np.ones(3), np.zeros(3), 39).problem(1, shuffle=False)
    assert counts_of(capacity, problem).tolist() == counts


def test_time_tells_it_nothing() -> None:
    devices = Emulation(a_s=[1e-3, 1e-3, 9e-3], b_s=[0.0] * 3)
    policy = policies.make("static-batching", {"capacity": [1, 2, 3]})
    ran = simulate(policy, devices, np.ones(120), 12, 30)
    assert ran.counts.tolist() == [[2, 4, 6]] * 30


def test_right_capacities_are_the_optimum_at_once() -> None:
    cores = np.array([2, 17, 20])
    devices = Emulation(a_s=(1 / cores).tolist(), b_s=[0.0] * 3)
    policy = policies.make("static-batching", {"capacity": cores.tolist()})
    right = simulate(policy, devices, np.ones(390), 39, 10)
    equal = simulate(policies.make("bsp"), devices, np.ones(390), 39, 10)
    assert right.step_s == pytest.approx(1.0)
    assert equal.step_s == pytest.approx(6.5)
