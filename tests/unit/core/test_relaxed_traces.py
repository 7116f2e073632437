"""One relaxed core: traces of simulator and ranks, and recorded traces of the simulator."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import convert

from paceline.core.rounds import Call, Drift
from paceline.wire.synchronisation import PartialRules
from paceline_backend.simulator import sync
from paceline_backend.simulator.sync.rounds import SegmentRounds
from support import scenarios
from support.scenarios import Scenario
from support.virtual_rounds import Ran, train

EXAMPLES = settings.default.max_examples  # of the profile in force: 10, 30 or 500

TRACES = Path(__file__).with_name("relaxed_traces.json.gz")  # by commit 30b5758


@pytest.fixture(scope="module")
def recorded_traces() -> list[tuple[str, int, bool, Any]]:
    recorded: list[tuple[str, int, bool, Any]] = json.loads(gzip.decompress(TRACES.read_bytes()))
    return recorded


@pytest.mark.parametrize("kind", scenarios.KINDS)
def test_the_simulator_gives_the_recorded_traces(
    recorded_traces: list[tuple[str, int, bool, Any]], kind: str
) -> None:
    """Rounds, ends of steps and waits, to the last bit."""
    compared = 0
    for of_kind, seed, ties, expected in recorded_traces:
        if of_kind == kind:
            given = scenarios.scenario(seed, kind, ties=ties, most=(5, 9))
            trace = json.loads(json.dumps(scenarios.simulated(given, sync)))
            assert trace == expected, (kind, seed)
            compared += 1
    assert compared == 60


def of_ranks(given: Scenario, work_s: list[list[float]], samples: list[list[int]]) -> Ran:
    call = Call.of(given.rules, given.world, given.seed)
    drift = Drift.of(given.rules)
    return train(call, drift, work_s, samples, given.round_s, given.call_s)


def of_simulator(
    given: Scenario, work_s: list[list[float]], samples: list[list[int]]
) -> tuple[list[sync.SimulatedRound], list[list[float]]]:
    call = Call.of(given.rules, given.world, given.seed)
    drift = Drift.of(given.rules)
    segment = SegmentRounds(call, drift, work_s, samples, sync.Costs(given.round_s, given.call_s))
    segment.run([0.0] * given.world)
    return segment.rounds, segment.ended_at


def assert_same(given: Scenario, work_s: list[list[float]], samples: list[list[int]]) -> None:
    """Numbers, contributors, ages, drops and times of all rounds, and the end of each step."""
    ran = of_ranks(given, work_s, samples)
    rounds, ended_at = of_simulator(given, work_s, samples)
    assert [
        (each.number, each.contributors, each.staleness, each.dropped, each.waited_s, ended)
        for each, ended in ran.rounds
    ] == [
        (each.number, each.contributors, each.staleness, each.dropped, each.waited_s, each.ended_at)
        for each in rounds
    ]
    for mine, theirs in zip(ran.ended_at, ended_at, strict=True):
        assert mine[:-1] == theirs[:-1]  # all meet at the last one's end
    assert ran.errors == [None] * given.world


kinds_of_time = st.sampled_from([True, False])


@settings(max_examples=3 * EXAMPLES)
@given(kinds_of_time.flatmap(lambda ties: scenarios.scenarios("partial", ties=ties)))
@example(scenarios.scenario(10, "partial", most=(1, 10)))  # a wait is logged in an overfull round
def test_ranks_go_as_the_simulator_says(given: Scenario) -> None:
    assert_same(given, given.of_ranks(given.work_s), given.of_ranks(given.samples))


@settings(max_examples=2 * EXAMPLES)
@given(
    kinds_of_time.flatmap(lambda ties: scenarios.scenarios("partial", ties=ties)),
    st.lists(st.integers(0, 14), min_size=7, max_size=7),
)
def test_ranks_may_make_different_numbers_of_steps(given: Scenario, steps: list[int]) -> None:
    """Also none: nobody hangs, and each gradient counts once or as dropped."""
    work_s, samples = (
        [column[:end] for column, end in zip(given.of_ranks(table), steps, strict=False)]
        for table in (given.work_s, given.samples)
    )
    assert_same(given, work_s, samples)
    rounds, _ = of_simulator(given, work_s, samples)
    went_in = sum(sum(each.staleness) for each in rounds)
    offered = sum(count > 0 for counts in samples for count in counts)
    dropped = sum(each.dropped for each in rounds)
    assert 0 <= offered - went_in <= dropped
    assert bool(dropped) == (offered > went_in)


@settings(max_examples=2 * EXAMPLES)
@given(scenarios.scenarios("partial", ties=False))
def test_all_ranks_have_the_same_sums_which_count_each_gradient_once(given: Scenario) -> None:
    samples = [[3 * (count > 0) for count in counts] for counts in given.of_ranks(given.samples)]
    ran = of_ranks(given, given.of_ranks(given.work_s), samples)
    assert all(totals == ran.totals[0] for totals in ran.totals)
    ages = [each.staleness for each, _ in ran.rounds]
    dropped = sum(each.dropped for each, _ in ran.rounds) // 3
    offered = sum(count > 0 for counts in samples for count in counts)
    assert sum(map(sum, ages)) + dropped == offered
    total = sum(map(sum, ran.totals[0]))
    # What a rank offered for the same round counts as one where its mean is taken.
    expected = sum(each.contributors for each, _ in ran.rounds)
    if not given.rules.mean:
        expected = sum(map(sum, ages))
    assert total == pytest.approx(expected)


faults = st.tuples(
    st.sampled_from(["aborts", "dies", "stuck"]), st.integers(0, 6), st.integers(0, 13)
)


@settings(max_examples=2 * EXAMPLES)
@given(
    kinds_of_time.flatmap(lambda ties: scenarios.scenarios("partial", ties=ties)),
    faults,
)
def test_where_a_rank_leaves_nobody_hangs(given: Scenario, fault: tuple[str, int, int]) -> None:
    """By telling it, or as its process ends, or by being stuck; after any step of its own."""
    how, leaver, at = fault[0], fault[1] % given.world, fault[2] % len(given.work_s)
    call = Call.of(given.rules, given.world, given.seed)
    drift = Drift.of(given.rules)
    ran = train(
        call,
        drift,
        given.of_ranks(given.work_s),
        given.of_ranks(given.samples),
        given.round_s,
        given.call_s,
        leaves=lambda rank, step: how if (rank, step) == (leaver, at) else None,
        timeout_s=500.0,
        pulse_s=4.0,
    )
    for rank in set(range(given.world)) - {leaver}:
        error = ran.errors[rank]
        assert error is not None, "it went on as if nothing had happened"
        assert f"rank {rank}, round" in error
        if how == "aborts":
            assert f"rank {leaver} has left" in error


@pytest.mark.parametrize("name", scenarios.PARTIAL)
def test_a_late_rank_is_waited_for_no_longer_than_its_own_steps(name: str) -> None:
    """One that begins as the others are through with all; those that wait call rounds meanwhile."""
    rules = convert(scenarios.PARTIAL[name], PartialRules)
    call, drift = Call.of(rules, 3, 0), Drift.of(rules)
    work_s = [[1.0] * 6, [1.0] * 6, [50.0, *[1.0] * 5]]
    ran = train(call, drift, work_s, [[1] * 6] * 3, 0.25, 0.125, pulse_s=4.0)
    assert ran.errors == [None] * 3
    assert ran.rounds[-1][1] <= 55.0 + 6 * 0.375 + 4 * 6
