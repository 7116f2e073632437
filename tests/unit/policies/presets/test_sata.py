"""SATA: Eq. 8, what an epoch's time is made of, and the paper's gains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline import policies
from paceline.core.emulation import Emulation, Slowdown
from paceline.policies.base import Feedback
from paceline.policies.presets.sata import SataAllocator, reweighted
from support.cluster import Cluster
from support.simulated import simulate


def test_worked_example() -> None:
    """w = (½, ½), t = (2, 6) → (¾, ¼); once more with times that are equal, it stays."""
    half = np.array([0.5, 0.5])
    weights_now = reweighted(half, half * 80, np.array([2.0, 6.0]))
    assert weights_now == pytest.approx([0.75, 0.25])
    again = reweighted(weights_now, weights_now * 80, np.array([3.0, 3.0]))
    assert again == pytest.approx([0.75, 0.25])


def test_workers_without_a_time_keep_their_share() -> None:
    weights = np.array([0.5, 0.3, 0.2])
    weights_now = reweighted(weights, np.array([5.0, 3.0, 0.0]), np.array([1.0, 0.2, 0.0]))
    assert weights_now == pytest.approx([0.2, 0.6, 0.2])
    nothing = np.zeros(3)
    assert reweighted(weights, nothing, nothing).tolist() == weights.tolist()


def test_redistributes_at_epochs_starts_only() -> None:
    """Ten steps are an epoch; the last step of each has half as many samples."""
    devices = Emulation(a_s=[1e-3, 3e-3], b_s=[0.0, 0.0])
    ran = simulate(policies.make("sata"), devices, np.ones(76), 8, 40)
    assert ran.changes() == [9, 10, 19, 20, 29, 30, 39]
    assert ran.counts[0].tolist() == [4, 4]
    assert ran.counts[9].tolist() == [2, 2]
    assert ran.counts[10].tolist() == [6, 2]
    assert ran.counts[19].tolist() == [3, 1]


def test_an_epoch_longer_than_the_window_counts_as_a_whole() -> None:
    """Slow in all but the last steps: these are a third of the epoch."""
    devices = Emulation(
        a_s=[1e-3, 1e-3], b_s=[0.0, 0.0], slowdowns=[Slowdown(ranks=[1], factor=4.0, steps=200)]
    )
    ran = simulate(policies.make("sata"), devices, np.ones(300 * 60), 60, 301)
    times = np.array([300.0, 200 * 4 + 100])
    wanted = 60 * (1 / times) / (1 / times).sum()
    assert ran.changes() == [300]
    assert ran.counts[300] == pytest.approx(wanted, abs=0.6)


def test_every_rank_gets_a_sample_so_that_it_stays_known() -> None:
    devices = Emulation(
        a_s=[1e-3] * 4,
        b_s=[0.0] * 4,
        slowdowns=[Slowdown(ranks=[3], factor=1_000.0, steps=30)],
    )
    ran = simulate(policies.make("sata"), devices, np.ones(160), 16, 80)
    assert ran.counts[10:20].tolist() == [[5, 5, 5, 1]] * 10
    assert ran.counts[-1].tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize("slow", [2.0, 10.0])
def test_a_straggler_costs_what_it_lacks(slow: float) -> None:
    """The paper: 3.3 times as fast as All-Reduce with one worker slowed down 2 and 5 times.

    Here without its network and with levelled counts: to what the fluid limit allows.
    """
    devices = Emulation(a_s=[1e-3 * slow] + [1e-3] * 3, b_s=[0.0] * 4)
    sizes = np.ones(128 * 8)
    bsp, sata = (simulate(policies.make(n), devices, sizes, 128, 64) for n in ("bsp", "sata"))
    fluid = 128 / (3 / 1e-3 + 1 / (1e-3 * slow))
    assert bsp.step_s[-8:].mean() / sata.step_s[-8:].mean() == pytest.approx(
        32e-3 * slow / fluid, rel=0.05
    )


def test_planning_again_with_more_feedback_changes_nothing_in_between() -> None:
    """A proposal is superseded by one from the same memory; the sums count each step once."""
    training = Cluster(np.ones(64), np.array([1e-3, 3e-3]), np.zeros(2), 8, steps_per_segment=2)
    policy = policies.make("sata")
    for _ in range(3):
        training.run(policy)
    allocator = policy.allocator
    assert isinstance(allocator, SataAllocator)
    memory = memory_of(training, policy)
    assert memory["next"] == 4  # two segments were known when the third was planned
    assert sum(memory["samples"]) == 4 * 8
    problem = training.problem(2, shuffle=False, policy=policy)
    models = policy.predictor.fit(training.feedback(), 2)
    late = allocator.allocate(problem, models, training.feedback()).memory
    assert sum(late["samples"]) == 6 * 8
    early = allocator.allocate(problem, models, Feedback.empty()).memory
    assert early == {**memory, "epoch": 0}


def memory_of(training: Cluster, policy: Any) -> dict[str, Any]:
    owner, memory = training.memory
    assert owner is policy
    return memory
