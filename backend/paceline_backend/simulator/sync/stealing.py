"""FlexRR's work stealing on the virtual clock; see `paceline.train.sync.stealing`."""

from __future__ import annotations

from paceline_backend.policies.base import Ints
from paceline_backend.simulator.sync.base import Dealing, Piece


class Stealing:
    """Which samples ranks load in the steps of a segment.

    Args:
        planned: samples of each step and rank, [S, W].
        dealing: what other batches take.
    """

    def __init__(self, planned: Ints, dealing: Dealing) -> None:
        self._planned: list[list[int]] = planned.T.tolist()  # [rank][step]
        self._dealing = dealing
        self._begun = [0] * planned.shape[1]  # each rank's newest step,
        self._gone: dict[tuple[int, int], int] = {}  # and samples of later ones that others took

    def work_s(self, rank: int, at: int, clocks: Ints) -> tuple[float, int] | None:
        """What a rank's step takes it, which it begins, and its samples; None: as planned.

        Args:
            rank: which.
            at: the step, not the first: nobody knows of others before it.
            clocks: steps that ranks are through with, as the last round told, [W].
        """
        self._begun[rank] = at
        planned = self._planned[rank][at]
        if gone := self._gone.pop((rank, at), 0):
            return self._dealing.work_s(rank, at, [(rank, at, 0, planned - gone)])
        taken = self._take(rank, at, clocks)
        if taken is None:
            return None
        return self._dealing.work_s(rank, at, [(rank, at, 0, planned), taken])

    def _take(self, rank: int, at: int, clocks: Ints) -> Piece | None:
        """What the rank takes of the slowest one's next batch."""
        clocks = clocks.copy()
        clocks[rank] = at  # as slow as any that it could help
        slowest = int(clocks.argmin())
        behind, next_ = at - int(clocks[slowest]), int(clocks[slowest]) + 1
        if behind < 1:
            return None
        there = self._planned[slowest][next_]
        room = self._dealing.room(rank, self._planned[rank][at])
        count = min(there * behind // (behind + 1), there - 1, room)
        if count < 1 or self._begun[slowest] >= next_ or (slowest, next_) in self._gone:
            return None
        self._gone[slowest, next_] = count
        return slowest, next_, there - count, there
