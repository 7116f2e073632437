"""Data that is stored on nodes: the location of samples, and how a plan moves them."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

# Value in `Shards.held` for a sample that no node holds.
NOWHERE = 2**16 - 1

Ints = npt.NDArray[np.int64]


class Shards(msgspec.Struct, frozen=True):
    """The nodes that store samples, and the samples on each when an attempt begins."""

    # Number of each rank's node, from 0. Ranks of a node share its directory.
    nodes: list[int]
    # Maximum number of bytes that each node stores.
    limits: list[int]
    # Number of bytes of each sample: an array of little-endian uint32.
    lengths: bytes
    # Number of the node that holds each sample, or `NOWHERE`: an array of little-endian uint16.
    held: bytes

    def lengths_array(self) -> Ints:
        """Return the number of bytes of each sample."""
        return np.frombuffer(self.lengths, "<u4").astype(np.int64)

    def holders(self) -> Ints:
        """Return the number of the node that holds each sample; -1: no node holds the sample."""
        held = np.frombuffer(self.held, "<u2").astype(np.int64)
        return np.where(held == NOWHERE, -1, held)

    def defect(self, world: int, samples: int) -> str | None:
        """Return the first defect in the values; None if there is none."""
        count = len(self.limits)
        if len(self.nodes) != world:
            return f"shards.nodes has {len(self.nodes)} entries for {world} ranks"
        if not 0 < count < NOWHERE or set(self.nodes) != set(range(count)):
            return f"shards.nodes does not number the {count} nodes of shards.limits from 0"
        if not all(0 < limit < 2**63 for limit in self.limits):
            return "shards.limits holds a number that is not positive, or too large"
        if len(self.lengths) != 4 * samples or len(self.held) != 2 * samples:
            return f"shards.lengths and shards.held do not have {samples} samples"
        if int(self.holders().max(initial=-1)) >= count:
            return f"shards.held names a node beyond the {count} in shards.limits"
        return None


class Moves(msgspec.Struct, frozen=True):
    """Samples that move to another rank with the next epoch."""

    # Ascending indices of the samples: an array of little-endian uint32.
    samples: bytes
    # The new rank of each of the samples: an array of little-endian uint32.
    ranks: bytes

    @staticmethod
    def of(samples: Ints, ranks: Ints) -> Moves:
        """Make the moves from two arrays of equal length: the samples and their new ranks."""
        return Moves(samples.astype("<u4").tobytes(), ranks.astype("<u4").tobytes())

    def arrays(self) -> tuple[Ints, Ints]:
        """Return two arrays of equal length: the samples and their new ranks."""
        samples, ranks = np.frombuffer(self.samples, "<u4"), np.frombuffer(self.ranks, "<u4")
        return samples.astype(np.int64), ranks.astype(np.int64)

    def defect(self, world: int, samples: int | None) -> str | None:
        """Return the first defect in the values; None if there is none.

        `world` is the number of ranks, `samples` the size of the data set; None: unknown.
        """
        if len(self.samples) % 4 or len(self.samples) != len(self.ranks):
            return "moves.ranks does not have one rank for each of moves.samples"
        moved, ranks = self.arrays()
        if (np.diff(moved) <= 0).any():
            return "moves.samples are not ascending"
        if samples is not None and len(moved) and moved[-1] >= samples:
            return f"moves.samples holds sample {moved[-1]}, but there are {samples} samples"
        if len(ranks) and ranks.max() >= world:
            return f"moves.ranks holds rank {ranks.max()}, but there are {world} ranks"
        return None
