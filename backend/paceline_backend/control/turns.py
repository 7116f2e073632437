"""Who plans when: the controllers of a process share it with each other and with ingest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE_S = 1.0  # who waits longer plans beside the other, whose plan may never end
_REST = 3.0  # times what a plan took, while ingest is busy
_LONGEST_REST_S = 1.0


class Turns:
    """Lets controllers plan in turn, and for a quarter of the time while ingest is busy.

    Most of planning is Python, so two plans at once take as long as one after the other. Without
    turns, ten runs that plan at once leave ingest an eleventh of the interpreter. Telemetry goes
    before plans: leaders coast without them, and late telemetry makes late plans.

    Args:
        busy: whether ingest has more to do than it can.
        patience_s: longest wait for the others' plans.
        clock: monotonic time in seconds.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        busy: Callable[[], bool] = lambda: False,
        patience_s: float = _PATIENCE_S,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._busy = busy
        self._patience_s = patience_s
        self._clock = clock
        self._sleep = sleep
        self._planning = threading.Lock()
        self._rest_until = 0.0  # by the clock

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for its turn; within it, others wait."""
        if not self._planning.acquire(timeout=self._patience_s):
            yield
            return
        try:
            if self._busy():
                self._sleep(max(0.0, self._rest_until - self._clock()))
            began = self._clock()
            try:
                yield
            finally:
                now = self._clock()
                self._rest_until = now + min(_REST * (now - began), _LONGEST_REST_S)
        finally:
            self._planning.release()
