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
from support.simulated import train

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


def uses(ran: list[TrainedSegment]) -> Any:
    counts = np.zeros((2, 900), int)
    for trained in ran:
        # As many as were computed, whichever rank they moved to.
        samples = trained.segment.assignment.samples[: trained.features.samples.sum()]
        np.add.at(counts[trained.segment.epoch], samples, 1)
    return counts


@pytest.mark.parametrize("name", RELAXED)
def test_ranks_meet_at_the_end_of_each_segment(name: str) -> None:
    """Their steps fill the time until then; each sample is used once; the same again."""
    simulation, again = (Simulation.of(scenario(policy=name)) for _ in range(2))
    ran = train(simulation)
    assert (uses(ran) == 1).all()
    for trained, repeated in zip(ran, train(again), strict=True):
        part = slice(0, len(trained.step_s))
        assert records(trained, part, 0, 0.0) == records(repeated, part, 0, 0.0)
        assert rounds(trained, 0, 0.0) == rounds(repeated, 0, 0.0)
    ends = [trained.started_at[-1] + trained.rank_step_s[-1] for trained in ran]
    for end, following in zip(ends, ran[1:], strict=False):
        assert following.started_at[0] == pytest.approx(end)
        if following.segment.synchroniser.name == "partial":
            assert np.ptp(end) < 1e-9
    assert simulation.now == pytest.approx(sum(trained.step_s.sum() for trained in ran))
    assert np.ptp(ends[-1]) < 1e-9, "the epoch is over"
    relaxed = [trained.segment for trained in ran if trained.segment.synchroniser != ALLREDUCE]
    chosen = name == "paceline-relaxed"  # it may stay with the all-reduce
    assert max((segment.steps for segment in relaxed), default=0) >= 16 or chosen
    assert all((trained.wait_s >= 0).all() for trained in ran)


def test_a_persistent_straggler_is_not_waited_for_in_each_step() -> None:
    """Nor at a segment's end: the others take over its batches."""
    results = summary.compare(scenario(), ["bsp", "rna", "backup-workers", "flexrr"], warmup=20)
    assert results["bsp"].rounds == 0
    assert results["bsp"].contributors is None
    for name in ("rna", "backup-workers"):
        result = results[name]
        assert result.step_time_s < results["bsp"].step_time_s - 0.005, (
            "rounds hide behind computing"
        )
        assert result.contributors is not None
        assert 1 < result.contributors < 4
        assert result.rounds > result.steps / 2
    assert results["backup-workers"].dropped > 0
    assert results["rna"].step_time_s < 0.6 * results["bsp"].step_time_s
    assert results["backup-workers"].step_time_s < 0.85 * results["bsp"].step_time_s
    speedup = results["flexrr"].speedup
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
    assert {trained.segment.policy for trained in ran} == {"bsp", *chain}
    assert [trained.attempt for trained in ran] == sorted(trained.attempt for trained in ran)
    met = []
    for trained, following in pairwise(ran):
        if trained.attempt == following.attempt and len(trained.step_s):
            ended = trained.started_at[-1] + trained.rank_step_s[-1]
            assert following.started_at[0] == pytest.approx(ended)
        going_on = trained.segment.policy in ("local-sgd", "ad-psgd")
        if going_on and trained.segment.policy != following.segment.policy:
            apart = following.started_at[0].max() - following.started_at[0]
            met += [trained.segment.policy] if np.ptp(apart) > 0.01 else []
            assert (following.wait_s[0] >= apart - 1e-9).all()
    assert set(met) == {"local-sgd", "ad-psgd"}
    assert simulation.now > sum(trained.step_s.sum() for trained in ran), "restarts take time"


def test_nobody_has_a_segment_before_the_leader() -> None:
    """Under one-shot averaging ranks part; rank 0 adopts each segment, and may be the last."""
    slow = scenario(
        devices={"unit_s": 1e-3, "factors": [3, 1, 1, 1]},
        policy="local-sgd",
        parameters={"every": 10_000},
    )
    ran = train(Simulation.of(slow))
    late = []
    for first, second in pairwise(ran[1:]):
        if first.segment.epoch == second.segment.epoch:
            assert second.begins_at == second.started_at[0, 0]
            loaded = second.started_at[0] + second.data_s[0]
            early = second.started_at[0] < second.begins_at
            assert loaded[early] == pytest.approx(second.begins_at)
            assert (second.data_s[0, ~early] == 0).all()
            late.append(bool(early.any()))
    assert any(late)


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
    round_records = rounds(ran, 7, 1000.0)
    assert [record.seq for record in round_records] == list(range(7, 7 + len(round_records)))
    assert [record.number for record in round_records] == list(range(len(round_records)))
    assert {(record.rank, record.world, record.segment) for record in round_records} == {
        (0, 4, ran.segment.seq)
    }
    assert round_records[-1].ended_at == pytest.approx(ended[-1, 0])
    assert all(a.ended_at <= b.ended_at for a, b in pairwise(round_records))
    first, last = ran.segment.first_step, ran.segment.first_step + steps - 1
    assert (round_records[0].step, round_records[-1].step) == (first + 1, last)
    assert sum(sum(record.staleness) for record in round_records) <= steps * world


def test_batches_that_changed_have_no_expected_time() -> None:
    simulation = Simulation.of(scenario(policy="flexrr", parameters={"batches": "lbb"}, epochs=1))
    ran = train(simulation)[-1]
    moved = ran.features.samples != ran.segment.assignment.counts
    assert moved.any()
    assert ran.ett_s is not None
    assert (np.isnan(ran.ett_s) == moved).all()
    table = records(ran, slice(0, len(ran.step_s)), 0, 0.0)
    assert [ett_s is None for ett_s in table["ett_s"]] == moved.ravel().tolist()
    assert table["samples"] == ran.features.samples.ravel().tolist()
