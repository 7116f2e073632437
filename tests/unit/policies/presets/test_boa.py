"""BOA: its model of time on batch size, and batch sizes that no integer program betters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline import policies
from paceline.core.emulation import Emulation
from paceline.policies.base import Feedback, Models
from paceline.policies.presets.boa import MinMaxAllocator, line, profiled, solve
from paceline_backend.simulator import Simulation
from support.cluster import Cluster
from support.simulated import endless


def cluster(world: int, global_batch: int) -> Cluster:
    return Cluster(np.ones(400), np.ones(world), np.zeros(world), global_batch)


def models(c: list[float], b: list[float]) -> Models:
    return Models(np.full(len(c), 1e-12), np.array(c), np.array(b))


def test_learns_slope_and_start() -> None:
    samples = np.random.default_rng(0).integers(8, 64, 40).astype(np.float64)
    assert line(samples, 2e-3 * samples + 0.03) == pytest.approx((2e-3, 0.03), rel=0.02)


def test_batch_sizes_that_do_not_vary_leave_no_start() -> None:
    """Else noise would tell c from b, and a worker could seem to do any number at no cost."""
    times = 0.1 + 0.02 * np.random.default_rng(0).standard_normal(64)
    samples = np.full(64, 16.0)
    samples[::8] = 17
    slope, start = line(samples, times)
    assert 16 * slope + start == pytest.approx(0.1, rel=0.05)
    assert 32 * slope + start == pytest.approx(0.2, rel=0.15)


def test_a_profiling_phase_counts_before_the_first_step() -> None:
    profiles = [[(n, c * n + 0.1) for n in (2, 4, 8, 16)] for c in (0.01, 0.03)]
    problem = replace(cluster(2, 40).problem(1, shuffle=False), profiles=profiles)
    made = MinMaxAllocator().allocate(problem, Models.unknown(2), Feedback.empty())
    assert profiled(profiles).c == pytest.approx([0.01, 0.03], rel=0.01)
    assert made.counts.tolist() == [30, 10]


def test_levels_devices_but_not_sizes() -> None:
    """Equal sizes: as fast as whole samples allow. Unequal ones: a straggler in each step stays."""
    devices = Emulation(a_s=[0.0] * 4, c_s=[0.01, 0.01, 0.015, 0.03], b_s=[0.02] * 4)
    run = Simulation(endless(np.ones(2_000), 4, 64), devices, policies.make("boa"))
    while run.step < 100:
        ran = run.advance()
    best = solve(models(devices.c_s, devices.b_s), run.history.problem(1, 0, shuffle=False))
    assert ran.compute_s.max() == pytest.approx(np.max(best * devices.c_s) + 0.02)
    assert np.abs(np.array(ran.plan.ett_s) / ran.compute_s - 1).max() < 0.02

    sizes = np.random.default_rng(0).lognormal(3, 1, 2_000)
    devices = Emulation(a_s=[1e-3, 1e-3, 1.5e-3, 3e-3], b_s=[0.0] * 4)
    run = Simulation(endless(sizes, 4, 64), devices, policies.make("boa"))
    slowest = []
    while run.step < 100:
        ran = run.advance()
        slowest += (ran.compute_s.max(axis=1) / ran.compute_s.mean(axis=1)).tolist()
    assert 1.1 < np.mean(slowest[50:]) < 1.6
