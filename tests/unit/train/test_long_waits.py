"""A leader waits for plans that always come too late: seldom, and longer if that does not help."""

from __future__ import annotations

import pytest

from paceline.train.plan import leader
from paceline.train.plan.leader import Waits


class Training:
    """Segments of a second whose plans take a while, counted from the segment before."""

    def __init__(self, plan_s: float) -> None:
        self.now = self.waited_s = 0.0
        self.came_at: list[float] = []
        self._plan_s = plan_s
        self._waits = Waits(lambda: self.now)

    def go(self, segments: int) -> None:
        for _ in range(segments):
            self.now += 1.0
            wait_s = self._waits.due_s
            took_s = min(wait_s, self._plan_s - 1.0)
            came = wait_s > 0 and took_s < wait_s
            self.now += took_s
            self.waited_s += took_s
            if wait_s > 0:
                self._waits.waited(came=came)
            if came:
                self.came_at.append(self.now)
            else:
                self._waits.late()


@pytest.mark.parametrize(("plan_s", "first_s"), [(1.3, 15.0), (1.9, 40.0), (4.9, 180.0)])
def test_a_plan_comes_into_force(plan_s: float, first_s: float) -> None:
    training = Training(plan_s)
    training.go(1000)
    assert training.came_at[0] <= first_s
    assert training.waited_s <= training.now / leader.BETWEEN_WAITS


def test_a_plan_that_never_comes_costs_a_twentieth_of_the_time() -> None:
    training = Training(1e6)
    training.go(1000)
    assert not training.came_at
    assert 0.04 * training.now < training.waited_s <= training.now / leader.BETWEEN_WAITS


def test_plans_in_time_end_it() -> None:
    now = [0.0]
    waiting = Waits(lambda: now[0])
    for _ in range(leader.MOST_LATE):
        waiting.late()
    assert waiting.due_s == 0.0, "not before a while"
    now[0] = 1e3
    assert waiting.due_s == leader.FIRST_WAIT_S
    waiting.in_time()
    assert waiting.due_s == 0.0
