"""Simulations under relaxed synchronisers: their clocks, their records, and each sample once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from paceline.wire import ALLREDUCE
from paceline_backend.simulator import Scenario, Simulation, TrainedSegment
from paceline_backend.simulator.broadcast import records, rounds
from support.simulated import train

RELAXED = ["ad-psgd", "diloco", "paceline-relaxed", "rna"]  # the others are in unit/golden


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
        samples = trained.plan.assignment.samples[: trained.features.samples.sum()]
        np.add.at(counts[trained.plan.epoch], samples, 1)
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
        if following.plan.synchroniser.name == "partial":
            assert np.ptp(end) < 1e-9
    assert simulation.now == pytest.approx(sum(trained.step_s.sum() for trained in ran))
    assert np.ptp(ends[-1]) < 1e-9, "the epoch is over"
    relaxed = [trained.plan for trained in ran if trained.plan.synchroniser != ALLREDUCE]
    chosen = name == "paceline-relaxed"  # it may stay with the all-reduce
    assert max((plan.steps for plan in relaxed), default=0) >= 16 or chosen
    assert all((trained.wait_s >= 0).all() for trained in ran)


def test_switches_between_synchronisers_and_failures() -> None:
    """What went on over segments meets first; time runs on; each sample once."""
    chain = ["local-sgd", "rna", "local-sgd", "bsp", "flexrr", "ad-psgd", "rna-hierarchical"]
    switches = [{"step": 12 * k, "policy": name} for k, name in enumerate(chain, 1)]
    failures = [{"rank": 3, "step": 40, "world": 3}, {"rank": 0, "step": 70}]
    simulation = Simulation.of(scenario(switches=switches, failures=failures))
    ran = train(simulation)
    assert (uses(ran) == 1).all()
    assert {trained.plan.policy for trained in ran} == {"bsp", *chain}
    assert [trained.attempt for trained in ran] == sorted(trained.attempt for trained in ran)
    met = []
    for trained, following in pairwise(ran):
        if trained.attempt == following.attempt and len(trained.step_s):
            ended = trained.started_at[-1] + trained.rank_step_s[-1]
            assert following.started_at[0] == pytest.approx(ended)
        going_on = trained.plan.policy in ("local-sgd", "ad-psgd")
        if going_on and trained.plan.policy != following.plan.policy:
            apart = following.started_at[0].max() - following.started_at[0]
            met += [trained.plan.policy] if np.ptp(apart) > 0.01 else []
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
        if first.plan.epoch == second.plan.epoch:
            assert second.begins_at == second.started_at[0, 0]
            loaded = second.started_at[0] + second.data_s[0]
            early = second.started_at[0] < second.begins_at
            assert loaded[early] == pytest.approx(second.begins_at)
            assert (second.data_s[0, ~early] == 0).all()
            late.append(bool(early.any()))
    assert any(late)


def test_batches_that_changed_have_no_expected_time() -> None:
    simulation = Simulation.of(scenario(policy="flexrr", parameters={"batches": "lbb"}, epochs=1))
    ran = train(simulation)[-1]
    moved = ran.features.samples != ran.plan.assignment.counts
    assert moved.any()
    assert ran.ett_s is not None
    assert (np.isnan(ran.ett_s) == moved).all()
    table = records(ran, slice(0, len(ran.step_s)), 0, 0.0)
    assert [ett_s is None for ett_s in table["ett_s"]] == moved.ravel().tolist()
    assert table["samples"] == ran.features.samples.ravel().tolist()
