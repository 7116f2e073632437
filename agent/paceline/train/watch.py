"""Tells what a rank is doing when that takes long, so that a run that hangs can be explained."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from paceline.wire import LongPhase, Phase

LONG_S = 10.0  # so long a phase is told, and told again
Activity: TypeAlias = tuple[int, Phase]  # step and phase that a rank is in


class Watch:
    """Watches one rank from another thread, which calls `look` a few times a second.

    Args:
        attempt: of the run.
        rank: that is watched.
        activity: what the rank does at present.
        clock: monotonic time in s.
    """

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
        self._began = self._due = 0.0  # clock's times

    def look(self) -> LongPhase | None:
        """What the rank has been doing for long, if it is time to tell."""
        activity, at = self._activity(), self._clock()
        if activity != self._last:
            self._last, self._began, self._due = activity, at, at + LONG_S
            return None
        if at < self._due:
            return None
        self._due = at + LONG_S
        step, phase = activity
        return LongPhase(self._attempt, self._rank, step, phase, at - self._began, time.time())
