"""When `auto` looks at a run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from paceline.policies import Changes
from paceline_backend.control.advice import MOST_CHECK_PAUSE_S, NextLook
from paceline_backend.insight.whatif.answer import (
    Decided,
    Forecast,
    label,
)
from paceline_backend.insight.whatif.auto import AUTO_STEPS
from support.forecasts import BSP, decision, preset

FIRST = NextLook(0, relaxed=False)


def forecast(
    decided: Decided, step: int, low: float | None = None, changes: Changes = "nothing"
) -> Forecast:
    """With `low`: of an option that surely saves so much, and that was decided upon."""
    options, made = [], decision(decided)
    if low is not None:
        given = {"mode": "free"}
        named = {"parameters": given, "changes": changes, "label": label("paceline", given)}
        options = [preset("paceline", low, low, low, **named)]
        made = decision(decided, policy="paceline", parameters=given)
    steps = min(256, step - 2)
    return Forecast("r", 0.0, BSP, step=step, steps=steps, forecasts=options, decision=made)


def looks(
    step_s: float, decided: Sequence[Decided | None], first: int = 0, look_s: float = 0.0
) -> list[tuple[int, float]]:
    """Step and time of the looks at a run from step `first` on, and of the one after them.

    A look rests on the steps at its begin, and ends `look_s` later.
    """
    look, now, at = NextLook(0, relaxed=False), 0.0, []
    for what in [*decided, None]:
        while (step := first + round(now / step_s)) < look.step or now < look.at:
            now += step_s
        at.append((step, now))
        made = None if what is None else forecast(what, step)
        now += look_s
        look = look.after(made, step, now, MOST_CHECK_PAUSE_S)
    return at


def pauses(looked: list[tuple[int, float]]) -> list[float]:
    return [now - before for (_, before), (_, now) in itertools.pairwise(looked)]


def test_it_looks_whenever_there_are_twice_as_many_steps_and_then_every_100() -> None:
    decided: list[Decided | None] = ["wait", "stay", "stay", "recommend", "stay", "stay"]
    assert [step for step, _ in looks(1.0, decided)] == [24, 48, 94, 186, 286, 386, 486]


@pytest.mark.parametrize("decided", ["switch", "back"])
def test_after_a_switch_it_looks_100_steps_later(decided: Decided) -> None:
    assert [step for step, _ in looks(1.0, [decided, "stay"])] == [24, 124, 224]


@pytest.mark.parametrize("decided", ["stay", "recommend", "wait", None])
def test_of_short_steps_it_looks_ever_less_often(decided: Decided | None) -> None:
    at = looks(0.001, [decided] * 7)
    assert pauses(at) == pytest.approx([1, 2, 4, 8, 16, 30, 30], abs=0.01)


def test_the_pause_begins_when_the_look_ends() -> None:
    at = looks(0.001, ["stay"] * 3, look_s=9.0)
    assert pauses(at) == pytest.approx([10, 11, 13], abs=0.01)


@pytest.mark.parametrize("decided", ["switch", "back"])
def test_what_a_switch_brought_is_looked_at_soon(decided: Decided) -> None:
    at = looks(0.001, [*["stay"] * 5, decided, "stay"])
    assert pauses(at)[-2:] == pytest.approx([1, 2], abs=0.01)


def test_a_run_that_goes_on_from_a_checkpoint_is_looked_at_once_it_has_enough_steps() -> None:
    assert [step for step, _ in looks(1.0, [None, "stay"], first=1_000)] == [1_000, 1_024, 1_124]


def test_steps_count_from_those_that_the_forecast_saw() -> None:
    """It reads them when the child is ready, which may be later."""
    assert FIRST.after(forecast("wait", 190), 24, 9.0, MOST_CHECK_PAUSE_S).step == 190 + AUTO_STEPS


def test_a_promise_is_looked_at_by_itself_once_it_must_have_held() -> None:
    promised = FIRST.after(forecast("wait", 30, low=0.2), 24, 9.0, MOST_CHECK_PAUSE_S)
    assert (promised.step, promised.option) == (55, "paceline (mode free)")
    changing = FIRST.after(
        forecast("wait", 30, low=0.2, changes="training"), 24, 9.0, MOST_CHECK_PAUSE_S
    )
    assert (changing.step, changing.option) == (30 + AUTO_STEPS, "paceline (mode free)")
    # If it is not confirmed, all options are looked at soon.
    for decided in ("wait", "stay"):
        again = promised.after(forecast(decided, 60, low=0.2), 56, 9.0, MOST_CHECK_PAUSE_S)
        assert (again.step, again.option) == (80, None)
    assert promised.after(None, 56, 9.0, MOST_CHECK_PAUSE_S) == again
    for decided in ("switch", "recommend"):
        then = promised.after(forecast(decided, 60, low=0.2), 56, 9.0, MOST_CHECK_PAUSE_S)
        assert (then.step, then.option) == (60 + (100 if decided == "switch" else 58), None)


def test_no_pause_is_longer_than_the_longest() -> None:
    for decided in ("stay", "switch", None):
        made = None if decided is None else forecast(decided, 24)
        assert FIRST.after(made, 24, 9.0, 0.0).at == 9.0
