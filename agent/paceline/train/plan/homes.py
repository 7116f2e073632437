"""Which node holds which sample, as the leader derives it from the segments that it adopts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.data.keeper import NodePart
from paceline.wire import Moves, Segment, Shards

Ints = npt.NDArray[np.int64]


class Homes:
    """A sample's home is the node that trained it last, or that it was moved to. For one thread.

    Args:
        shards: what nodes have when the attempt begins.
    """

    def __init__(self, shards: Shards) -> None:
        self.nodes: Ints = np.array(shards.nodes)  # of each rank, [W]
        self.keepers: list[int] = np.unique(self.nodes, return_index=True)[1].tolist()
        self.of: Ints = shards.holders()  # home of each sample, -1: none, [N]
        self._moves: Moves | None = None  # that come into force with the next epoch
        self._epoch: int | None = None

    def enter(self, epoch: int) -> None:
        """Begins an epoch: what was to move has moved."""
        if epoch == self._epoch:
            return
        if self._moves is not None:
            self.of = self._moved(self._moves)
        self._epoch, self._moves = epoch, None

    def parts(self, segment: Segment) -> list[NodePart]:
        """Takes in a segment that is adopted; what it says about each node, [nodes]."""
        counts = np.asarray(segment.counts)  # [steps, W]
        samples = np.frombuffer(segment.indices, "<u4")
        of_node = np.repeat(np.tile(self.nodes, len(counts)), counts.ravel())
        self.of[samples] = of_node
        after = None
        if segment.moves is not None:
            self._moves = segment.moves
            after = self._moved(segment.moves)
        elif segment.epoch_end:  # some were perhaps trained elsewhere since the moves were planned
            after = self.of if self._moves is None else self._moved(self._moves)
        return [
            NodePart(
                segment.epoch,
                samples[of_node == node].tobytes(),
                None if after is None else np.flatnonzero(after == node).astype("<u4").tobytes(),
            )
            for node in range(len(self.keepers))
        ]

    def _moved(self, moves: Moves) -> Ints:
        """Homes after the moves, [N]."""
        samples, ranks = moves.arrays()
        after = self.of.copy()
        after[samples] = self.nodes[ranks]
        return after
