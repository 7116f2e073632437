"""Liveness of a rank: reports of phases that take long, so that a hanging run can be explained."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from paceline.wire import LongPhase, Phase

# Seconds after which a phase is reported; the report is repeated at this interval.
LONG_S = 10.0
# Step and phase that a rank is in.
Activity: TypeAlias = tuple[int, Phase]


class Liveness:
    """Observer of one rank. Another thread calls `look` a few times a second."""

    def __init__(
        self,
        attempt: int,
        rank: int,
        activity: Callable[[], Activity],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempt = attempt
        self._rank = rank
        self._activity = activity
        self._clock = clock
        self._last: Activity | None = None
        # Times at which the phase began and at which its next report is due.
        self._began = self._due = 0.0

    def look(self) -> LongPhase | None:
        """Return a report if the rank has been in its phase for long and the report is due."""
        activity, at = self._activity(), self._clock()
        if activity != self._last:
            self._last, self._began, self._due = activity, at, at + LONG_S
            return None
        if at < self._due:
            return None
        self._due = at + LONG_S
        step, phase = activity
        return LongPhase(self._attempt, self._rank, step, phase, at - self._began, time.time())
