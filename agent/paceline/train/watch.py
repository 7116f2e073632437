"""Tells what a rank is doing when that takes long, so that a run that hangs can be explained."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeAlias

from paceline.wire import LongPhase, Phase

logger = logging.getLogger(__name__)

LONG_S = 10.0  # so long a phase is told, and told again
LOGGED_S = 60.0  # a rank that waits for so long for others says so in its log, once for each wait
Activity: TypeAlias = tuple[int, Phase]  # step and phase that a rank is in

_WAITS = {Phase.PLAN: "for the plan, which rank 0 gives", Phase.SYNC: "for other ranks"}


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
        self._logged = False  # the activity

    def look(self) -> LongPhase | None:
        """What the rank has been doing for long, if it is time to tell."""
        activity, at = self._activity(), self._clock()
        if activity != self._last:
            self._last, self._began, self._due = activity, at, at + LONG_S
            self._logged = False
            return None
        if at < self._due:
            return None
        self._due = at + LONG_S
        step, phase = activity
        if phase in _WAITS and at - self._began >= LOGGED_S and not self._logged:
            self._logged = True
            logger.warning(
                "rank %d has waited %.0f s %s, in step %d: `paceline hang RUN --stacks` says what "
                "all ranks do",
                self._rank,
                at - self._began,
                _WAITS[phase],
                step,
            )
        return LongPhase(self._attempt, self._rank, step, phase, at - self._began, time.time())
