"""Reports of phases that take long on this rank, so that a hanging run can be explained.

The thread that sends telemetry (`report.Emitter`) calls `PhaseMonitor.look` at every flush, and
sends the `LongPhase` that it returns. The server compares the ranks' reports
(`paceline_backend.insight.hangs`). Nothing here ends a rank or judges another rank; for that see
`features.lost_ranks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from paceline.wire import LongPhase, Phase

# A phase that lasts this many seconds is reported, and reported again at this interval.
LONG_PHASE_S = 10.0
# Step and phase that a rank is in.
Activity: TypeAlias = tuple[int, Phase]


class PhaseMonitor:
    """Monitor of the phases of this rank; another thread calls `look`."""

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
        self._began = self._due = 0.0

    def look(self) -> LongPhase | None:
        """Return a report if the rank has been in its phase for long and the report is due."""
        activity, at = self._activity(), self._clock()
        if activity != self._last:
            self._last, self._began, self._due = activity, at, at + LONG_PHASE_S
            return None
        if at < self._due:
            return None
        self._due = at + LONG_PHASE_S
        step, phase = activity
        return LongPhase(self._attempt, self._rank, step, phase, at - self._began, time.time())
