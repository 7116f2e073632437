"""Waiting for a condition: no test sleeps for a time that it guesses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# What a passing test waits for comes within a fraction of these, even on a busy machine.
DEADLINE_S = 120.0  # one thing: an answer, a message, the start or the end of a process
TRAINING_S = 300.0  # a whole training, or a step of it


def until(
    condition: Callable[[], T],
    what: str = "the condition",
    timeout_s: float = DEADLINE_S,
    pause_s: float = 0.02,
) -> T:
    """The condition's first true value.

    Args:
        what: what is waited for, for the message of a failure.
        timeout_s: when the test fails; generous, as a passing test never waits so long.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(pause_s)
    return value
