"""Answers that are given again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline_backend.insight import reuse
from paceline_backend.insight.reuse import Reused


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(reuse, "time", made)
    return made


class Finding:
    """Counts how often it is asked, and takes a second each time, or as long as it is told."""

    def __init__(self, clock: Clock, took_s: float = 1.0) -> None:
        self.clock, self.took_s, self.times = clock, took_s, 0

    def __call__(self) -> int:
        self.clock.now += self.took_s
        self.times += 1
        return self.times


def test_an_answer_is_given_again_for_five_times_as_long_as_it_took(clock: Clock) -> None:
    reused, find = Reused(), Finding(clock)
    assert reused.get("verdict", find) == 1
    clock.now += 4.9
    assert reused.get("verdict", find) == 1
    clock.now += 0.2
    assert reused.get("verdict", find) == 2


@pytest.mark.parametrize(("took_s", "times"), [(0.09, 2), (0.11, 1)])
def test_what_takes_little_is_found_each_time(clock: Clock, took_s: float, times: int) -> None:
    reused, find = Reused(), Finding(clock, took_s)
    reused.get("verdict", find)
    assert reused.get("verdict", find) == times


def test_other_questions_have_other_answers(clock: Clock) -> None:
    reused, find = Reused(), Finding(clock)
    assert [reused.get(("verdict", run), find) for run in (1, 2, 1)] == [1, 2, 1]


def test_what_failed_is_not_kept(clock: Clock) -> None:
    reused = Reused()

    def fail() -> int:
        clock.now += 1.0
        raise ValueError("the database is away")

    with pytest.raises(ValueError, match="away"):
        reused.get("verdict", fail)
    assert reused.get("verdict", lambda: 3) == 3


def test_the_answers_not_asked_for_longest_go(clock: Clock) -> None:
    reused, find = Reused(most=2), Finding(clock)
    assert [reused.get(asked, find) for asked in "abacab"] == [1, 2, 1, 3, 1, 4]


def test_who_asks_meanwhile_waits_for_the_same_answer(clock: Clock) -> None:
    reused, begun, go_on = Reused(), threading.Event(), threading.Event()
    answers: list[int] = []

    def find() -> int:
        begun.set()
        assert go_on.wait(60)
        clock.now += 1.0
        answers.append(1)
        return len(answers)

    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(reused.get, "verdict", find)
        assert begun.wait(60)
        others = [threads.submit(reused.get, "verdict", find) for _ in range(3)]
        assert reused.get("another", lambda: 7) == 7, "other questions do not wait"
        threading.Timer(0.1, go_on.set).start()
        assert [each.result(60) for each in (first, *others)] == [1, 1, 1, 1]
