"""Who plans when: the controllers of a process share it with each other and with ingest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE_S = 1.0  # who waits longer plans beside the other: that plan may never end
_LONGEST_REST_S = 0.5


class Turns:
    """Lets controllers plan in turn, and all of them together for at most half of the time.

    Most of planning is Python, so two plans at once take as long as one after the other. Without
    turns, ten runs that plan at once leave ingest an eleventh of the interpreter.

    Args:
        patience_s: longest wait for the others' plans.
        clock: monotonic time in seconds.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        patience_s: float = _PATIENCE_S,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._sleep = sleep
        self._planning = threading.Lock()
        self._free_at = 0.0  # by the clock: until then nobody plans

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for its turn; within it, others wait. After it, all rest as long as it took."""
        if not self._planning.acquire(timeout=self._patience_s):
            yield
            return
        try:
            self._sleep(max(0.0, self._free_at - self._clock()))
            began = self._clock()
            try:
                yield
            finally:
                now = self._clock()
                self._free_at = now + min(now - began, _LONGEST_REST_S)
        finally:
            self._planning.release()
