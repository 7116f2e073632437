"""Causes that level the same batches add up, and waiting is never denied."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paceline_backend.insight.verdict import (
    ObservedSteps,
    Verdict,
    VerdictLevel,
    diagnose,
    facts_of,
    judge,
    words,
)
from support.timings import observed, slow

STEPS, WORLD = 300, 6


def planned(
    speed: np.ndarray, spread: float, *, lag: int = 4, steps: int = STEPS, seed: int = 5
) -> ObservedSteps:
    """Counts that level the ranks' speeds `lag` steps later, of samples whose sizes vary."""
    speed = np.broadcast_to(speed, (steps, WORLD))
    known = speed[np.maximum(np.arange(steps) - lag, 0)]
    share = (1 / known) / (1 / known).sum(axis=1, keepdims=True)
    sizes = np.random.default_rng(seed).lognormal(0.0, spread, (steps, WORLD))
    load = 240 * share * sizes / sizes.mean(axis=1, keepdims=True)
    return observed(WORLD, steps, load=load, speed=speed, samples=48 * share)


def since(rank: int, step: int, factor: float) -> np.ndarray:
    """The speeds of a rank that becomes slow."""
    speed = np.ones((STEPS, WORLD))
    speed[step:, rank] = factor
    return speed


def by_kind(verdict: Verdict) -> dict[tuple[str, tuple[int, ...]], float]:
    return {(cause.kind, cause.ranks): cause.cost_s for cause in verdict.causes}


def level_s(seen: ObservedSteps, load: np.ndarray, speed: np.ndarray) -> float:
    """What computing takes with these loads and speeds."""
    return float((2e-3 * load * speed).max(axis=1).sum())


@pytest.mark.parametrize("spread", [0.15, 0.3, 0.6])
@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
def test_a_slow_rank_under_a_plan_and_uneven_sizes(spread: float, factor: float) -> None:
    """Both are named, and together they cost what both cost."""
    seen = planned(slow(2, factor), spread, lag=0)
    verdict = judge(seen)
    costs = by_kind(verdict)
    assert set(costs) == {("node", (2,)), ("data", ())}
    assert all(cause.hidden == (cause.kind == "node") for cause in verdict.causes)
    even = np.full((STEPS, WORLD), 40.0)
    ideal_s = level_s(seen, even, np.ones(WORLD))
    as_it_was_s = float(seen.compute_s.max(axis=1).sum())
    assert verdict.cost_s == pytest.approx(as_it_was_s - ideal_s, rel=0.1)
    assert costs["data", ()] > 0.05 * verdict.wall_s
    assert costs["node", (2,)] > 0.02 * verdict.wall_s


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_two_slow_ranks_with_different_onsets(spread: float) -> None:
    speed = since(1, 0, 2.0) * since(4, 140, 1.7)
    verdict = judge(planned(speed, spread))
    nodes = [cause for cause in verdict.causes if cause.kind == "node"]
    assert {cause.ranks: cause.since for cause in nodes} == {(1,): None, (4,): pytest.approx(140)}
    assert all(cause.hidden for cause in nodes)
    first, second = sorted(nodes, key=lambda cause: cause.ranks)
    assert second.hidden_since == pytest.approx(144, abs=2)
    # Six ranks do the work of 5.5, and then of 5.09.
    unit_s = 2e-3 * 240
    if spread == 0.0:
        assert first.cost_s == pytest.approx(STEPS * unit_s * (1 / 5.5 - 1 / 6), rel=0.15)
        late_s = 4 * unit_s / 5.5 * 0.7
        hidden_s = 156 * unit_s * (1 / (4.5 + 1 / 1.7) - 1 / 5.5)
        assert second.cost_s == pytest.approx(late_s + hidden_s, rel=0.15)
    assert (spread > 0) == any(cause.kind == "data" for cause in verdict.causes)


def test_three_slow_ranks_of_six_and_uneven_sizes() -> None:
    speed = since(0, 0, 1.6) * since(3, 90, 2.0) * since(5, 200, 3.0)
    costs = by_kind(judge(planned(speed, 0.4)))
    assert {ranks for kind, ranks in costs if kind == "node"} == {(0,), (3,), (5,)}
    assert ("data", ()) in costs


def test_a_plan_that_learns_once_hides_the_rank_from_then_on() -> None:
    """The policy is the same throughout; its plan knows of the slowness after a third."""
    seen = planned(slow(2, 2.0), 0.03, lag=0)
    equal = planned(np.ones(WORLD), 0.03, lag=0)
    late = np.arange(STEPS)[:, None] >= 100
    load = np.where(late, seen.load, equal.load)
    seen = observed(WORLD, STEPS, load=load, speed=slow(2, 2.0), samples=load / 10)
    verdict = judge(seen)
    [node] = [cause for cause in verdict.causes if cause.kind == "node"]
    assert node.hidden_since == pytest.approx(100, abs=2)
    assert diagnose(verdict).level in (VerdictLevel.HEALTHY, VerdictLevel.WATCH)
    assert diagnose(verdict).waste < 0.1


def test_a_passing_slowness_that_the_plan_follows() -> None:
    """What the plan dealt then is no unevenness of sizes."""
    speed = since(2, 100, 2.0)
    speed[160:] = 1.0
    verdict = judge(planned(speed, 0.0))
    assert [(cause.kind, cause.ranks) for cause in verdict.causes] == [("transient", (2,))]
    [cause] = verdict.causes
    unit_s = 2e-3 * 240
    hidden_s, late_s = 56 * unit_s * (1 / 5.5 - 1 / 6), 4 * unit_s / 6
    after_s = 4 * unit_s * (1 / 5.5 - 1 / 6)
    assert cause.cost_s == pytest.approx(hidden_s + late_s + after_s, rel=0.3)


def test_slow_ranks_and_uneven_batches_without_a_plan_are_both_named() -> None:
    """The slow rank is last in nearly all steps, so even batches alone would save little."""
    sizes = np.random.default_rng(0).lognormal(3.7, 0.3, (STEPS, WORLD))
    verdict = judge(observed(WORLD, STEPS, load=sizes, speed=slow(2, 3.0)))
    assert set(by_kind(verdict)) == {("node", (2,)), ("data", ())}


def says_that_nobody_waits(verdict: Verdict) -> bool:
    facts = facts_of(verdict)
    said = [facts["words"], facts["what"], *(cause["words"] for cause in facts["causes"])]
    denials = ("No straggler", "nobody waits", "no rank holds")
    return any(denial in text for text in said for denial in denials)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("factor", [1.0, 1.04, 2.0])
def test_waiting_is_never_denied(noise: float, spread: float, factor: float) -> None:
    for dealt in (True, False):
        seen = planned(slow(2, factor), spread, lag=0 if dealt else STEPS, steps=120)
        rng = np.random.default_rng(3)
        compute_s = seen.compute_s * np.exp(noise * rng.standard_normal(seen.compute_s.shape))
        verdict = judge(dataclasses.replace(seen, compute_s=compute_s))
        waits = max(verdict.waste, diagnose(verdict).waste) > 0.05
        assert not (waits and says_that_nobody_waits(verdict)), facts_of(verdict)


def test_words_of_a_plan_under_which_ranks_still_wait() -> None:
    verdict = judge(planned(slow(2, 2.0), 0.4, lag=0))
    [text] = [cause["words"] for cause in facts_of(verdict)["causes"] if cause["kind"] == "node"]
    assert "all the same, ranks spend" in text
    calm = judge(planned(slow(2, 2.0), 0.0, lag=0))
    assert "so nobody waits; the others do that work" in words(calm)
