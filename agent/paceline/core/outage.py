"""Warnings about repeated failures: most repetitions are not logged, so that a log stays readable.

`Outage` is for a service that this process needs: it logs the start and the end of an outage, and
computes the pauses between retries. `Refusals` counts entries of the bus that fail a check,
and logs at most one of them a minute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

# Minimum number of seconds between two warnings of a `Refusals`.
REPORT_INTERVAL_S = 60.0


class Outage:
    """An outage of a service: a warning at its start and its end, and pauses between retries.

    Call `failed` after each error and `succeeded` after each success. A loop that may block should
    sleep for the seconds that `failed` returns. A loop that must not block should check `paused`
    before each retry. The pause grows from `first_s` to `most_s` seconds, doubling with each
    failure. `begins` and `ends` are the texts of the warnings; the error is appended to `begins`.
    `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        log: logging.Logger,
        begins: str,
        ends: str,
        *,
        first_s: float = 0.05,
        most_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.begins = begins
        self.ends = ends
        self._log = log
        self._first_s = first_s
        self._most_s = most_s
        self._clock = clock
        self._pause_s = 0.0
        self._until = 0.0

    @property
    def active(self) -> bool:
        """True if the last attempt failed."""
        return self._pause_s > 0

    @property
    def paused(self) -> bool:
        """True during an outage until the pause before the next attempt ends."""
        return self.active and self._clock() < self._until

    def failed(self, error: object) -> float:
        """Record a failure and return the seconds to pause before the next attempt.

        The error is logged if this is the first failure of an outage.
        """
        if not self.active:
            self._log.warning("%s: %s", self.begins, error)
        self._pause_s = min(2 * self._pause_s, self._most_s) if self.active else self._first_s
        self._until = self._clock() + self._pause_s
        return self._pause_s

    def succeeded(self) -> None:
        """Record a success."""
        if self.active:
            self._log.warning("%s", self.ends)
        self._pause_s = 0.0


class Refusals:
    """A counter of refused entries that logs at most once a minute. Not thread-safe.

    Messages begin with `what`, a name for the entries. `clock` returns monotonic seconds.
    """

    def __init__(
        self, log: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.count = 0
        self._log = log
        self._what = what
        self._clock = clock
        self._next = clock()

    def add(self, reason: object) -> None:
        """Count a refusal, and log its reason if the last message is at least a minute old."""
        self.count += 1
        if self._clock() >= self._next:
            self._next = self._clock() + REPORT_INTERVAL_S
            self._log.warning("%s: %s (refused so far: %d)", self._what, reason, self.count)
