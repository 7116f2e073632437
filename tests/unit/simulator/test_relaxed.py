"""Simulations under relaxed synchronisers: their clocks, their records, and each sample once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from paceline.wire import ALLREDUCE
from paceline_backend import policies
from paceline_backend.simulator import Scenario, Simulation, TrainedSegment, summary
from paceline_backend.simulator.broadcast import records, rounds

RELAXED = [name for name in policies.names() if policies.make(name).relaxed]


def scenario(**fields: Any) -> Scenario:
    plain = {
        "name": "small",
        "workers": 4,
        "global_batch": 16,
        "epochs": 2,
        "sizes": {"distribution": "lognormal", "mean": 45, "dif": 30, "samples": 900},
        "devices": {"unit_s": 1e-3, "step_s": 0.01, "noise": 0.05, "factors": [1, 1, 1, 2]},
        "communication": {"latency_s": 1e-4, "fixed_s": 0.01},
    }
    return Scenario.of({**plain, **fields})


def train(simulation: Simulation) -> list[TrainedSegment]:
    ran = []
    while not simulation.finished:
        ran.append(simulation.advance())
    return ran


def uses(ran: list[TrainedSegment]) -> Any:
    found = np.zeros((2, 900), int)
    for one in ran:
        # As many as were computed, whichever rank they moved to.
        trained = one.plan.batches.samples[: one.features.samples.sum()]
        np.add.at(found[one.segment.epoch], trained, 1)
    return found


@pytest.mark.parametrize("name", RELAXED)
def test_ranks_meet_at_the_end_of_each_segment(name: str) -> None:
    """Their steps fill the time until then; each sample is used once; the same again."""
    simulation, again = (Simulation.of(scenario(policy=name)) for _ in range(2))
    ran = train(simulation)
    assert (uses(ran) == 1).all()
    for one, other in zip(ran, train(again), strict=True):
        part = slice(0, len(one.step_s))
        assert records(one, part, 0, 0.0) == records(other, part, 0, 0.0)
        assert rounds(one, 0, 0.0) == rounds(other, 0, 0.0)
    ends = [one.started_at[-1] + one.rank_step_s[-1] for one in ran]
    for one, following in zip(ends, ran[1:], strict=False):
        assert following.started_at[0] == pytest.approx(one)
        if following.segment.synchroniser.name == "partial":
            assert np.ptp(one) < 1e-9
    assert simulation.now == pytest.approx(sum(one.step_s.sum() for one in ran))
    assert np.ptp(ends[-1]) < 1e-9, "the epoch is over"
    relaxed = [one.segment for one in ran if one.segment.synchroniser != ALLREDUCE]
    assert max((one.steps for one in relaxed), default=0) >= 16 or name == "adaptive"
    assert all((one.wait_s >= 0).all() for one in ran)


def test_a_persistent_straggler_is_not_waited_for_in_each_step() -> None:
    """Nor does it matter to the time of a segment: that is its own."""
    found = summary.compare(scenario(), ["bsp", "rna", "backup-workers", "flexrr"], warmup=20)
    assert found["bsp"].rounds == 0
    assert found["bsp"].contributors is None
    for name in ("rna", "backup-workers"):
        one = found[name]
        assert one.step_time_s < found["bsp"].step_time_s - 0.005, "rounds hide behind computing"
        assert one.contributors is not None
        assert 1 < one.contributors < 4
        assert one.rounds > one.steps / 2
    assert found["backup-workers"].dropped > 0
    assert found["flexrr"].step_time_s < 0.85 * found["rna"].step_time_s
    speedup = found["flexrr"].speedup
    assert speedup is not None
    assert speedup > 1.2


def test_switches_between_synchronisers_and_failures() -> None:
    """What went on over segments meets first; time runs on; each sample once."""
    chain = ["local-sgd", "rna", "local-sgd", "bsp", "flexrr", "ad-psgd", "rna-hierarchical"]
    switches = [{"step": 12 * k, "policy": name} for k, name in enumerate(chain, 1)]
    failures = [{"rank": 3, "step": 40, "world": 3}, {"rank": 0, "step": 70}]
    simulation = Simulation.of(scenario(switches=switches, failures=failures))
    ran = train(simulation)
    assert (uses(ran) == 1).all()
    assert {one.segment.policy for one in ran} == {"bsp", *chain}
    assert [one.attempt for one in ran] == sorted(one.attempt for one in ran)
    met = []
    for one, following in pairwise(ran):
        if one.attempt == following.attempt and len(one.step_s):
            ended = one.started_at[-1] + one.rank_step_s[-1]
            assert following.started_at[0] == pytest.approx(ended)
        going_on = one.segment.policy in ("local-sgd", "ad-psgd")
        if going_on and one.segment.policy != following.segment.policy:
            apart = following.started_at[0].max() - following.started_at[0]
            met += [one.segment.policy] if np.ptp(apart) > 0.01 else []
            assert (following.wait_s[0] >= apart - 1e-9).all()
    assert set(met) == {"local-sgd", "ad-psgd"}
    assert simulation.now > sum(one.step_s.sum() for one in ran), "restarts take time"


def test_nobody_has_a_segment_before_the_leader() -> None:
    """Under one-shot averaging ranks part; rank 0 is the slowest, and adopts each segment."""
    slow = scenario(
        devices={"unit_s": 1e-3, "factors": [3, 1, 1, 1]},
        policy="local-sgd",
        parameters={"every": 10_000},
    )
    ran = train(Simulation.of(slow))
    first, second = ran[1], ran[2]
    assert first.segment.epoch == second.segment.epoch
    assert second.begins_at == second.started_at[0, 0]
    loaded = second.started_at[0] + second.data_s[0]
    assert loaded == pytest.approx(np.full(4, second.begins_at))
    assert second.data_s[0, 1] > 0


def test_records_are_those_of_ranks_that_go_their_own_ways() -> None:
    simulation = Simulation.of(scenario(policy="rna"))
    simulation.advance()  # two steps: how long they take was not known
    ran = simulation.advance()
    table = records(ran, slice(0, len(ran.step_s)), 0, 1000.0)
    steps, world = ran.compute_s.shape
    ended = np.array(table["ended_at"]).reshape(steps, world)
    parts = [np.array(table[name]) for name in ("data_s", "compute_s", "sync_s")]
    assert np.array(table["step_s"]) == pytest.approx(sum(parts))
    assert ended[0] == pytest.approx(1000.0 + ran.started_at[1])
    assert np.ptp(ended[steps // 2]) > 0.1, "ranks are far apart in the middle"
    assert np.ptp(ended[-1]) < 1e-6
    told = rounds(ran, 7, 1000.0)
    assert [one.seq for one in told] == list(range(7, 7 + len(told)))
    assert [one.number for one in told] == list(range(len(told)))
    assert {(one.rank, one.world, one.segment) for one in told} == {(0, 4, ran.segment.seq)}
    assert told[-1].ended_at == pytest.approx(ended[-1, 0])
    assert all(a.ended_at <= b.ended_at for a, b in pairwise(told))
    first, last = ran.segment.first_step, ran.segment.first_step + steps - 1
    assert (told[0].step, told[-1].step) == (first + 1, last)
    assert sum(sum(one.staleness) for one in told) <= steps * world


def test_batches_that_changed_have_no_expected_time() -> None:
    simulation = Simulation.of(scenario(policy="flexrr", parameters={"batches": "lbb"}, epochs=1))
    ran = train(simulation)[-1]
    moved = ran.features.samples != ran.plan.batches.counts
    assert moved.any()
    assert ran.ett_s is not None
    assert (np.isnan(ran.ett_s) == moved).all()
    table = records(ran, slice(0, len(ran.step_s)), 0, 0.0)
    assert [one is None for one in table["ett_s"]] == moved.ravel().tolist()
    assert table["samples"] == ran.features.samples.ravel().tolist()
