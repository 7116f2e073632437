"""Forecasts against outcomes, as values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_backend.insight.scores import Score, SwitchOutcome, by_policy, outcome_of, score

SAVINGS = st.floats(-2.0, 0.95)


def outcome(forecast: float, saving: float, policy: str = "chronica") -> SwitchOutcome:
    row = {"run": "r", "version": 1, "policy": policy, "at": 0.0, "nodes": 1, "ranks": 4}
    body = {"saving": saving, "low": saving - 0.01, "high": saving + 0.01}
    expected = {"saving": forecast, "low": forecast - 0.03, "high": forecast + 0.03}
    return outcome_of({**row, "body": {**body, "forecast": expected}})


def test_an_error_is_that_of_the_time() -> None:
    made = outcome(0.4, 0.5)  # 0.6 of the time were forecast, and 0.5 measured
    assert made.error == pytest.approx(0.2)
    assert not made.inside
    assert outcome(0.5, 0.52).inside


def test_scores_of_known_outcomes() -> None:
    made = score([outcome(0.5, 0.5), outcome(0.4, 0.5), outcome(0.55, 0.5)])
    assert made.count == 3
    assert made.inside == pytest.approx(1 / 3)
    assert made.median_error == pytest.approx(0.1)
    assert made.p90_error == pytest.approx(0.18)
    assert made.bias == pytest.approx(0.1 / 3)


def test_of_no_outcomes_nothing_is_known() -> None:
    assert score([]) == Score(0, None, None, None, None)
    assert by_policy([]) == []


@given(st.lists(st.tuples(SAVINGS, SAVINGS, st.sampled_from("abc")), min_size=1))
def test_presets_make_up_the_whole(given_: list[tuple[float, float, str]]) -> None:
    made = [outcome(forecast, saving, policy) for forecast, saving, policy in given_]
    whole, parts = score(made), by_policy(made)
    assert sum(part.count for part in parts) == whole.count
    means = [(part.count, part.inside or 0.0, part.bias or 0.0) for part in parts]
    inside = sum(count * share for count, share, _ in means) / whole.count
    bias = sum(count * mean for count, _, mean in means) / whole.count
    assert whole.inside == pytest.approx(inside)
    assert whole.bias == pytest.approx(bias)
    assert whole.median_error is not None
    assert whole.p90_error is not None
    assert 0 <= whole.median_error <= whole.p90_error
    assert parts == sorted(parts, key=lambda part: (-part.count, part.policy))
