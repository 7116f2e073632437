"""Exchanges between two ranks: no other one is better, and any search for them ends."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch

from paceline.policies import jit
from paceline.policies.base import Floats
from paceline.policies.solve.balance import DescentState, _apply, _best_exchange, pairs
from paceline.policies.solve.workers import Workers

SIZES = st.lists(st.sampled_from([1.0, 1.0, 2.0, 3.5, 7.0, 7.1, 40.0]), max_size=5)
SLOPES, COSTS = st.sampled_from([0.5, 1.0, 1.7]), st.sampled_from([0.0, 0.3])


def workers(a: Floats, c: Floats, b: Floats, most: list[int]) -> Workers:
    return Workers(a, c, b, np.array(most))


@given(st.data())
def test_no_other_exchange_is_better(data: st.DataObject) -> None:
    """Against all moves and exchanges, interpreted and compiled."""
    slow, fast = data.draw(SIZES.filter(bool)), data.draw(SIZES)
    a, c, b = (np.array([data.draw(each), data.draw(each)]) for each in (SLOPES, COSTS, COSTS))
    most = [len(slow), data.draw(st.integers(len(fast), len(fast) + 1))]
    sizes = np.array([*slow, *fast])

    def made() -> DescentState:
        ranks = np.array([0] * len(slow) + [1] * len(fast))
        return DescentState.of(sizes, ranks, workers(a, c, b, most))

    before = made()
    if before.time_s[0] <= before.time_s[1]:
        return

    def after(give: int, get: int) -> float:
        state = made()
        if give >= 0:
            _apply(0, 1, give, get, state)
        return float(state.time_s.max())

    takes = range(-1 if most[1] > len(fast) else len(slow), len(sizes))
    others = [after(i, k) for i in range(len(slow)) for k in takes if k < 0 or k >= len(slow)]
    found = _best_exchange(0, 1, before)
    best = min([after(-1, -1), *others])
    assert after(*found) <= best * (1 + 1e-9)
    with MonkeyPatch.context() as patch:
        interpreting = threading.Event()
        interpreting.set()
        patch.setattr(jit, "_interpreting", interpreting)
        assert _best_exchange(0, 1, made()) == found


def test_ranks_without_a_finite_time_end_the_search() -> None:
    ones = np.ones(3)
    state = DescentState.of(
        np.ones(9), np.arange(9) % 3, workers(ones, 0 * ones, 0 * ones, [9] * 3)
    )
    state.time_s[:] = [np.inf, 1.0, np.nan]
    pairs(state, 0.5)
