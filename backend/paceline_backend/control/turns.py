"""Who plans when: the controllers of a process share it with each other and with ingest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE_S = 10.0  # a plan that takes longer may never end: others no longer wait for it
_REST = 3.0  # times what a plan took, while ingest is busy
_LONGEST_REST_S = 5.0


class Turns:
    """Lets controllers plan in turn, and for a quarter of the time while ingest is busy.

    Most of planning is Python, so two plans at once take as long as one after the other. Without
    turns, ten runs that plan at once leave ingest an eleventh of the interpreter. Telemetry goes
    before plans: leaders coast without them, and late telemetry makes late plans.

    Args:
        busy: whether ingest has more to do than it can.
        patience_s: longest that others wait for a plan.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        busy: Callable[[], bool] = lambda: False,
        patience_s: float = _PATIENCE_S,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy = busy
        self._patience_s = patience_s
        self._clock = clock
        self._changed = threading.Condition()
        self._plan: object | None = None  # that is being made
        self._began = 0.0
        self._rest_until = 0.0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for its turn; within it, others wait."""
        plan = object()
        with self._changed:
            while (wait_s := self.wait_s()) > 0:
                self._changed.wait(wait_s)
            self._plan, self._began = plan, self._clock()
        try:
            yield
        finally:
            with self._changed:
                if self._plan is plan:  # nobody's patience has ended
                    now = self._clock()
                    self._plan = None
                    self._rest_until = now + min(_REST * (now - self._began), _LONGEST_REST_S)
                    self._changed.notify_all()

    def wait_s(self) -> float:
        """How long the next plan has to wait, if nothing changes."""
        now = self._clock()
        if self._plan is not None:
            return self._began + self._patience_s - now
        return self._rest_until - now if self._busy() else 0.0
