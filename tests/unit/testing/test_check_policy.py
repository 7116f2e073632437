"""`check_policy`, which third parties test with, notices each way to break the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Annotated, Any

import numpy as np
import pytest
from msgspec import Meta

from paceline import policies
from paceline.policies import (
    Assignment,
    Feedback,
    Models,
    Parameters,
    Policy,
    Preset,
    Problem,
)
from paceline.policies.base import Allocation, Ints
from paceline.policies.presets import bsp
from paceline.policies.solve import counts as counted
from paceline_backend.testing import check_policy

_calls = count()


@dataclass(frozen=True)
class Broken(bsp.EqualCounts):
    after: Callable[[Problem, Assignment], Assignment]

    def schedule(self, problem: Problem, models: Models) -> Assignment:
        return self.after(problem, super().schedule(problem, models))


@dataclass(frozen=True)
class Forgets(bsp.EqualCounts):
    def compose(self, problem: Problem, models: Models) -> Ints:
        return np.maximum(super().compose(problem, models), problem.remaining[:1])[:-1]


@dataclass(frozen=True)
class Unshuffled(bsp.EqualCounts):
    def compose(self, problem: Problem, models: Models) -> Ints:
        return problem.remaining


@dataclass(frozen=True)
class Misplaces:
    def shuffle(self, problem: Problem, models: Models) -> Ints:
        return problem.placement + 1


@dataclass(frozen=True)
class Allocates:
    changes: Callable[[Problem], dict[str, Any]]

    def allocate(self, problem: Problem, models: Models, feedback: Feedback) -> Allocation:
        return replace(Allocation(counted.equal(problem), {}), **self.changes(problem))


def allocating(changes: Callable[[Problem], dict[str, Any]]) -> Preset:
    scheduler = counted.CountedScheduler()
    return preset_of(policy_of(scheduler=scheduler, allocator=Allocates(changes)))


def all_to_one(problem: Problem) -> Ints:
    counts = np.zeros(problem.world, np.int64)
    counts[0] = problem.global_batch
    return counts


def writes(problem: Problem, made: Assignment) -> Assignment:
    problem.placement[:] = 0
    return made


def remembers(problem: Problem, made: Assignment) -> Assignment:
    turn = next(_calls) % problem.world
    return replace(made, counts=np.roll(made.counts, turn, axis=1))


def repeats(problem: Problem, made: Assignment) -> Assignment:
    return replace(made, samples=np.full_like(made.samples, problem.remaining[0]))


def shortens(problem: Problem, made: Assignment) -> Assignment:
    counts = made.counts.copy()
    counts[-1] = 0
    return Assignment(counts, made.samples[: counts.sum()])


class NoDefault(Parameters, frozen=True, kw_only=True):
    k: Annotated[int, Meta(description="d")]


class Undescribed(Parameters, frozen=True, kw_only=True):
    k: int = 1


class IllegalDefault(Parameters, frozen=True, kw_only=True):
    k: Annotated[int, Meta(ge=1, description="d")] = 0


def preset_of(policy: Policy, **changes: Any) -> Preset:
    return replace(Preset("broken", "s", "s", lambda _: policy), **changes)


def policy_of(**changes: Any) -> Policy:
    return replace(policies.make("bsp"), **{"name": "broken", "plain_batches": False, **changes})


@pytest.mark.parametrize(
    ("preset", "says"),
    [
        (preset_of(policy_of(scheduler=Broken(writes))), "Problem.placement was changed in place"),
        (
            preset_of(policy_of(scheduler=Broken(remembers))),
            "assignment.counts differs when planned",
        ),
        (preset_of(policy_of(scheduler=Broken(repeats))), "a segment has a sample twice"),
        (preset_of(policy_of(scheduler=Broken(shortens))), r"steps have \[.*0\] samples, not "),
        (preset_of(policy_of(scheduler=Forgets())), "compose.. does not return each remaining"),
        (
            preset_of(policy_of(scheduler=Unshuffled(), plain_batches=True)),
            r"plain_batches: step \d+ has other samples than under plain DDP",
        ),
        (preset_of(policy_of(shuffler=Misplaces())), "shuffle.. "),
        (
            allocating(lambda problem: {"counts": counted.equal(problem) * 2}),
            r"counts: their sum is \d+; the batch has",
        ),
        (allocating(lambda problem: {"counts": all_to_one(problem)}), "but memory limits are"),
        (allocating(lambda problem: {"threads": (2,) * (problem.world + 1)}), "threads: .* none"),
        (allocating(lambda problem: {"threads": (0,) * problem.world}), "threads: .*1 or more"),
        (allocating(lambda problem: {"memory": {"seen": float("nan")}}), "memory is not the same"),
        (allocating(lambda problem: {"memory": {1: "x"}}), "Expected `str`, got `int`"),
        (preset_of(policies.make("bsp")), "name is 'bsp', not 'broken'"),
        (preset_of(policy_of(), source=""), "preset.source is empty"),
        (preset_of(policy_of(), parameters=NoDefault), "parameters.k.default is missing"),
        (preset_of(policy_of(), parameters=Undescribed), "parameters.k.description is missing"),
    ],
)
def test_breaches_are_named(preset: Preset, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_policy(preset, cases=10)


def test_a_default_must_be_legal() -> None:
    with pytest.raises(policies.PolicyParameterError, match=r"parameters\.k: 0 is not legal"):
        check_policy(preset_of(policy_of(), parameters=IllegalDefault))


@pytest.mark.parametrize("name", ["bsp", "boa", "paceline"])
def test_what_keeps_it_passes(name: str) -> None:
    check_policy(policies.get(name), cases=10, seed=8)
