"""An outage is logged when it begins and when it is over, and pauses grow in between."""

from __future__ import annotations

import logging

import pytest

from paceline.core.outage import Outage


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outage(clock: Clock) -> Outage:
    log = logging.getLogger("test.outage")
    return Outage(log, "the bus is away", "the bus is back", first_s=0.5, most_s=3.0, clock=clock)


def test_both_ends_are_logged_once(outage: Outage, caplog: pytest.LogCaptureFixture) -> None:
    outage.succeeded()
    assert caplog.messages == []
    for error in ("refused", "timed out"):
        outage.failed(error)
    assert caplog.messages == ["the bus is away: refused"]
    outage.succeeded()
    outage.succeeded()
    assert caplog.messages == ["the bus is away: refused", "the bus is back"]
    outage.failed("refused again")
    assert caplog.messages[2:] == ["the bus is away: refused again"]


def test_pauses_double_up_to_a_limit_and_start_anew(outage: Outage) -> None:
    assert [outage.failed("away") for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    outage.succeeded()
    assert outage.failed("away") == 0.5


def test_it_is_paused_until_the_pause_is_over(outage: Outage, clock: Clock) -> None:
    assert not outage.paused
    outage.failed("away")
    assert outage.active and outage.paused
    clock.now += 0.4
    assert outage.paused
    clock.now += 0.1
    assert outage.active and not outage.paused
    outage.succeeded()
    assert not outage.active
