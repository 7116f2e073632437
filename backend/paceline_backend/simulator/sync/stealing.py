"""FlexRR's work stealing on the virtual clock; `paceline.core.stealing` decides what is taken."""

from __future__ import annotations

from paceline.core.stealing import Piece, Standing
from paceline_backend.simulator.sync.base import Dealing


class Stealing:
    """Which samples ranks load in the steps of a segment.

    Args:
        planned: samples of each rank and step, [W][its steps].
        dealing: how long steps take with batches that differ from the plan.
    """

    def __init__(self, planned: list[list[int]], dealing: Dealing) -> None:
        self._planned = [list(counts) for counts in planned]
        self._dealing = dealing
        self._standing = Standing([0] * len(planned), planned)
        self._begun = [0] * len(planned)  # the newest step that each rank has begun
        self._gone: dict[tuple[int, int], int] = {}  # samples that others took, by rank and step

    def work_s(self, rank: int, at: int, clocks: list[int]) -> tuple[float, int] | None:
        """The seconds and the samples of a step that a rank begins; None: as planned.

        Args:
            rank: that begins the step.
            at: the step. Not the segment's first: no rank knows how far the others are before that.
            clocks: steps that ranks are through with, as the last round told, [W].
        """
        self._begun[rank] = at
        planned = self._planned[rank][at]
        if gone := self._gone.pop((rank, at), 0):
            return self._dealing.work_s(rank, at, [Piece(rank, at, 0, planned - gone)])
        if self._standing.clocks is not clocks:  # there was a round
            self._standing = Standing(clocks, self._planned)
        taken = self._standing.takes(rank, at, lambda: self._dealing.room(rank, planned))
        if taken is None:
            return None
        other, step = taken.rank, taken.step
        if self._begun[other] >= step or (other, step) in self._gone:
            return None
        self._gone[other, step] = taken.end - taken.first
        return self._dealing.work_s(rank, at, [Piece(rank, at, 0, planned), taken])
