"""Decides when the leader waits longer for a plan, if plans always arrive too late."""

from __future__ import annotations

import time
from collections.abc import Callable

# Segments that began without their plans, which came later.
LATE = 8
# The first wait. After each wait that was too short, the next one is twice as long.
FIRST_S = 0.5
LONGEST_S = 5.0
# The time between two waits is at least this multiple of the next wait's length, so waiting takes
# at most a twentieth of the time.
BETWEEN = 20.0


class Waits:
    """Schedule of a few long waits for plans that always arrive late, on an overloaded machine.

    Longer coasting helps, but not beyond an epoch's end, and epochs may be short. Without a wait,
    no plan and no switch of the policy would ever take effect. A single plan helps for long,
    because coasting keeps the ranks' shares of the last plan.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._late = 0
        self._next_s = FIRST_S
        self._waited_at = clock()

    @property
    def due_s(self) -> float:
        """Return the seconds to wait for the next plan; 0 means no longer than usual."""
        rested_s = self._clock() - self._waited_at
        return self._next_s if self._late >= LATE and rested_s >= BETWEEN * self._next_s else 0.0

    def late(self) -> None:
        """Count a plan that arrived too late for its segment."""
        self._late += 1

    def in_time(self) -> None:
        """Reset, because a plan arrived in time without a long wait."""
        self._late, self._next_s = 0, FIRST_S

    def over(self, *, came: bool) -> None:
        """End a long wait, in which a plan came or not."""
        self._waited_at = self._clock()
        if not came:
            self._next_s = min(2 * self._next_s, LONGEST_S)
