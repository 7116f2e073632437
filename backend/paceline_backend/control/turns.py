"""Who plans when: the controllers of a process share it with each other and with ingest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

_PATIENCE_S = 10.0  # a plan that takes longer may never end: others no longer wait for it
_SHARE = 4.0  # planning gets one part in so many of the time while ingest is busy
_LONGEST_REST_S = 5.0  # times the number of those who plan
_RECENT_S = 10.0  # who has not planned for so long no longer counts
_LOOK_S = 0.5  # how often who rests looks whether ingest is still busy


class Turns:
    """Lets controllers plan in turn, and for a quarter of the time while ingest is busy.

    Most of planning is Python, so two plans at once take as long as one after the other. Without
    turns, ten runs that plan at once leave ingest an eleventh of the interpreter. Telemetry goes
    before plans: leaders coast without them, and late telemetry makes late plans.

    Each controller rests for its own plans, and all get the same share of the time. So a small run,
    which plans in a thousandth of a second, does not rest for a large one's seconds. Who waits for
    a plan's end is served in the order of coming.

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
        self._queue: list[object] = []  # plans to come
        self._plan: object | None = None  # that is being made
        self._began = 0.0
        self._rests: dict[Hashable, float] = {}  # until when each rests that planned of late

    @contextmanager
    def turn(self, who: Hashable) -> Iterator[None]:
        """Waits for its turn; within it, others wait.

        Args:
            who: plans, such as the key of a run.
        """
        plan = object()
        with self._changed:
            while (rest_s := self.rest_s(who)) > 0:
                self._changed.wait(min(rest_s, _LOOK_S))
            self._queue.append(plan)
            try:
                while (wait_s := self.wait_s()) > 0 or self._queue[0] is not plan:
                    self._changed.wait(wait_s if wait_s > 0 else _LOOK_S)
            finally:
                self._queue.remove(plan)
                self._changed.notify_all()
            self._plan, self._began = plan, self._clock()
        try:
            yield
        finally:
            with self._changed:
                if self._plan is plan:  # nobody's patience has ended
                    self._plan = None
                    self._note(who, self._clock() - self._began)
                    self._changed.notify_all()

    def rest_s(self, who: Hashable) -> float:
        """How long a controller has to rest, if nothing changes."""
        return self._rests.get(who, 0.0) - self._clock() if self._busy() else 0.0

    def wait_s(self) -> float:
        """How long the next plan has to wait for the present one, if that does not end."""
        return 0.0 if self._plan is None else self._began + self._patience_s - self._clock()

    def _note(self, who: Hashable, took_s: float) -> None:
        """A plan has ended: who made it rests."""
        now = self._clock()
        self._rests = {w: at for w, at in self._rests.items() if at > now - _RECENT_S}
        self._rests[who] = now
        planning = len(self._rests)
        rest_s = min((_SHARE * planning - 1) * took_s, planning * _LONGEST_REST_S)
        self._rests[who] = now + rest_s
