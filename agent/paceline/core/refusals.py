"""Things that are refused again and again: counted, and told now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_S = 60.0


class Refusals:
    """Logs refusals at most once a minute, with how many there were so far. For one thread.

    Args:
        log: where to.
        what: was refused.
        clock: monotonic time in seconds.
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
        """Notes a refusal and its reason."""
        self.count += 1
        if self._clock() >= self._next:
            self._next = self._clock() + EVERY_S
            self._log.warning("%s: %s (refused so far: %d)", self._what, reason, self.count)
