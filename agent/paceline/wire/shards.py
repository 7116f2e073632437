"""Data that lives on nodes: what planning needs to know of it, and how a plan moves it."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

NOWHERE = 2**16 - 1  # in `Shards.held`: no node has the sample

Ints = npt.NDArray[np.int64]


class Shards(msgspec.Struct, frozen=True):
    """Which nodes keep samples, and which samples they have when an attempt begins."""

    nodes: list[int]  # number of each rank's node, [W]; ranks of a node share its directory
    limits: list[int]  # bytes that each node keeps at most, [nodes]
    lengths: bytes  # bytes of each sample: little-endian uint32, [N]
    held: bytes  # number of the node that has each sample, or `NOWHERE`: little-endian uint16, [N]

    def lengths_array(self) -> Ints:
        """Bytes of each sample, [N]."""
        return np.frombuffer(self.lengths, "<u4").astype(np.int64)

    def holders(self) -> Ints:
        """The node that has each sample, or -1, [N]."""
        held = np.frombuffer(self.held, "<u2").astype(np.int64)
        return np.where(held == NOWHERE, -1, held)

    def problem(self, world: int, samples: int) -> str | None:
        """What is wrong with it for so many ranks and samples; None: nothing."""
        count = len(self.limits)
        if len(self.nodes) != world:
            return f"shards.nodes are of {len(self.nodes)} of {world} ranks"
        if not 0 < count < NOWHERE or set(self.nodes) != set(range(count)):
            return f"shards.nodes are not the numbers of {count} nodes with limits"
        if not all(0 < limit < 2**63 for limit in self.limits):
            return "shards.limits holds a number that is not above 0, or too large"
        if len(self.lengths) != 4 * samples or len(self.held) != 2 * samples:
            return f"shards.lengths and shards.held are not of {samples} samples"
        if int(self.holders().max(initial=-1)) >= count:
            return f"shards.held names a node beyond the {count} with limits"
        return None


class Moves(msgspec.Struct, frozen=True):
    """Samples that get another holder with the next epoch: holdings after, less those before."""

    samples: bytes  # little-endian uint32, [K], ascending
    ranks: bytes  # who holds each of them then: little-endian uint32, [K]

    @staticmethod
    def of(samples: Ints, ranks: Ints) -> Moves:
        """From arrays."""
        return Moves(samples.astype("<u4").tobytes(), ranks.astype("<u4").tobytes())

    def arrays(self) -> tuple[Ints, Ints]:
        """Samples and ranks, [K] each."""
        samples, ranks = np.frombuffer(self.samples, "<u4"), np.frombuffer(self.ranks, "<u4")
        return samples.astype(np.int64), ranks.astype(np.int64)

    def problem(self, world: int, samples: int | None) -> str | None:
        """What is wrong with it; None: nothing. `samples` None: not known."""
        if len(self.samples) % 4 or len(self.samples) != len(self.ranks):
            return "moves: samples and ranks are not one rank for each sample"
        moved, ranks = self.arrays()
        if (np.diff(moved) <= 0).any():
            return "moves.samples are not ascending"
        if samples is not None and len(moved) and moved[-1] >= samples:
            return f"moves.samples holds sample {moved[-1]} of {samples} samples"
        if len(ranks) and ranks.max() >= world:
            return f"moves.ranks holds rank {ranks.max()} of {world}"
        return None
