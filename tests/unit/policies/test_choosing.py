"""A policy may choose how gradients meet, segment by segment, from what ranks reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from paceline import policies
from paceline.core.emulation import Emulation, Slowdown
from paceline.core.pool import is_pooled
from paceline.planning.feedback import single_batches
from paceline.planning.offer import LEAST_RELAXED, MOST_SEGMENT_STEPS
from paceline.policies import Choice, Feedback, Models, Policy, Preset, Problem, plan
from paceline.policies.base import Allocation
from paceline.policies.solve import counts as counted
from paceline.wire import ALLREDUCE
from paceline.wire.synchronisation import Partial, PartialRules, convert
from paceline_backend.simulator import Simulation, TrainedSegment
from paceline_backend.testing import check_policy
from support.records import hello

PARTIAL = convert("partial", {"probes": 2, "staleness": 4, "mean": True})


@dataclass(frozen=True)
class WhileSlow:
    """Partial while a rank's newest batch took it twice the mean of all; counts its segments."""

    def choose(self, feedback: Feedback, world: int, memory: Mapping[str, Any]) -> Choice:
        assert set(memory) <= {"chosen"}, "the allocator's memory is none of its business"
        chosen = {"chosen": int(memory.get("chosen", 0)) + 1}
        if not len(feedback):
            return Choice(ALLREDUCE, "nothing is known yet", chosen)
        last = feedback.batches(world, 1).compute_s[-1]
        if last.max() > 2 * last.mean():
            return Choice(PARTIAL, f"rank {last.argmax()} takes {last.max():.3f} s", chosen)
        return Choice(ALLREDUCE, "all take as long", chosen)


def policy(batches: str = "bsp") -> Policy:
    return replace(policies.make(batches), name="while-slow", synchroniser=WhileSlow())


def trained(steps: int) -> list[TrainedSegment]:
    """One rank of four is five times slower in the steps from 40 to 200."""
    slow = Slowdown(ranks=[1], factor=5.0, first_step=40, steps=160)
    devices = Emulation(a_s=[1e-3] * 4, b_s=[0.1] * 4, slowdowns=[slow])
    start = hello(world=4, global_batch=32, sizes=np.ones(20_000).tobytes(), epochs=None)
    run = Simulation(start, devices, policy())
    ran = []
    while run.step < steps:
        ran.append(run.advance())
    return ran


def test_segments_follow_the_choice() -> None:
    segments = [ran.plan for ran in trained(400)]
    assert {s.synchroniser.name for s in segments if 60 <= s.first_step < 180} == {"partial"}
    assert segments[0].synchroniser == segments[-1].synchroniser == ALLREDUCE
    assert {s.why for s in segments if s.synchroniser == PARTIAL} == {"rank 1 takes 0.540 s"}
    assert {s.why for s in segments[1:] if s.synchroniser == ALLREDUCE} == {"all take as long"}
    assert min(s.steps for s in segments if s.synchroniser == PARTIAL) >= LEAST_RELAXED
    assert max(s.steps for s in segments if s.synchroniser == ALLREDUCE) <= MOST_SEGMENT_STEPS
    assert [s.memory["synchroniser"]["chosen"] for s in segments] == list(
        range(1, len(segments) + 1)
    )


@dataclass(frozen=True)
class Heard:
    """As `WhileSlow`; notes how much it was told each time."""

    calls: list[int] = field(default_factory=list)

    def choose(self, feedback: Feedback, world: int, memory: Mapping[str, Any]) -> Choice:
        self.calls.append(len(feedback))
        return WhileSlow().choose(feedback, world, memory)


def test_a_segment_is_chosen_for_once() -> None:
    """Also where speeds have changed, so that all is composed and planned again."""
    heard = Heard()
    free = policies.make("paceline", {"mode": "free"})
    start = hello(world=2, global_batch=16, sizes=np.ones(4000).tobytes(), epochs=None)
    slow = Slowdown(ranks=[1], factor=4.0, first_step=20, steps=100)
    devices = Emulation(a_s=[1e-3] * 2, b_s=[0.01] * 2, slowdowns=[slow])
    run = Simulation(start, devices, replace(free, synchroniser=heard))
    segments = [run.advance().plan for _ in range(60)]
    assert len({plan.epoch for plan in segments}) < sum(s.shuffled for s in segments)
    assert len(heard.calls) == len(segments)


def test_plans_are_the_same_with_what_was_chosen_before() -> None:
    """A replay does not know how many steps were asked for, and so does not choose first."""
    start = hello(world=4, global_batch=8, sizes=np.ones(400).tobytes(), epochs=None)
    devices = Emulation(a_s=[1e-3] * 3 + [9e-3], b_s=[0.0] * 4)
    run = Simulation(start, devices, policy())
    for _ in range(5):
        shuffle = run.history.must_shuffle(run.version)
        feedback = single_batches(run.window.feedback(), run.history.newest)
        problem = run.history.problem(LEAST_RELAXED, run.version, shuffle=shuffle)
        segment = run.advance().plan
        again, _ = plan(
            run.policy, replace(problem, steps=segment.steps), feedback, shuffle=shuffle
        )
        assert (again.synchroniser, again.why) == (segment.synchroniser, segment.why)
        assert again.memory == segment.memory
        assert again.assignment.samples.astype("<u4").tobytes() == segment.indices
    assert segment.synchroniser == PARTIAL


@dataclass(frozen=True)
class Counting:
    """An allocator of equal counts that counts its calls."""

    def allocate(self, problem: Problem, models: Models, feedback: Feedback) -> Allocation:
        assert set(problem.memory) <= {"called"}, "the chooser's memory is none of its business"
        called = int(problem.memory.get("called", 0)) + 1
        return Allocation(counted.equal(problem), {"called": called})


def test_allocator_and_chooser_have_memories_of_their_own() -> None:
    start = hello(world=2, global_batch=8, sizes=np.ones(400).tobytes(), epochs=None)
    both = replace(policies.make("static-batching"), allocator=Counting(), synchroniser=WhileSlow())
    run = Simulation(start, Emulation(a_s=[1e-3] * 2, b_s=[0.0] * 2), both)
    for k in range(1, 4):
        assert run.advance().plan.memory == {"called": k, "synchroniser": {"chosen": k}}


def test_another_version_begins_with_no_memory() -> None:
    start = hello(world=2, global_batch=8, sizes=np.ones(400).tobytes(), epochs=None)
    run = Simulation(start, Emulation(a_s=[1e-3] * 2, b_s=[0.0] * 2), policy())
    run.advance()
    assert run.advance().plan.memory == {"synchroniser": {"chosen": 2}}
    run.switch(policy())
    assert run.advance().plan.memory == {"synchroniser": {"chosen": 1}}


@dataclass(frozen=True)
class Says:
    """Whatever the data tell, the same."""

    choice: Choice

    def choose(self, feedback: Feedback, world: int, memory: Mapping[str, Any]) -> Choice:
        return self.choice


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (Choice(Partial(PartialRules(probes=0, staleness=4, mean=True))), "probes: expected"),
        (Choice(Partial(PartialRules(probes=2, staleness=-1, mean=True))), "staleness: expected"),
        (Choice(ALLREDUCE, memory={"at": float("nan")}), "memory is not the same"),
    ],
)
def test_the_contract_names_what_ranks_would_not_take(choice: Choice, says: str) -> None:
    made = replace(policies.make("bsp"), name="says", synchroniser=Says(choice))
    with pytest.raises(AssertionError, match=says):
        check_policy(Preset("says", "s", "s", lambda _: made), cases=3)


def test_the_contract_is_kept() -> None:
    check_policy(Preset("while-slow", "s", "s", lambda _: policy("lbb")), cases=5)


@pytest.mark.parametrize(("uneven", "lead"), [(True, None), (False, 3)])
def test_flexrr_bounds_the_lead_where_ranks_share_no_batches(
    uneven: bool, lead: int | None
) -> None:
    policy = policies.make("flexrr", {"staleness": 3})
    chosen = policy.choose(Feedback.empty(), 4, {}, uneven_steps=uneven).synchroniser
    assert chosen == Partial(PartialRules(quorum=1, staleness=None, lead=lead, mean=False))
    assert is_pooled(chosen) == uneven
