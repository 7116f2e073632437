"""Balanced batches, and pairwise means while ranks still wait (`paceline-relaxed`)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from paceline.core.emulation import Emulation, Slowdown
from paceline.wire import ALLREDUCE, Segment
from paceline.wire.synchronisation import Pairwise
from paceline_backend import policies
from paceline_backend.policies import Choice
from paceline_backend.simulator import Simulation
from support.records import hello
from unit.policies.presets.test_adaptive import in_turn

PAIRWISE = Pairwise()
FIRST, LAST = 160, 479  # steps in which something happens


def trained(devices: Emulation, sizes: np.ndarray, steps: int) -> list[Segment]:
    world = len(devices.a_s)
    start = hello(world=world, global_batch=8 * world, sizes=sizes.tobytes(), epochs=None)
    run = Simulation(start, devices, policies.make("paceline-relaxed"))
    segments = []
    while run.step < steps:
        segments.append(run.advance().segment)
    return segments


def changes(segments: list[Segment]) -> list[int]:
    """Where another synchroniser came into force than in the segment before."""
    return [b.first_step for a, b in pairwise(segments) if a.synchroniser != b.synchroniser]


ALIKE = np.ones(9_000)
UNEVEN = np.random.default_rng(0).lognormal(0, 1, 9_000)


@pytest.mark.parametrize(
    ("speeds", "sizes"),
    [([1] * 8, ALIKE), ([1] * 7 + [5], ALIKE), ([1] * 4 + [3] * 4, UNEVEN), ([1] * 8, UNEVEN)],
)
def test_what_batches_level_is_all_reduced(speeds: list[int], sizes: np.ndarray) -> None:
    """So training stays that of plain DDP."""
    devices = Emulation([1e-3 * speed for speed in speeds], [0.005] * 8, noise=0.03)
    assert changes(trained(devices, sizes, 640)) == []


@pytest.mark.parametrize("speeds", [[1] * 8, [1] * 7 + [5]])
def test_ranks_that_are_slow_in_turn_do_not_wait(speeds: list[int]) -> None:
    devices = Emulation([1e-3 * speed for speed in speeds], [0.005] * 8, delay_s=(0.0, 0.05))
    history = trained(devices, ALIKE, 320)
    (change,) = changes(history)
    assert change <= 64
    assert history[-1].synchroniser == PAIRWISE


def test_it_goes_back_when_the_delays_are_over() -> None:
    everybody = Slowdown(
        ranks=list(range(8)), factor=5, chance=0.2, first_step=FIRST, steps=LAST - FIRST + 1
    )
    devices = Emulation([1e-3] * 8, [0.01] * 8, noise=0.03, slowdowns=[everybody])
    there, back = changes(trained(devices, ALIKE, 800))
    assert FIRST < there < FIRST + 64
    assert LAST < back < LAST + 4 * 64  # segments of 64 steps, one of them planned already


def test_reasons_tell_the_figures() -> None:
    policy = policies.make("paceline-relaxed")
    assert policy.name == "paceline-relaxed" and policy.relaxed and policy.plain_batches
    held = policy.choose(in_turn(64), 4, {"synchroniser": {"partial": False, "segments": 3}})
    assert held == Choice(
        ALLREDUCE,
        "all-reduce: a step's slowest rank takes 60 ms, all ranks together need 30 ms for its "
        "batches: pairwise means would give 2.00 times the gradients (± 0.00, exchanges left out)",
        {"partial": False, "segments": 4},
    )
    assert policy.choose(in_turn(64), 4, {"synchroniser": held.memory}) == Choice(
        PAIRWISE,
        "pairwise: a step's slowest rank takes 60 ms, all ranks together need 30 ms for its "
        "batches: 2.00 times the gradients (± 0.00, exchanges left out) are expected",
        {"partial": True, "segments": 1},
    )


def test_other_batches_may_be_asked_for() -> None:
    policy = policies.make("paceline-relaxed", {"batches": "lbb"})
    assert policy.scheduler == policies.make("lbb").scheduler
