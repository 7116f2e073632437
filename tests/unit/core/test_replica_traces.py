"""Ranks that step alone go as the simulator says: who averages with whom, when, and how stale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.replicas import Partners, part_due
from paceline.wire.synchronisation import convert
from paceline_backend.simulator import sync
from paceline_backend.simulator.sync.base import SimulatedTimeline
from support import scenarios
from support.scenarios import Scenario
from support.virtual_replicas import Ran, train

EXAMPLES = settings.default.max_examples  # of the profile in force: 10, 30 or 500


def of_ranks(given: Scenario) -> Ran:
    return train(
        given.what,
        given.of_ranks(given.work_s),
        given.of_ranks(given.samples),
        given.round_s,
        given.call_s,
        _costs(given).exchange_s(),
        given.seed,
    )


def of_simulator(given: Scenario) -> SimulatedTimeline:
    """All steps as one segment, at whose end the epoch ends."""
    work_s, samples = np.array(given.work_s), np.array(given.samples)
    nothing = np.zeros_like(work_s)
    work = sync.Work(0, work_s, samples, nothing, _costs(given), epoch_end=True)
    return sync.make(given.what, given.world, given.seed).run(np.zeros(given.world), work)


def _costs(given: Scenario) -> sync.Costs:
    return sync.Costs(given.round_s, given.call_s, pair_s=given.pair_s)


def ends_of(timeline: SimulatedTimeline) -> list[list[float]]:
    """When each rank ends its steps, [W][steps]."""
    took_s = timeline.work_s + timeline.wait_s + timeline.communication_s
    ends: list[list[float]] = np.cumsum(took_s, axis=0).T.tolist()
    return ends


@settings(max_examples=2 * EXAMPLES)
@given(scenarios.scenarios("averaging", ties=False), st.integers(1, 4), st.data())
def test_means_on_their_way_hold_ranks_up_as_the_simulator_says(
    given: Scenario, every: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(1, every))
    rules = {"every": every, "overlap": overlap, "outer": {"rate": 0.7, "momentum": 0.9}}
    given = replace(given, what=convert("averaging", rules | {"keep": 0.5}))
    ran, timeline = of_ranks(given), of_simulator(given)
    for real, model in zip(ran.ended_at, ends_of(timeline), strict=True):
        assert real == pytest.approx(model), "with the meeting at the epoch's end"
    assert len(ran.rounds[0]) == len(timeline.rounds)
    for (real, ended), simulated in zip(ran.rounds[0][:-1], timeline.rounds[:-1], strict=True):
        assert (real.number, real.contributors) == (simulated.number, simulated.contributors)
        assert (real.reduced_s, ended) == pytest.approx((simulated.reduced_s, simulated.ended_at))


@settings(max_examples=2 * EXAMPLES)
@given(scenarios.scenarios("averaging", ties=False))
def test_ranks_take_means_of_all_as_the_simulator_says(given: Scenario) -> None:
    ran, timeline = of_ranks(given), of_simulator(given)
    for real, model in zip(ran.ended_at, ends_of(timeline), strict=True):
        assert real == pytest.approx(model), "with the meeting at the epoch's end"
    every = given.what.parameters.every  # type: ignore[union-attr]
    due = [step for step in range(len(given.work_s)) if part_due(step, every) is not None]
    on_the_way = [step for step in due if step + 1 < len(given.work_s)]
    reported = ran.rounds[0]
    assert not any(ran.rounds[1:]), "rank 0 tells"
    assert len(reported) == len(due) + 1
    simulated = timeline.rounds[: len(on_the_way)]
    assert [each.step for each in simulated] == on_the_way
    for (real, ended), model in zip(reported, simulated, strict=False):
        assert (real.number, real.contributors, real.staleness, real.dropped, real.waited_s) == (
            model.number,
            model.contributors,
            model.staleness,
            model.dropped,
            model.waited_s,
        )
        assert (real.reduced_s, ended) == pytest.approx((model.reduced_s, model.ended_at))


@settings(max_examples=2 * EXAMPLES)
@given(scenarios.scenarios("pairwise", ties=False))
def test_ranks_take_means_of_two_as_the_simulator_says(given: Scenario) -> None:
    ran, timeline = of_ranks(given), of_simulator(given)
    for real, model in zip(ran.ended_at, ends_of(timeline), strict=True):
        assert real[:-1] == pytest.approx(model[:-1])  # all meet at the last one's end
    for rank in range(given.world):
        simulated = [each for each in timeline.rounds if each.rank == rank]
        reported = ran.rounds[rank]
        assert [(each.number, each.staleness) for each, _ in reported] == [
            (each.number, each.staleness) for each in simulated
        ]
        assert [(each.waited_s, each.reduced_s, ended) for each, ended in reported] == [
            pytest.approx((each.waited_s, each.reduced_s, each.ended_at)) for each in simulated
        ]
        partners = Partners(rank, given.world, given.seed)
        assert ran.asked[rank] == [partners.next() for _ in simulated]
