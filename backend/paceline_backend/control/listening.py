"""Clock that stops while this process cannot receive, for deadlines of silent ranks and nodes.

Silence is evidence of a failure only while the server could have received something. A process that
was suspended, starved of CPU or blocked by a disk may find that minutes have passed. Ranks and
nodes may have reported meanwhile without their reports being stored yet, or the bus was suspended,
too. So a loop that checks deadlines every few seconds reads a `ListeningClock`, which adds at most
the loop's own pause for the time between two iterations.
"""

from __future__ import annotations

from collections.abc import Callable


class ListeningClock:
    """Counter of the seconds in which a loop could receive. Each iteration must read it.

    Args:
        pause_s: maximum number of seconds that are added for the time between two reads.
    """

    def __init__(self, pause_s: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._pause_s = pause_s
        self._read_at = clock()
        self._listened_s = 0.0

    def __call__(self) -> float:
        """Return the seconds in which the loop could receive so far."""
        now = self.clock()
        self._listened_s += min(now - self._read_at, self._pause_s)
        self._read_at = now
        return self._listened_s
