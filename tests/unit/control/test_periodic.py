"""Work that the worker repeats: no round that fails ends it, and each failure is logged once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis

from paceline_backend.control.periodic import IdleMonitor, Periodic, Workload
from paceline_backend.store import StoreUnavailableError


@pytest.mark.parametrize(
    ("error", "tracebacks"),
    [
        (StoreUnavailableError("the database is away"), 0),
        (redis.ConnectionError("the bus is away"), 0),
        (ValueError("a row that nobody expects"), 1),
    ],
)
def test_rounds_that_fail_are_logged_once_and_repeated(
    error: Exception, tracebacks: int, caplog: pytest.LogCaptureFixture
) -> None:
    stop, ended = threading.Event(), list[str]()
    failures: Iterator[Exception | None] = iter([error, error, None])

    def work() -> None:
        failure = next(failures)
        if failure is not None:
            raise failure
        stop.set()

    Periodic("alerts", 0.0, work, lambda: ended.append("ended")).run(stop)
    assert ended == ["ended"]
    assert [record.exc_info is not None for record in caplog.records].count(True) == tracebacks
    words = [record.message for record in caplog.records if record.exc_info is None]
    assert words == [f"alerts: waiting: {error}", "alerts: working again"]


def test_the_first_round_is_made_at_once_and_none_after_the_end() -> None:
    stop, rounds = threading.Event(), list[int]()

    def work() -> None:
        rounds.append(1)
        stop.set()

    Periodic("alerts", 3600.0, work).run(stop)
    Periodic("alerts", 3600.0, work).run(stop)
    assert rounds == [1]


def test_pauses_are_long_while_nothing_happens_until_something_does() -> None:
    stop, ended = threading.Event(), threading.Event()
    asked: list[tuple[float, float, Workload]] = []

    class Scripted(IdleMonitor):
        def __init__(self) -> None:
            """Without a database and a bus: the test says what happens."""

        def pause(
            self, seconds: float, quiet_s: float, stop: threading.Event, needless: Workload
        ) -> bool:
            asked.append((seconds, quiet_s, needless))
            return len(asked) > 1 or stop.is_set()

    Periodic("engines", 0.5, lambda: None, ended.set, quiet_s=3.0).run(stop, Scripted())
    assert asked == [(0.5, 3.0, Workload.QUIET)] * 2
    assert ended.is_set()
