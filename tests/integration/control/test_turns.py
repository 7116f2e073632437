"""Controllers plan in turn, and rest while ingest is behind."""

from __future__ import annotations

import threading

import pytest

from paceline_backend.control.turns import Turns
from support.leading import working
from support.waiting import until


class Clock:
    """A clock that only moves when somebody sleeps or plans."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_others_wait_for_a_plan() -> None:
    turns, planned = Turns(patience_s=3600.0), threading.Event()

    def plan(_: threading.Event) -> None:
        with turns.turn():
            planned.set()

    with turns.turn():
        waiting = threading.Thread(target=plan, args=[planned])
        waiting.start()
        assert not planned.wait(0.05)
    waiting.join()
    assert planned.is_set()


def test_nobody_waits_for_a_plan_that_does_not_end() -> None:
    turns, planned = Turns(patience_s=0.01), threading.Event()

    def plan(_: threading.Event) -> None:
        with turns.turn():
            planned.set()

    with turns.turn(), working(plan):
        until(planned.is_set, "the other's plan")


@pytest.mark.parametrize("busy", [True, False])
def test_planning_rests_while_ingest_is_behind(busy: bool) -> None:
    clock = Clock()
    turns = Turns(lambda: busy, clock=clock, sleep=clock.sleep)
    for took_s in (0.125, 0.25, 3600.0, 0.0):
        with turns.turn():
            clock.now += took_s
    assert clock.slept == ([0.0, 0.375, 0.75, 1.0] if busy else [])


def test_a_plan_that_fails_ends_its_turn() -> None:
    turns = Turns(patience_s=3600.0)
    for _ in range(2):
        with pytest.raises(ValueError, match="odd"), turns.turn():
            raise ValueError("odd")
