"""Controllers plan in turn, and rest while ingest is behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from paceline_backend.control.turns import Turns
from support.leading import working
from support.waiting import until


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def planner(turns: Turns, planned: threading.Event) -> Callable[[threading.Event], None]:
    """Plans once."""

    def plan(_: threading.Event) -> None:
        with turns.turn("another"):
            planned.set()

    return plan


def test_others_wait_for_a_plan() -> None:
    clock, planned = Clock(), threading.Event()
    turns = Turns(patience_s=3600.0, clock=clock)
    with working(planner(turns, planned)):
        until(planned.is_set, "a plan while nobody else plans")
    planned.clear()
    with turns.turn("run"):
        assert turns.wait_s() == 3600.0
        clock.now = 3590.0
        assert turns.wait_s() == 10.0
        waiting = threading.Thread(target=planner(turns, planned), args=[planned])
        waiting.start()
        assert not planned.is_set()
    waiting.join()
    assert planned.is_set()


def test_nobody_waits_for_a_plan_that_does_not_end() -> None:
    planned = threading.Event()
    turns = Turns(patience_s=0.01)
    with turns.turn("run"), working(planner(turns, planned)):
        until(planned.is_set, "the other's plan")
    assert turns.wait_s() <= 0


@pytest.mark.parametrize("busy", [True, False])
def test_planning_rests_while_ingest_is_behind(busy: bool) -> None:
    clock = Clock()
    turns = Turns(lambda: busy, clock=clock)
    for took_s, rest_s in ((0.125, 0.375), (0.25, 0.75), (3600.0, 5.0)):
        with turns.turn("run"):
            clock.now += took_s
        assert turns.rest_s("run") == (rest_s if busy else 0.0)
        clock.now += rest_s


def test_a_small_run_does_not_rest_for_a_large_one() -> None:
    clock = Clock()
    turns = Turns(lambda: True, clock=clock)
    with turns.turn("large"):
        clock.now += 2.0
    assert turns.rest_s("large") == 5.0
    with turns.turn("small"):
        clock.now += 0.125
    assert turns.rest_s("small") == 7 * 0.125  # two runs plan: a quarter of the time is theirs
    assert turns.rest_s("large") == 5.0 - 0.125
    clock.now += 7 * 0.125
    with turns.turn("small"):
        pass


def test_who_has_not_planned_of_late_does_not_count() -> None:
    clock = Clock()
    turns = Turns(lambda: True, clock=clock)
    with turns.turn("ended"):
        clock.now += 0.125
    clock.now += 60.0
    with turns.turn("run"):
        clock.now += 0.125
    assert turns.rest_s("run") == 3 * 0.125


def test_a_rest_ends_when_ingest_has_caught_up() -> None:
    busy, planned = threading.Event(), threading.Event()
    busy.set()
    clock = Clock()
    turns = Turns(busy.is_set, clock=clock)
    with turns.turn("another"):
        clock.now += 3600.0
    with working(planner(turns, planned)):
        assert not planned.is_set()
        busy.clear()
        until(planned.is_set, "a plan")


def test_plans_are_made_in_the_order_of_coming() -> None:
    turns = Turns(patience_s=3600.0)
    order: list[int] = []

    def plan(number: int) -> None:
        with turns.turn(number):
            order.append(number)

    threads = [threading.Thread(target=plan, args=[number]) for number in range(8)]
    with turns.turn("first"):
        for count, thread in enumerate(threads, 1):
            thread.start()
            until(lambda count=count: len(turns._queue) == count, "the next in the queue")
    for thread in threads:
        thread.join()
    assert order == list(range(8))


def test_a_plan_that_fails_ends_its_turn() -> None:
    turns = Turns(patience_s=3600.0)
    for _ in range(2):
        with pytest.raises(ValueError, match="odd"), turns.turn("run"):
            raise ValueError("odd")
