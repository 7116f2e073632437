"""Rate-limited logging of repeated refusals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_S = 60.0


class Refusals:
    """A counter of refusals that logs at most once a minute. For one thread.

    `what` is refused; messages begin with it. `clock` gives monotonic seconds.
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
        """Count a refusal, and log its reason if the last message is a minute old."""
        self.count += 1
        if self._clock() >= self._next:
            self._next = self._clock() + EVERY_S
            self._log.warning("%s: %s (refused so far: %d)", self._what, reason, self.count)
