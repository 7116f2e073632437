"""Rate limit of planning: a process's controllers share the CPU with each other and with ingest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

# Longest wait for another controller's plan: a plan that takes longer may never end.
_LONGEST_PLAN_S = 10.0
# While ingest is busy, planning gets 1 / `_BUSY_SPACING` of the time.
_BUSY_SPACING = 4.0
# A controller rests for at most this time, multiplied by the number of controllers that plan.
_LONGEST_REST_S = 5.0
# A controller that has not planned for this long does not count as a controller that plans.
_RECENT_S = 10.0  # seconds
# Interval at which a resting controller checks whether ingest is still busy.
_BUSY_CHECK_S = 0.5


class Turns:
    """Scheduler that lets one plan run at a time, with rests between plans while ingest is busy.

    Most of planning is Python, so two plans at once take as long as two plans in sequence. Without
    turns, ten runs that plan at once would leave only an eleventh of the interpreter's time to any
    other thread. Telemetry has priority over plans: without a plan, leaders coast, but late
    telemetry makes every plan late.

    While ingest is busy, each controller rests in proportion to the duration of its own plans, so
    that all controllers get the same share of the time. So a small run, which plans in a
    millisecond, does not rest for the seconds that a large run takes. Controllers that wait for
    another plan to end get their turns in the order in which they came.

    Args:
        busy: returns True while ingest is behind.
        patience_s: longest wait for another controller's plan, in seconds.
    """

    def __init__(
        self,
        busy: Callable[[], bool] = lambda: False,
        patience_s: float = _LONGEST_PLAN_S,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy = busy
        self._patience_s = patience_s
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: list[object] = []
        self._plan: object | None = None
        self._began = 0.0
        # By controller that has planned recently: the time at which its rest ends.
        self._rests: dict[Hashable, float] = {}

    @contextmanager
    def turn(self, who: Hashable) -> Iterator[None]:
        """Wait for a turn and hold it inside the `with` block.

        Args:
            who: identifies the controller, for example by the key of its run.
        """
        plan = object()
        with self._changed:
            while (rest_s := self.rest_s(who)) > 0:
                self._changed.wait(min(rest_s, _BUSY_CHECK_S))
            self._queue.append(plan)
            try:
                while (wait_s := self.wait_s()) > 0 or self._queue[0] is not plan:
                    self._changed.wait(wait_s if wait_s > 0 else _BUSY_CHECK_S)
            finally:
                self._queue.remove(plan)
                self._changed.notify_all()
            self._plan, self._began = plan, self._clock()
        try:
            yield
        finally:
            with self._changed:
                # If another plan has the turn, this plan has taken longer than `patience_s`.
                if self._plan is plan:
                    self._plan = None
                    self._note(who, self._clock() - self._began)
                    self._changed.notify_all()

    def rest_s(self, who: Hashable) -> float:
        """Return the seconds that a controller must still rest; 0 or less: it may plan now."""
        return self._rests.get(who, 0.0) - self._clock() if self._busy() else 0.0

    def wait_s(self) -> float:
        """Return the longest time in seconds that the next plan must wait for the current one."""
        return 0.0 if self._plan is None else self._began + self._patience_s - self._clock()

    def _note(self, who: Hashable, took_s: float) -> None:
        now = self._clock()
        self._rests = {w: at for w, at in self._rests.items() if at > now - _RECENT_S}
        self._rests[who] = now
        planning = len(self._rests)
        rest_s = min((_BUSY_SPACING * planning - 1) * took_s, planning * _LONGEST_REST_S)
        self._rests[who] = now + rest_s
