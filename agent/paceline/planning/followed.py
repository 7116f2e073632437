"""What rank 0 remembers of an attempt, so that a planning process can start at any time."""

from __future__ import annotations

from collections import deque

import numpy as np

from paceline.planning.history import History
from paceline.wire import PLANNED, Hello, Moves, Plan


class Followed:
    """Summary of an attempt's adopted segments, whose size does not grow with their number.

    Each segment must be adopted in its order. `history` restores the planner's `History`, but for
    the shuffler's last result, which no segment has.
    """

    def __init__(self, hello: Hello) -> None:
        samples = 0 if hello.stream else hello.samples or 0
        # The latest segments, as many as `History.newest` keeps.
        self.newest: deque[Plan] = deque(maxlen=8)
        # The last segment that a policy planned.
        self._planned: Plan | None = None
        self._epoch = hello.epoch
        self._used = np.zeros(samples, bool)
        if samples:
            self._used[np.frombuffer(hello.used, "<u4")] = True
        # The rank that each sample was trained by, or moved to, last; -1: none in this attempt.
        self._holder = np.full(samples, -1, np.int32)
        self._trained = np.zeros(samples, bool)
        # Moves that take effect with the next epoch, with that epoch and the version of the policy.
        self._moves: tuple[Moves, tuple[int, int]] | None = None

    def adopt(self, plan: Plan) -> None:
        """Add the next segment that the leader has adopted."""
        if plan.epoch != self._epoch:
            self._begin_epoch(plan.epoch)
        self.newest.append(plan)
        if plan.source in PLANNED:
            self._planned = plan
        if len(self._used):
            samples = plan.assignment.samples
            self._used[samples] = True
            self._holder[samples] = plan.assignment.ranks()
            self._trained[samples] = True
            if plan.moves is not None:
                self._moves = plan.moves, (plan.epoch + 1, plan.version)
        if plan.epoch_end:
            self._begin_epoch(plan.epoch + 1)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._used[:] = False
        if self._moves is not None:
            samples, ranks = self._moves[0].arrays()
            self._holder[samples], self._moves = ranks, None

    def history(self, hello: Hello) -> History:
        """Return the planner's history after the adopted segments."""
        history = History(hello)
        for plan in self.newest:
            history.adopt(plan)
        if self.newest:
            holder = self._holder.astype(np.int64)
            history.restore(self._used, holder, self._trained, self._moves, self._planned)
        return history
