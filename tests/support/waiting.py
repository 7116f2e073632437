"""Waiting for a condition: no test sleeps for a time that it guesses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    condition: Callable[[], T],
    what: str = "the condition",
    timeout_s: float = 60.0,
    pause_s: float = 0.02,
) -> T:
    """The condition's first true value.

    Args:
        condition: asked again and again.
        what: what is waited for, for the message of a failure.
        timeout_s: when the test fails; generous, as a passing test never waits so long.
        pause_s: between two questions.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(pause_s)
    return value
