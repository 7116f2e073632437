"""All-reduce or a partial one, by what the ranks' times promise (`adaptive`)."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.emulation import Emulation, Slowdown
from paceline.wire import ALLREDUCE, Segment
from paceline.wire.synchronisation import convert
from paceline_backend import policies
from paceline_backend.policies import Choice, Feedback
from paceline_backend.policies.base import Floats
from paceline_backend.policies.presets.adaptive import Adaptive, Estimate, first_of
from paceline_backend.simulator import Simulation
from support.records import hello

PARTIAL = convert("partial", {"probes": 2, "staleness": 4, "mean": True})
FIRST, LAST = 160, 479  # steps in which something happens


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=6),
    st.integers(1, 8),
)
def test_the_first_of_ranks_drawn_at_random(times: list[float], probes: int) -> None:
    draws = [min(draw) for draw in combinations(times, min(probes, len(times)))]
    assert first_of(np.array([times]), probes) == pytest.approx(np.mean(draws))


@pytest.mark.parametrize(
    ("compute_s", "staleness", "expected"),
    [
        # Slow in turn: each takes 2 s on average.
        ([[1, 3], [3, 1]], 4, {"slowest_s": 3, "relaxed_s": 2, "gain": 1.5, "levelled_s": 3}),
        # The same one throughout: in 3 s the other trains three batches, of which two make a step.
        ([[1, 3], [1, 3]], 4, {"slowest_s": 3, "relaxed_s": 1.5, "gain": 2.0, "levelled_s": 2}),
        # A rank without batches adds nothing.
        ([[1, 3, 0], [1, 3, 0]], 4, {"slowest_s": 3, "relaxed_s": 1.5, "gain": 2.0}),
        ([[2, 2], [2, 2]], 4, {"slowest_s": 2, "gain": 1.0, "contributors": 2}),
        # The first of both calls: after 1 s. In two rounds of three the slower one has nothing,
        ([[1, 3], [3, 1]], 2, {"contributors": 4 / 3, "gain": 1.5}),
        # and what it had counts however old it is,
        ([[1, 3], [3, 1]], 1, {"contributors": 4 / 3, "gain": 1.5}),
        # unless no round may go by while a gradient is computed.
        ([[1, 3], [3, 1]], 0, {"contributors": 1, "gain": 0.75}),
    ],
)
def test_estimates_worked_by_hand(
    compute_s: list[list[float]], staleness: int, expected: dict[str, float]
) -> None:
    times = np.array(compute_s, float)
    estimate = Estimate.of(times, np.ones(times.shape), 2, staleness)
    assert {name: getattr(estimate, name) for name in expected} == pytest.approx(expected)


def test_what_sizes_explain_balancing_would_level() -> None:
    load = np.random.default_rng(0).uniform(1, 9, (16, 3))
    estimate = Estimate.of(np.array([1e-3, 2e-3, 2e-3]) * load + 0.01, load, 2, 4)
    assert estimate.levelled_s == pytest.approx(
        (np.array([1, 2, 2]) @ load.mean(0) * 1e-3 + 0.03) / 3
    )
    assert estimate.slowest_s > 1.2 * estimate.levelled_s


def feedback(compute_s: Floats) -> Feedback:
    """Steps of times [S, W], all batches alike."""
    steps, world = compute_s.shape
    ones = np.ones(steps * world)
    return Feedback(
        step=np.repeat(np.arange(steps), world),
        rank=np.tile(np.arange(world), steps),
        samples=np.ones(steps * world, np.int64),
        load=ones,
        compute_s=compute_s.ravel(),
        squares=ones,
        longest=ones,
    )


def chooser(**given: Any) -> Adaptive:
    made = policies.make("adaptive", given).synchroniser
    assert isinstance(made, Adaptive)
    return made


def in_turn(steps: int) -> Feedback:
    """Of four ranks each is slow in every fourth step: 60 ms for 20 ms."""
    times = np.full((steps, 4), 0.02)
    times[np.arange(steps), np.arange(steps) % 4] = 0.06
    return feedback(times)


def test_reasons_tell_the_figures() -> None:
    first = chooser().choose(in_turn(15), 4, {})
    assert first == Choice(
        ALLREDUCE,
        "all-reduce: too few steps are known: 15 of 16",
        {"partial": False, "segments": 1},
    )
    held = chooser().choose(in_turn(64), 4, {"partial": False, "segments": 3})
    assert held == Choice(
        ALLREDUCE,
        "all-reduce: a step's slowest rank takes 60 ms, all ranks together need 30 ms for its "
        "batches: a partial one would give 2.00 times the gradients (± 0.00, exchanges left out)",
        {"partial": False, "segments": 4},
    )
    assert chooser().choose(in_turn(64), 4, held.memory) == Choice(
        PARTIAL,
        "partial: a step's slowest rank takes 60 ms, all ranks together need 30 ms for its "
        "batches: 2.00 times the gradients (± 0.00, exchanges left out) are expected, those of "
        "some 3.3 of 4 ranks in a round",
        {"partial": True, "segments": 1},
    )


def test_steps_without_a_time_make_no_rank_fast() -> None:
    """A rank that compiled code again has samples in the step, and no time."""
    times = np.tile([0.02, 0.02, 0.02, 0.05], (64, 1))
    plain = chooser(hold=1).choose(feedback(times), 4, {})
    times[1::3, 3] = 0.0
    assert chooser(hold=1).choose(feedback(times), 4, {}) == plain


def test_one_rank_has_nobody_to_wait_for() -> None:
    made = chooser(hold=1).choose(feedback(np.ones((32, 1))), 1, {})
    assert (made.synchroniser, made.why) == (ALLREDUCE, "all-reduce: there is one rank only")


def test_a_memory_of_another_form_counts_as_none() -> None:
    made = chooser(hold=1).choose(in_turn(64), 4, {"partial": "perhaps"})
    assert made.memory == {"partial": False, "segments": 1}


def simulation(devices: Emulation, policy: str, **given: Any) -> Simulation:
    """Batches are all alike."""
    world = len(devices.a_s)
    start = hello(world=world, global_batch=8 * world, sizes=np.ones(9_000).tobytes(), epochs=None)
    return Simulation(start, devices, policies.make(policy, given))


def trained(devices: Emulation, steps: int = 640, **given: Any) -> list[Segment]:
    run = simulation(devices, "adaptive", **given)
    segments = []
    while run.step < steps:
        segments.append(run.advance().segment)
    return segments


def changes(segments: list[Segment]) -> list[int]:
    """Where another synchroniser came into force than in the segment before."""
    return [b.first_step for a, b in pairwise(segments) if a.synchroniser != b.synchroniser]


def devices(world: int, **given: Any) -> Emulation:
    return Emulation(**{"a_s": [1e-3] * world, "b_s": [0.01] * world, "noise": 0.03} | given)


@pytest.mark.parametrize("world", [2, 4, 32])
def test_ranks_that_are_alike_are_all_reduced(world: int) -> None:
    assert changes(trained(devices(world))) == []


@pytest.mark.parametrize("world", [4, 32])
def test_random_delays_are_not_waited_for(world: int) -> None:
    """RNA's setting."""
    history = trained(devices(world, delay_s=(0.0, 0.05)))
    (change,) = changes(history)
    assert change <= 64
    assert history[-1].synchroniser == PARTIAL


def test_it_goes_to_partial_and_back() -> None:
    everybody = Slowdown(
        ranks=list(range(8)), factor=5, chance=0.2, first_step=FIRST, steps=LAST - FIRST + 1
    )
    there, back = changes(trained(devices(8, slowdowns=[everybody]), 800))
    assert FIRST < there < FIRST + 64
    assert LAST < back < LAST + 4 * 64  # segments of 64 steps, one of them planned already


def test_one_rank_that_is_always_slow_is_not_waited_for() -> None:
    """Unless batches are balanced by speed: then no rank takes longer than the others."""
    slow = devices(4, a_s=[1e-3] * 3 + [5e-3])
    history = trained(slow)
    (change,) = changes(history)
    assert change <= 64
    assert history[-1].synchroniser == PARTIAL
    assert gain(history[-1]) == pytest.approx(50 / (4 / (3 / 18 + 1 / 50)), rel=0.1)
    assert changes(trained(slow, batches="paceline")) == []


def test_a_slow_rank_is_waited_for_where_all_make_equally_many_steps() -> None:
    """A relaxed synchroniser saves nothing then, and the words say so."""
    chosen = chooser(hold=1).on_steps(0, uneven=False)
    slow = feedback(np.tile([0.01, 0.01, 0.01, 0.05], (32, 1)))
    made = chosen.choose(slow, 4, {})
    assert made.synchroniser == ALLREDUCE
    assert "no rank more than 50 ms on average" in made.why
    assert (
        chooser(hold=1).choose(slow, 4, {"partial": False, "segments": 9}).synchroniser == PARTIAL
    )


def test_what_balancing_would_save_is_said() -> None:
    history = trained(devices(4, a_s=[1e-3] * 3 + [5e-3]), saving=0.9)
    assert changes(history) == []
    assert "`batches`) could save" not in history[-1].why, "a partial one would save more"
    level = trained(devices(4, a_s=[1e-3] * 3 + [1.4e-3]), saving=0.2)
    assert changes(level) == []


def gain(segment: Segment) -> float:
    return float(segment.why.split(" times the gradients")[0].split()[-1])


@pytest.mark.parametrize(
    "happens",
    [
        {"delay_s": (0.0, 0.05)},
        {"slowdowns": [Slowdown(ranks=list(range(8)), factor=3, chance=0.2)]},
        {"noise": 0.1},
    ],
)
def test_the_gain_is_that_of_the_simulated_exchange(happens: dict[str, Any]) -> None:
    """Whichever is in force while it is estimated."""
    ranks = devices(8, **happens)
    took_s = {}
    for name in ("bsp", "rna"):
        run = simulation(ranks, name)
        while run.step < 1_200:
            run.advance()
        took_s[name] = run.now / run.step
    for saving in (0.0, 0.9):
        history = trained(ranks, 1_200, saving=saving)[8:]
        assert history[-1].synchroniser == (PARTIAL if saving == 0 else ALLREDUCE)
        gains = [gain(segment) for segment in history]
        assert np.mean(gains) == pytest.approx(took_s["bsp"] / took_s["rna"], rel=0.06)


@pytest.mark.parametrize("seed", range(3))
def test_noise_about_the_threshold_does_not_flap(seed: int) -> None:
    history = trained(devices(4, noise=0.18, seed=seed), 3_000, hold=1)
    over = [gain(segment) > 1 / (1 - 0.15) for segment in history if "times" in segment.why]
    assert sum(a != b for a, b in pairwise(over)) > 10, "no noise about it: it tests nothing"
    assert len(changes(history)) <= 1


def test_a_choice_is_kept_for_some_segments() -> None:
    """Times that call for the other one each time it may be had."""
    chosen = chooser(hold=3, steps=16)
    made, seen = Choice(ALLREDUCE), []
    for _ in range(20):
        partial = made.synchroniser == PARTIAL
        given_feedback = feedback(np.full((64, 4), 0.02)) if partial else in_turn(64)
        made = chosen.choose(given_feedback, 4, made.memory)
        seen.append(made.synchroniser == PARTIAL)
    assert seen == ([False] * 3 + [True] * 3) * 3 + [False] * 2
