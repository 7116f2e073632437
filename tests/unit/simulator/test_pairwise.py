"""AD-PSGD's means of two on the virtual clock: timelines worked out by hand, and in simulations."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policies.base import Floats
from paceline.wire import AGES
from paceline.wire.synchronisation import convert
from paceline_backend.simulator.scenario import Communication
from paceline_backend.simulator.sync import (
    Costs,
    SimulatedSync,
    SimulatedTimeline,
    Work,
    make,
    step_time_s,
)

PAIRWISE = convert("pairwise")


class Ranks:
    """Some that go on from segment to segment."""

    def __init__(self, world: int, costs: Costs, seed: int = 0) -> None:
        self.model: SimulatedSync = make(PAIRWISE, world, seed)
        self.costs, self.step = costs, 0
        self.now = np.zeros(world)

    def run(self, work_s: Any, *, epoch_end: bool = False) -> SimulatedTimeline:
        work_s = np.array(work_s, float)
        ones, nothing = np.ones(work_s.shape, int), np.zeros_like(work_s)
        work = Work(self.step, work_s, ones, nothing, self.costs, epoch_end)
        # As a simulation does: nobody knows how long the run has lasted.
        base = float(self.now.min())
        timeline = self.model.run(self.now - base, work)
        self.now = self.now + (work_s + timeline.wait_s + timeline.communication_s).sum(axis=0)
        self.step += len(work_s)
        return timeline


def aged(*ages: int) -> list[int]:
    return [ages.count(age) for age in range(AGES)]


def test_ranks_compute_on_while_one_of_two_is_asked() -> None:
    ranks = Ranks(2, Costs(pair_s=0.5, bytes=7))
    timeline = ranks.run([[1, 3]] * 3)
    assert not timeline.wait_s.any() and not timeline.communication_s.any()
    assert ranks.now.tolist() == [3, 9]
    # After each of its steps, rank 0: the question is there 0.25 s later, the answer as long after.
    assert [record.ended_at for record in timeline.rounds] == [1.5, 2.5, 3.5]
    assert {(record.waited_s, record.reduced_s) for record in timeline.rounds} == {(0.25, 0.25)}
    assert {
        (record.rank, record.world, record.contributors, record.bytes) for record in timeline.rounds
    } == {(0, 2, 2, 7)}
    assert [record.number for record in timeline.rounds] == [0, 1, 2]
    assert [record.step for record in timeline.rounds] == [1, 2, 2]
    # Rank 1 is through with its first step only when it is asked for the third time.
    assert [record.staleness for record in timeline.rounds] == [aged(0, 1), aged(0, 2), aged(0, 2)]
    # And with its second one, in the segment before, when rank 0 asks for the sixth time, at 6.
    later = ranks.run([[1, 3]] * 3)
    assert [record.ended_at + 3 for record in later.rounds] == [4.5, 5.5, 6.5]
    assert [record.staleness for record in later.rounds] == [aged(0, 3), aged(0, 4), aged(0, 4)]


def test_the_answer_is_there_before_the_next_step_of_the_optimiser() -> None:
    """Steps of 1 s, exchanges of 1.5 s: from the second on a step takes 1.5 s, in any segment."""
    ranks = Ranks(2, Costs(round_s=1.5))
    first, second = ranks.run([[1, 1]] * 2), ranks.run([[1, 1]] * 2, epoch_end=True)
    assert first.wait_s.tolist() == [[0, 0], [0.5, 0]]
    # All meet at an epoch's end, as rank 0 has its last answer at 7; then two means.
    assert second.wait_s.tolist() == [[0.5, 0], [2.0, 3.0]]
    assert second.communication_s.tolist() == [[0, 0], [3, 3]]
    assert ranks.now.tolist() == [10, 10]
    assert [record.number for record in second.rounds] == [2, 3]
    assert not ranks.model.goes_on, "the next epoch has draws of its own"
    # An all-reduce would take as long as the slower one's step, and the exchange.
    work_s = np.ones((100, 2))
    assert step_time_s(PAIRWISE, work_s, Costs(0.001), 20) == pytest.approx(1.0, abs=1e-3)
    slow = step_time_s(PAIRWISE, work_s, Costs(1.5), 20)
    # The rank that answers goes on meanwhile, and takes over batches of the rank that asks.
    assert 2 / (1 / 1.5 + 1 / 1.0) < slow < (1 + 99 * 1.5 + 1.5 + 2 * 1.5) / 100


@given(
    world=st.integers(1, 7),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    takes_s=st.sampled_from([0.0, 0.3, 2.0]),
    seed=st.integers(0, 2**31),
)
def test_each_step_of_those_that_ask_is_one_exchange(
    world: int, lengths: list[int], takes_s: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    works = [rng.choice([0.0, 0.5, 1.0, 9.0], (steps, world)) for steps in lengths]
    repetitions: list[tuple[list[SimulatedTimeline], Floats]] = []
    for _ in range(2):
        ranks = Ranks(world, Costs(0.1, pair_s=takes_s), seed)
        repetitions.append(([ranks.run(work_s) for work_s in works], ranks.now))
    (timelines, now), (again, _) = repetitions
    round_records = [record for timeline in timelines for record in timeline.rounds]
    assert round_records == [record for timeline in again for record in timeline.rounds]
    for rank in range(world):
        asks = rank % 2 == 0 and world > 1
        numbers = [record.number for record in round_records if record.rank == rank]
        assert numbers == list(range(sum(lengths) * asks))
    for timeline in timelines:
        assert all(a.ended_at <= b.ended_at for a, b in pairwise(timeline.rounds))
        assert (timeline.wait_s >= 0).all() and not timeline.wait_s[:, 1::2].any()
    least = np.sum([work_s.sum(axis=0) for work_s in works], axis=0)
    assert (now >= least - 1e-9).all()
    if not takes_s:
        assert now == pytest.approx(least)


def test_what_an_exchange_of_two_takes() -> None:
    """Two messages with a vector each, one after the other, if nothing else was measured."""
    ring = Communication(latency_s=0.1, bytes=10, bandwidth=100, fixed_s=0.05)
    costs = ring.costs(4)
    assert costs.exchange_s() == pytest.approx(0.05 + 2 * (0.1 + 0.1))
    assert costs.among(2).round_s == pytest.approx(ring.seconds(2))
    measured = Communication(latency_s=0.1, bytes=10, bandwidth=100, round_s=0.3).costs(4)
    assert measured.exchange_s() == measured.among(2).round_s == 0.3
