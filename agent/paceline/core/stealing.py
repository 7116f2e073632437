"""FlexRR's work stealing, as a decision without I/O: who takes how much of whose next batch.

A rank that is ahead enlarges its batch by samples of the next batch that the slowest rank has not
begun to load. Ranks (`paceline.train.sync.stealing`) and the simulator ask `takes` when a rank is
about to load a batch. It is their task to close each batch only once: by its owner, or by the rank
that takes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Consecutive samples of a batch as it was planned."""

    rank: int  # whose batch it is
    step: int  # of the segment
    first: int
    end: int


class Standing:
    """How far all ranks are, as one round told. Holds until the next round.

    Args:
        clocks: steps of the segment that each rank is through with, as the round told, [W].
        planned: samples of each rank's batches, [W][steps of the rank].
        lookahead: steps that each rank loads before it trains with them.
    """

    def __init__(
        self, clocks: Sequence[int], planned: Sequence[Sequence[int]], lookahead: int = 0
    ) -> None:
        self.clocks = clocks
        self._planned, self._lookahead = planned, lookahead
        self._least = min(clocks) + lookahead
        slowest = clocks.index(min(clocks))
        self._slowest = slowest if self._next(slowest) is not None else self._besides(None)
        self._second: tuple[int, int | None] | None = None  # a rank, and the slowest other one

    def takes(self, rank: int, step: int, room: Callable[[], int] | None = None) -> Piece | None:
        """What a rank takes over of the slowest other rank's next batch; None: nothing.

        The further behind the other rank is, the more is taken. At least one sample stays.

        Args:
            rank: that is about to load a batch.
            step: of the segment, for which the rank loads.
            room: gives how many samples the rank can take on at most; None: any number.
        """
        if step - self._least < 1:
            return None
        other = self._slowest if self._slowest != rank else self._second_slowest(rank)
        if other is None:
            return None
        loaded = self.clocks[other] + self._lookahead  # the newest batch that it began to load
        behind = step - loaded
        if behind < 1:
            return None
        planned = self._planned[other][loaded + 1]
        count = min(planned * behind // (behind + 1), planned - 1)
        if room is not None:
            count = min(count, room())
        return Piece(other, loaded + 1, planned - count, planned) if count >= 1 else None

    def _next(self, rank: int) -> int | None:
        """The first step whose batch the rank has not begun to load; None: there is none."""
        step = self.clocks[rank] + self._lookahead + 1
        return step if step < len(self._planned[rank]) else None

    def _second_slowest(self, rank: int) -> int | None:
        if self._second is None or self._second[0] != rank:
            self._second = rank, self._besides(rank)
        return self._second[1]

    def _besides(self, rank: int | None) -> int | None:
        """The slowest rank, except a given one, with a batch that it has not begun to load."""
        able = [k for k in range(len(self.clocks)) if k != rank and self._next(k) is not None]
        return min(able, key=self.clocks.__getitem__, default=None)
