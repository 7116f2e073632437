"""When a leader whose plans always come too late waits for one."""

from __future__ import annotations

import time
from collections.abc import Callable

LATE = 8  # so many segments were begun without their plans, which came later
FIRST_S = 0.5  # the first wait; each that was too short is followed by one of twice the length
LONGEST_S = 5.0
BETWEEN = 20.0  # times as long as a wait passes before it: a twentieth of the time at most is lost


class Waits:
    """Few long waits for plans that always come too late, because the machine is too busy.

    Coasting for longer helps, but not beyond an epoch's end, and epochs may be short. Without a
    wait no plan would come into force then, and with it no switch. One is enough for long: coasting
    keeps to the shares of the load that the last plan had.

    Args:
        clock: monotonic time in s.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._late = 0
        self._next_s = FIRST_S
        self._waited_at = clock()

    @property
    def due_s(self) -> float:
        """How long to wait for the next plan; 0: no longer than usual."""
        rested_s = self._clock() - self._waited_at
        return self._next_s if self._late >= LATE and rested_s >= BETWEEN * self._next_s else 0.0

    def late(self) -> None:
        """A plan has come too late for its segment."""
        self._late += 1

    def in_time(self) -> None:
        """A plan has come in time without a long wait."""
        self._late, self._next_s = 0, FIRST_S

    def over(self, *, came: bool) -> None:
        """A long wait has ended, with a plan or without."""
        self._waited_at = self._clock()
        if not came:
            self._next_s = min(2 * self._next_s, LONGEST_S)
