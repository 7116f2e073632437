"""Time in which this process listens, for deadlines of others that say nothing.

Silence is evidence only while the server would have heard. A process that was suspended, starved of
CPU or blocked by a disk finds on waking that minutes have passed: others may have reported all the
while, and what they reported is not stored yet, or they could not report because the bus was
suspended too. So a loop that looks every few seconds reads a `ListeningClock`, on which a pause
between two looks lasts no longer than the pause that the loop asked for.
"""

from __future__ import annotations

from collections.abc import Callable


class ListeningClock:
    """Seconds that a loop has listened; each look of the loop reads it at least once.

    Args:
        pause_s: between two looks. Longer pauses count as this one.
        clock: monotonic time in seconds.
    """

    def __init__(self, pause_s: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._pause_s = pause_s
        self._read_at = clock()
        self._listened_s = 0.0

    def __call__(self) -> float:
        """Return the time listened so far."""
        now = self.clock()
        self._listened_s += min(now - self._read_at, self._pause_s)
        self._read_at = now
        return self._listened_s
