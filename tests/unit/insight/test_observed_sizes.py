"""Observed runs whose ranks have batches of different sizes: no plan deals them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.wire import OBSERVED
from paceline_backend.insight.attribution import Rows, attribute
from paceline_backend.insight.verdict import ObservedSteps, facts_of, judge

STEPS, BATCH = 150, 8


def shaped(
    lengths: Sequence[int],
    *,
    fixed_s: float = 0.002,
    noise: float = 0.02,
    pauses_s: float = 0.0,
    speed: Sequence[float] | float = 1.0,
) -> ObservedSteps:
    """Padded batches, whose lengths vary a little; 20 µs an element's row, and what is fixed."""
    rng, world = np.random.default_rng(0), len(lengths)
    longest = ((np.arange(STEPS * BATCH) * 7) % 40).reshape(STEPS, BATCH).max(axis=1)
    rows = BATCH * (np.array(lengths) + longest[:, None]).astype(float)
    compute_s = (2e-5 * rows + fixed_s) * np.broadcast_to(speed, world)
    compute_s = compute_s * (1 + noise * rng.standard_normal(rows.shape))
    compute_s += pauses_s * (rng.random(rows.shape) < 0.05)
    load = 4 * rows
    return ObservedSteps(
        step=np.arange(STEPS),
        samples=np.full(rows.shape, float(BATCH)),
        load=load,
        squares=load**2 / BATCH,
        longest=load / BATCH,
        data_s=np.full(rows.shape, 0.001),
        compute_s=compute_s,
        sync_s=compute_s.max(axis=1, keepdims=True) - compute_s + 0.003,
        between_s=np.full(STEPS, 0.001),
        first=np.arange(STEPS) == 0,
        apart=np.zeros(STEPS, bool),
        nodes=["a"] * world,
        policy=OBSERVED,
    )


LENGTHS = [(100, 300), (100, 130), (50, 400), (100, 300, 100, 100), (100, 100, 300, 300)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("fixed_s", [0.0, 0.002, 0.03])
def test_larger_batches_are_no_slow_rank(lengths: Sequence[int], fixed_s: float) -> None:
    facts = facts_of(judge(shaped(lengths, fixed_s=fixed_s)))
    [cause] = facts["causes"]
    assert cause["kind"] == "data"
    assert cause["ranks"] == [rank for rank, each in enumerate(lengths) if each > min(lengths)]
    assert "slower" not in facts["words"]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_nothing_is_said_of_a_plan(lengths: Sequence[int]) -> None:
    """Also where the slow rank has the smaller batches, and where ranks pause."""
    for speed in ([3.0] + [1.0] * (len(lengths) - 1), 1.0):
        seen = shaped(lengths, speed=speed, pauses_s=0.02, fixed_s=0.01)
        facts = facts_of(judge(seen))
        texts = [facts["words"], facts["what"], *(each["words"] for each in facts["causes"])]
        assert not any("plan" in text for text in texts)
        assert not any(cause["hidden"] for cause in facts["causes"])


@pytest.mark.parametrize("lengths", [(100, 100), (100, 100, 100, 100), (300, 100)])
def test_a_slow_rank_is_still_named(lengths: Sequence[int]) -> None:
    """Batches that are as large, or smaller, explain no longer time."""
    slow = len(lengths) - 1
    speed = [1.0] * slow + [4.0]
    causes = judge(shaped(lengths, speed=speed)).causes
    assert ("node", (slow,)) in [(cause.kind, cause.ranks) for cause in causes]


def test_a_ranks_factor_is_of_batches_of_the_same_size() -> None:
    seen = shaped((100, 300), fixed_s=0.01)
    names = ("step", "samples", "load", "squares", "longest", "data_s", "compute_s")
    rows = Rows(**{name: getattr(seen, name) for name in names}, planned=False)
    factors = [worker.factor for worker in attribute(rows).workers]
    assert factors == pytest.approx([1.0, 1.0], abs=0.05)
    of_some = rows.of(np.arange(STEPS) < 50)
    assert not of_some.planned
    assert len(of_some.step) == 50


def test_under_a_plan_smaller_batches_of_a_slow_rank_are_still_dealt() -> None:
    seen = shaped((100, 300), fixed_s=0.0, speed=[339 / 139, 1.0])
    planned = dataclasses.replace(seen, policy="paceline", balances=True)
    assert any(cause.hidden for cause in judge(planned).causes)
