"""Balanced batches, and pairwise means while ranks still wait (`paceline-relaxed`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from paceline import policies
from paceline.core.emulation import Emulation, Slowdown
from paceline.policies import Choice, Feedback
from paceline.wire import ALLREDUCE, Plan
from paceline.wire.synchronisation import Pairwise
from paceline_backend.simulator import Simulation
from paceline_backend.simulator.scenario import Change
from support.records import hello
from support.simulated import feedback_of

PAIRWISE = Pairwise()
FIRST, LAST = 160, 479  # steps in which something happens


def trained(devices: Emulation, sizes: np.ndarray, steps: int) -> list[Plan]:
    world = len(devices.a_s)
    start = hello(world=world, global_batch=8 * world, sizes=sizes.tobytes(), epochs=None)
    run = Simulation(start, devices, policies.make("paceline-relaxed"))
    segments = []
    while run.step < steps:
        segments.append(run.advance().plan)
    return segments


def changes(segments: list[Plan]) -> list[int]:
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
    assert changes(trained(devices, sizes, 320)) == []


def test_ranks_that_are_slow_in_turn_do_not_wait() -> None:
    devices = Emulation([1e-3 * speed for speed in [1] * 7 + [5]], [0.005] * 8, delay_s=(0.0, 0.05))
    history = trained(devices, ALIKE, 320)
    (change,) = changes(history)
    assert change <= 64
    assert history[-1].synchroniser == PAIRWISE


def test_it_goes_back_when_the_delays_are_over() -> None:
    everybody = Slowdown(
        ranks=list(range(8)), factor=5, chance=0.2, first_step=FIRST, steps=LAST - FIRST + 1
    )
    devices = Emulation([1e-3] * 8, [0.01] * 8, noise=0.03, slowdowns=[everybody])
    history = trained(devices, ALIKE, 1_000)
    there, back = changes(history)
    assert FIRST < there < FIRST + 64
    assert (
        LAST < back < LAST + 6 * 64
    )  # segments of 64 steps: one is planned already, and two must tell
    assert "not again" not in history[-1].why, "it was right"


def steps_of(compute_s: list[list[float]], exchange_s: float, taken_s: float) -> Feedback:
    """Steps of times [S, W], from step 0 on."""
    rows = feedback_of(compute_s)
    slowest_s = np.array(compute_s).max(axis=1).repeat(len(compute_s[0]))
    return replace(
        rows,
        sync_s=slowest_s - rows.compute_s + exchange_s,
        step_s=np.full(len(rows), taken_s),
    )


def later(rows: Feedback, steps: int) -> Feedback:
    return replace(rows, step=rows.step + steps)


IN_TURN = [[0.06 if step % 4 == rank else 0.02 for rank in range(4)] for step in range(64)]
ALIKE_S = [[0.02] * 4] * 64


def chosen(
    rows: Feedback, memory: Mapping[str, Any], first_step: int, *, uneven: bool = True
) -> Choice:
    policy = policies.make("paceline-relaxed")
    of_chooser = {"synchroniser": memory}
    return policy.choose(rows, 4, of_chooser, first_step=first_step, uneven_steps=uneven)


def test_reasons_tell_the_figures() -> None:
    policy = policies.make("paceline-relaxed")
    assert policy.name == "paceline-relaxed" and policy.relaxed and policy.plain_batches
    few = chosen(Feedback.empty(), {}, 0)
    assert few.synchroniser == ALLREDUCE
    assert few.why == "all-reduce: fewer than 16 steps have been measured since the last change"
    # 60 ms of computing, 15 of exchange, 5 of loading; 30 + 5 would do.
    reduced = steps_of(IN_TURN, 0.015, 0.08)
    held = chosen(reduced, {"segments": 3}, 66)
    assert held.synchroniser == ALLREDUCE
    assert held.why == (
        "all-reduce: a step takes 80 ms: its slowest rank computes for 60 ms, the exchange takes "
        "15 ms; without waiting, ranks would need 35 ms: pairwise averaging might give 2.29 times "
        "the throughput (± 0.00)"
    )
    made = chosen(reduced, held.memory, 70)
    assert made.synchroniser == PAIRWISE
    # In the first segment ranks did not share batches yet.
    made = chosen(later(reduced, 70), made.memory, 134)
    assert made.why == "pairwise: fewer than 16 steps have been measured since the last change"
    made = chosen(later(steps_of(IN_TURN, 0.0, 0.04), 134), made.memory, 198)
    assert made.why == (
        "pairwise: the work of a step takes 40 ms; with all-reduce it would take 80 ms: "
        "2.00 times the throughput (± 0.00)"
    )


def trial(
    compute_s: list[list[float]],
    exchange_s: float,
    relaxed_s: list[float],
    segments: int,
    *,
    uneven: bool = True,
) -> list[Choice]:
    """Choices for segments of 64 steps.

    Args:
        compute_s: of 64 steps, [S, W].
        relaxed_s: what a step takes with pairwise means, on each rank, [W].
    """
    made = [chosen(Feedback.empty(), {}, 0)]
    for number in range(1, segments):
        rows = steps_of(compute_s, exchange_s, max(map(max, compute_s)) + exchange_s)
        if made[-1].synchroniser == PAIRWISE:
            rows = replace(steps_of(compute_s, 0.0, 0.0), step_s=np.tile(relaxed_s, 64))
        at = 64 * number
        made.append(chosen(later(rows, at - 64), made[-1].memory, at, uneven=uneven))
    return made


def tries(made: list[Choice]) -> list[tuple[int, int]]:
    """First segment and number of segments of each span under pairwise means."""
    relaxed = [choice.synchroniser == PAIRWISE for choice in made]
    edges = np.flatnonzero(np.diff([0, *relaxed, 0]))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def test_a_long_exchange_is_a_wait_too() -> None:
    assert tries(trial(ALIKE_S, 0.02, [0.022] * 4, 100)) == [(4, 96)]


def test_what_proves_wrong_is_given_up_and_tried_again_ever_later() -> None:
    made = trial(ALIKE_S, 0.02, [0.05] * 4, 1_000)
    (first, lasted), (second, _), (third, _) = tries(made)[:3]
    assert (first, lasted) == (4, 4)
    # A segment takes 3.2 s in a try, else 2.56: 20 and 40 times the try are waited for.
    assert second - first > 20 * 3.2 / 2.56
    assert third - second > 1.8 * (second - first)
    assert made[12].why.endswith("it was tried and saved too little: next try in 184 s")
    assert sum(count for _, count in tries(made)) < 0.05 * len(made)


def test_the_slowest_rank_counts_where_ranks_do_not_share_batches() -> None:
    """They do not meet for a while, and all wait for it in the end."""
    one_slow = [[0.02, 0.02, 0.02, 0.04]] * 64
    alone = [0.025, 0.025, 0.025, 0.055]
    made = trial(one_slow, 0.02, alone, 20, uneven=False)
    assert tries(made) == [(4, 4)]
    assert "takes 55 ms; with all-reduce it would take 60 ms: 1.09 times" in made[7].why


@pytest.mark.parametrize("uneven", [True, False])
def test_steps_in_which_a_rank_has_no_time_do_not_count(uneven: bool) -> None:
    """A rank that compiled code again has samples in the step, and no time."""
    times = [[0.02, 0.02, 0.02, 0.04]] * 96
    plain = chosen(steps_of(times, 0.01, 0.06), {"segments": 3}, 96, uneven=uneven)
    rows = steps_of(times, 0.01, 0.06)
    compiled = (rows.rank == 3) & (rows.step % 3 == 1)
    rows = replace(
        rows,
        compute_s=np.where(compiled, 0.0, rows.compute_s),
        step_s=np.where(rows.step % 3 == 1, 9.0, rows.step_s),
    )
    assert chosen(rows, {"segments": 3}, 96, uneven=uneven) == plain
    # A rank without samples has none either, and its steps count.
    idle = replace(rows, samples=np.where(compiled, 0, rows.samples))
    assert chosen(idle, {"segments": 3}, 96, uneven=uneven) != plain


def test_a_stall_of_one_segment_decides_nothing() -> None:
    made = trial(IN_TURN, 0.0, [0.03] * 4, 20)
    for calm in (True, False):
        rows = steps_of(IN_TURN, 0.0, 0.08)
        then = chosen(later(rows, 64 * 19), made[-1].memory, 64 * 20)
        assert then.synchroniser == PAIRWISE and "0.75 times" in then.why
        rows = steps_of(IN_TURN, 0.0, 0.03 if calm else 0.08)
        again = chosen(later(rows, 64 * 20), then.memory, 64 * 21)
        assert (again.synchroniser == PAIRWISE) == calm


def test_a_try_of_which_nothing_gets_known_ends() -> None:
    made = trial(IN_TURN, 0.0, [0.03] * 4, 6)
    assert made[-1].synchroniser == PAIRWISE
    for number in range(6, 40):
        rows = steps_of(IN_TURN, 0.0, 0.06)  # of the time before
        made.append(chosen(rows, made[-1].memory, 64 * number))
    assert tries(made) == [(4, 16)]


def test_steps_of_the_policy_before_say_nothing() -> None:
    """Its batches did not fit the ranks' speeds."""
    devices = Emulation([1e-3] * 7 + [5e-3], [0.005] * 8, noise=0.03)
    start = hello(world=8, global_batch=64, sizes=ALIKE.tobytes(), epochs=None)
    switched = Change(200, "paceline-relaxed", {})
    run = Simulation(start, devices, policies.make("bsp"))
    run.switches.append(switched)
    segments = []
    while run.step < 640:
        segments.append(run.advance().plan)
    assert {plan.policy for plan in segments} == {"bsp", "paceline-relaxed"}
    assert changes(segments) == []


def test_other_batches_may_be_asked_for() -> None:
    policy = policies.make("paceline-relaxed", {"batches": "lbb"})
    assert policy.scheduler == policies.make("lbb").scheduler
