"""Tracks which node stores which sample, from the segments that the leader adopts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.data.prefetcher import NodeShard
from paceline.wire import Moves, Plan, Shards, pack_samples

Ints = npt.NDArray[np.int64]


class Homes:
    """The home of each sample. Adopted segments change the homes.

    A sample's home is the node that trained it last, or to which a plan has moved it since then.
    Not thread-safe. `shards` has the homes at the start of the attempt.
    """

    def __init__(self, shards: Shards) -> None:
        # The node of each rank, [W].
        self.nodes: Ints = np.array(shards.nodes)
        # For each node, the rank whose process runs the prefetcher, [nodes].
        self.prefetchers: list[int] = np.unique(self.nodes, return_index=True)[1].tolist()
        # The home of each sample, [N]; -1: no node stores the sample.
        self.of: Ints = shards.holders()
        # The moves of samples that take effect with the next epoch.
        self._moves: Moves | None = None
        self._epoch: int | None = None

    def enter(self, epoch: int) -> None:
        """Begin an epoch: the planned moves of samples take effect."""
        if epoch == self._epoch:
            return
        if self._moves is not None:
            self.of = self._moved(self._moves)
        self._epoch, self._moves = epoch, None

    def node_shards(self, plan: Plan) -> list[NodeShard]:
        """Update the homes by an adopted segment; return the segment's shards, one per node."""
        counts, samples = plan.assignment.counts, plan.assignment.samples
        of_node = np.repeat(np.tile(self.nodes, len(counts)), counts.ravel())
        self.of[samples] = of_node
        after = None
        if plan.moves is not None:
            self._moves = plan.moves
            after = self._moved(plan.moves)
        # At the epoch's end, derive the next epoch's homes again: some samples may have been
        # trained elsewhere since the moves were planned.
        elif plan.epoch_end:
            after = self.of if self._moves is None else self._moved(self._moves)
        return [
            NodeShard(
                plan.epoch,
                pack_samples(samples[of_node == node]),
                None if after is None else pack_samples(np.flatnonzero(after == node)),
            )
            for node in range(len(self.prefetchers))
        ]

    def _moved(self, moves: Moves) -> Ints:
        samples, ranks = moves.arrays()
        after = self.of.copy()
        after[samples] = self.nodes[ranks]
        return after
