"""Steps of so many tokens: what they hold, what the leader coasts and refuses, what is refused."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batch_limits.budget import (
    ROUNDING,
    Budget,
    budget_of,
    counts_within,
    kept_within,
    refuse_larger,
    refuse_tight,
)
from paceline.core.ledger import BatchRules, Ledger
from paceline.train.epochs import epoch_order
from paceline.wire import Plan
from support.records import pack_indices

SIZES = st.lists(
    st.one_of(st.sampled_from([0.0, 0.1, 1.0, 2.5, 3.0]), st.floats(0.01, 50.0)),
    min_size=1,
    max_size=80,
)


@st.composite
def budgets(draw: st.DrawFn) -> tuple[np.ndarray[Any, np.dtype[np.float64]], float]:
    """Sizes, and a budget that holds the largest."""
    sizes = np.array(draw(SIZES))
    most = max(float(sizes.max()), 0.1)
    return sizes, most * draw(st.sampled_from([1.0, 1.5, 3.0, 10.0]))


@given(budgets())
def test_steps_keep_the_budget_and_take_what_fits(
    case: tuple[np.ndarray[Any, np.dtype[np.float64]], float],
) -> None:
    sizes, budget = case
    counts = counts_within(sizes, budget)
    assert counts.sum() == len(sizes)
    assert (counts > 0).all()
    ends = np.cumsum(counts)
    for start, end in zip([0, *ends], ends, strict=False):
        exact = sum(map(Fraction, sizes[start:end].tolist()))
        assert exact <= Fraction(budget) * (1 + Fraction(ROUNDING))
        if end < len(sizes):
            assert exact + Fraction(sizes[end]) > Fraction(budget) * (1 - Fraction(ROUNDING))


@given(budgets(), st.integers(0, 80), st.integers(1, 5))
def test_the_rest_of_an_epoch_has_the_same_steps_wherever_it_goes_on(
    case: tuple[np.ndarray[Any, np.dtype[np.float64]], float], at: int, steps: int
) -> None:
    sizes, budget = case
    counts = counts_within(sizes, budget)
    at = min(at, len(counts))
    rest = sizes[counts[:at].sum() :]
    assert counts_within(rest, budget).tolist() == counts[at:].tolist()
    assert counts_within(rest, budget, steps).tolist() == counts[at : at + steps].tolist()


def test_long_steps_are_found() -> None:
    assert counts_within(np.ones(10_000), 4_000.0).tolist() == [4_000, 4_000, 2_000]
    budget = Budget(4_000.0, np.ones(10_000))
    for steps, counts in [(1, [4_000]), (2, [4_000] * 2), (9, [4_000, 4_000, 2_000])]:
        assert budget.counts(np.arange(10_000), steps).tolist() == counts
    assert budget.counts(np.arange(0), 3).tolist() == []


@given(budgets(), st.integers(1, 5))
def test_the_next_steps_are_the_first_of_all(
    case: tuple[np.ndarray[Any, np.dtype[np.float64]], float], steps: int
) -> None:
    budget = Budget(case[1], np.tile(case[0], 8))
    everything = np.arange(len(budget.sizes))
    assert budget.counts(everything, steps).tolist() == budget.counts(everything)[:steps].tolist()


def test_a_sample_above_the_budget_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"sizes\[2\] is 9 \(2 of 4 samples are too large\).*token_budget=8.*to 12"
    ):
        refuse_larger(np.array([1.0, 8.0, 9.0, 12.0]), 8.0)
    refuse_larger(np.array([1.0, 8.0]), 8.0)
    with pytest.raises(ValueError, match="size 9 exceeds the budget, 8"):
        counts_within(np.array([9.0]), 8.0)


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf])
def test_a_budget_is_above_zero(wrong: float) -> None:
    with pytest.raises(ValueError, match="token_budget is"):
        budget_of(wrong)


@pytest.mark.parametrize("wrong", ["8", True, [8]])
def test_a_budget_is_a_number(wrong: Any) -> None:
    with pytest.raises(TypeError, match="token_budget is"):
        budget_of(wrong)


@st.composite
def limited(draw: st.DrawFn) -> tuple[Budget, int]:
    """A budget with limits that hold every step, just so or amply, and the ranks."""
    sizes = np.array(draw(SIZES)) + 0.01
    world = draw(st.integers(1, 5))
    longest = float(sizes.max())
    each = st.sampled_from([0.0, 0.3, 1.0, 1.5, 4.0])
    limits = longest * np.array(draw(st.lists(each, min_size=world, max_size=world)))
    limits[draw(st.integers(0, world - 1))] += longest
    holds = float(np.maximum(limits - longest, 0.0).sum()) + longest
    budget = longest + draw(st.floats(0.0, 1.0)) * (holds - longest)
    refuse_tight(limits, longest, budget)
    return Budget(budget, sizes, limits), world


@given(limited(), st.data())
def test_no_rank_gets_more_than_its_limit(case: tuple[Budget, int], data: st.DataObject) -> None:
    budget, world = case
    assert budget.limits is not None
    start = 0
    for count in budget.counts(np.arange(len(budget.sizes))).tolist():
        sizes = budget.sizes[start : start + count]
        start += count
        drawn = st.lists(st.integers(0, world - 1), min_size=count, max_size=count)
        ranks = np.array(data.draw(drawn))
        made = kept_within(ranks, sizes, budget.limits)
        loads = np.bincount(made, sizes, world)
        assert (loads <= budget.limits * (1 + 3 * ROUNDING)).all()
        if (np.bincount(ranks, sizes, world) <= budget.limits).all():
            assert made is ranks


def test_tight_limits_are_refused_with_the_budget_that_they_hold() -> None:
    with pytest.raises(ValueError, match=r"\[8, 8\].*size 9, which fits on no rank"):
        refuse_tight(np.array([8.0, 8.0]), 9.0, 10.0)
    with pytest.raises(
        ValueError, match=r"steps of up to 15 are sure to fit.*lower token_budget to that"
    ):
        refuse_tight(np.array([10.0, 10.0]), 5.0, 16.0)
    refuse_tight(np.array([10.0, 10.0]), 5.0, 15.0)
    refuse_tight(np.array([10.0, 0.0]), 5.0, 10.0)


@given(limited(), st.data())
def test_an_epoch_is_coasted_once_within_budget_and_limits(
    case: tuple[Budget, int], data: st.DataObject
) -> None:
    """With shares and without, and from wherever a checkpoint was taken, on other ranks."""
    budget, world = case
    assert budget.limits is not None
    share = st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=world, max_size=world)
    shares = data.draw(share.filter(any) | st.just([]))
    order = epoch_order(len(budget.sizes), 5, 1)
    resumed_at, used, steps = data.draw(st.integers(0, 20)), [], 0
    whole = np.split(order, np.cumsum(budget.counts(order))[:-1])
    ledger = Ledger(1, order, BatchRules(7, budget=budget))
    while not ledger.finished:
        if steps == resumed_at:
            ledger = Ledger(1, order, BatchRules(7, budget=budget), np.array(used, np.int64))
        assert ledger.batch_sizes(3) == [len(step) for step in whole[steps : steps + 3]]
        counts, indices = pack_indices(ledger.coast(1, world, budget.sizes, shares))
        flat = np.frombuffer(indices, "<u4").astype(np.int64)
        over = len(flat) == ledger.left
        made = Plan(0, 1, 0, counts, indices, "bsp", 0, "coast", over, shares=shares)
        assert ledger.refusal(made, world) is None
        assert sorted(flat.tolist()) == sorted(whole[steps].tolist())
        loads = [budget.sizes[part].sum() for part in np.split(flat, np.cumsum(counts[0])[:-1])]
        assert (np.array(loads) <= budget.limits * (1 + 3 * ROUNDING)).all()
        ledger.use(flat)
        used += flat.tolist()
        steps += 1
    assert sorted(used) == list(range(len(budget.sizes)))
    assert steps == len(whole)


def segment(counts: list[list[int]], samples: list[int], *, over: bool = False) -> Plan:
    packed = np.array(samples, "<u4").tobytes()
    return Plan(0, 0, 0, counts, packed, "paceline", 0, "controller", over)


def test_a_plan_of_other_samples_or_above_a_limit_is_refused() -> None:
    """Sizes 4, 3, 2, 1, 5 and a budget of 7: steps of [0, 1], [2, 3] and [4]."""
    sizes = np.array([4.0, 3.0, 2.0, 1.0, 5.0])
    budget = Budget(7.0, sizes, np.array([5.0, 5.0]))
    ledger = Ledger(0, np.arange(5), BatchRules(2, budget=budget))
    assert ledger.refusal(segment([[1, 1], [0, 2]], [1, 0, 3, 2]), 2) is None
    assert ledger.refusal(segment([[1, 1], [0, 2], [1, 0]], [0, 1, 2, 3, 4], over=True), 2) is None
    refused = {
        "its steps have": segment([[1, 2]], [0, 1, 2]),
        "do not follow the epoch's order": segment([[1, 1]], [0, 2]),
        "rank 0 gets 7 in a step; its limit is 5": segment([[2, 0]], [0, 1]),
        "epoch_end": msgspec.structs.replace(segment([[1, 1]], [0, 1]), epoch_end=True),
    }
    for why, made in refused.items():
        said = ledger.refusal(made, 2)
        assert said is not None
        assert why in said


def test_what_a_message_asks_for_is_enough() -> None:
    sizes = np.array([1.0, 1_234_567.0])
    with pytest.raises(ValueError, match="raise token_budget to 1234567 or more"):
        refuse_larger(sizes, 1_234_560.0)
    refuse_larger(sizes, 1_234_567.0)
    limits = np.array([1_000_001.5, 2_000_002.25])
    with pytest.raises(ValueError, match=r"steps of up to 3000001\.75 are sure to fit"):
        refuse_tight(limits, 2.0, 3_000_010.0)
    refuse_tight(limits, 2.0, 3_000_001.75)
