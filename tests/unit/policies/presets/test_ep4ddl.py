"""EP4DDL: what its GRU foresees, which threads it picks, and what it learns of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import policies
from paceline.core.emulation import Emulation
from paceline.policies.base import Feedback, Ints
from paceline.policies.predict.gru import GruPredictor
from paceline.policies.presets.ep4ddl import (
    least_variance,
    serial_share,
    shortened,
)
from paceline_backend.simulator import Simulation
from support.cluster import Cluster
from support.simulated import endless, feedback_of


def test_foresees_a_rhythm() -> None:
    """Which a mean, or a line on load, cannot."""
    times = np.tile([[1.0, 0.5], [2.0, 0.5]], (32, 1))
    models = GruPredictor().fit(feedback_of(times), world=2)
    assert models.b == pytest.approx([1.0, 0.5], rel=0.15)


def test_follows_the_last_steps() -> None:
    """A worker that slowed down: not the mean of the window."""
    models = GruPredictor().fit(feedback_of(np.repeat([[1.0], [3.0]], [40, 9], axis=0)), world=1)
    assert models.b == pytest.approx([3.0], rel=0.1)
    few = GruPredictor().fit(feedback_of(np.array([[1.0], [2.0]])), world=1)
    assert few.b == pytest.approx([1.5])


def test_the_same_times_give_the_same_forecast_and_leave_torch_alone() -> None:
    rows = feedback_of(np.random.default_rng(0).uniform(1, 2, (64, 4)))
    torch.manual_seed(1)
    threads, random = torch.get_num_threads(), torch.random.get_rng_state()
    with torch.no_grad():
        first = GruPredictor().fit(rows, world=4).b
    assert torch.equal(torch.random.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    np.testing.assert_array_equal(first, GruPredictor().fit(rows, world=4).b)


def test_unknown_until_every_rank_has_a_row() -> None:
    assert not GruPredictor().fit(Feedback.empty(), world=2).known
    assert not GruPredictor().fit(feedback_of(np.array([[1.0, 0.0]])), world=2).known


@given(data=st.data())
def test_no_other_threads_vary_less(data: st.DataObject) -> None:
    world, most = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    seconds = st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.7, 3.0, 12.0])
    times = np.array(data.draw(st.lists(seconds, min_size=world, max_size=world)))
    cores = data.draw(st.integers(0, world * most + 1))
    serial = data.draw(st.sampled_from([0.0, 0.1, 0.6, 1.0]))
    threads = least_variance(times, most, cores, serial)

    def variance(threads: Ints) -> float:
        return float(np.var(times * shortened(threads, serial)))

    allowed = [
        np.array(c)
        for c in itertools.product(range(1, most + 1), repeat=world)
        if not cores or sum(c) <= max(cores, world)
    ]
    least = min(map(variance, allowed))
    slack = 1e-9 * variance(np.ones(world, np.int64)) + 1e-18
    assert any(np.array_equal(threads, c) for c in allowed)
    assert variance(threads) <= least + slack


@pytest.mark.parametrize("world", [64, 1024])
def test_many_workers_are_nearly_level(world: int) -> None:
    times = np.random.default_rng(0).uniform(1, 3, world)
    threads = least_variance(times, 8, 3 * world, 0.1)
    assert threads.sum() <= 3 * world
    left = (times * shortened(threads, 0.1)).std()
    assert left < 0.35 * times.std()


def test_learns_what_threads_do_not_shorten() -> None:
    threads = np.array([1, 2, 4, 3])
    assert serial_share(shortened(threads, 0.3), threads) == pytest.approx(0.3)
    assert serial_share(np.array([1, 30.0, 30.0, 30.0]), threads) == 1.0  # slower with threads


def simulate(serial: float, slowness: list[float], **parameters: float) -> list[Simulation]:
    """A run under ep4ddl, and the same under bsp."""
    devices = Emulation([1e-3 * s for s in slowness], [0.0] * len(slowness), serial=serial)
    start = endless(np.ones(2_048), len(slowness), 64)
    made = policies.make("ep4ddl", parameters)
    return [Simulation(start, devices, made), Simulation(start, devices, policies.make("bsp"))]


def test_gives_slow_ranks_threads_and_keeps_batches_equal() -> None:
    run, plain = simulate(0.3, [1, 1, 1.5, 3])
    seen = []
    while run.step < 80:
        ran = run.advance()
        before = plain.advance()
        seen.append((ran.plan.first_step, ran.plan.threads))
        assert ran.plan.counts == [[16] * 4] * ran.plan.steps
        if ran.plan.ett_s and ran.plan.first_step > 40:
            assert np.array(ran.plan.ett_s) == pytest.approx(ran.compute_s, rel=0.02)
    # The best by brute force with the true share: 16, 16, 15.6 and 22.8 ms.
    assert ran.plan.threads == [1, 1, 2, 4]
    assert ran.plan.memory["serial"] == pytest.approx(0.3, abs=0.02)
    assert ran.step_s.mean() < 0.6 * before.step_s.mean()
    changes = [b[0] for a, b in itertools.pairwise(seen) if a[1] != b[1]]
    assert 1 <= len(changes) <= 3
    assert changes[0] >= 8
    assert all(after - before >= 8 for before, after in itertools.pairwise(changes))
    # Nothing else than the segment's own record is needed to plan on.
    assert set(ran.plan.memory) == {"counts", "threads", "since", "serial", "one"}


def test_another_batch_or_world_begins_anew() -> None:
    """A memory that does not fit is no reason to fail."""
    training = Cluster(np.ones(60), np.ones(3), np.zeros(3), 6)
    policy = policies.make("ep4ddl")
    training.memory = (policy, {"counts": [3, 3], "threads": "many"})
    assert training.run(policy).memory["threads"] == [1, 1, 1]
