"""Few distinct shapes of local batches: counts of samples, and padded lengths, on a grid.

Compiled models compile again for a new shape, and cuDNN's benchmark measures its kernels again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Shapes:
    """The grid on which shapes of local batches lie, the same on all ranks.

    Args:
        samples: each rank gets a multiple of so many samples in a step; 1: any number. It divides
            the global batch.
        length: batches are padded to a multiple of this length, in the unit of the sizes; 0: to
            their longest sample. Your collate function does it, with `padded`.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """

    samples: int = 1
    length: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.samples, int) or isinstance(self.samples, bool):
            raise TypeError(f"shapes: samples is {self.samples!r}: it must be a whole number")
        if self.samples < 1:
            raise ValueError(f"shapes: samples is {self.samples}: it must be at least 1")
        if not isinstance(self.length, int | float) or isinstance(self.length, bool):
            raise TypeError(f"shapes: length is {self.length!r}: it must be a number")
        if not 0 <= self.length < math.inf:
            raise ValueError(f"shapes: length is {self.length}: it must be at least 0, and finite")

    @staticmethod
    def of(given: Any) -> Shapes:
        """What `Session(shapes=…)` was given: `Shapes`, a number of samples, or None.

        Raises:
            TypeError, ValueError: it is none of these.
        """
        if given is None:
            return Shapes()
        return given if isinstance(given, Shapes) else Shapes(given)

    def padded(self, length: int) -> int:
        """The length to pad a batch to whose longest sample is so long: up to the grid."""
        return math.ceil(float(raised(length, self.length)))


def raised(length: Any, grid: float) -> Any:
    """Lengths, an array or a number, rounded up to multiples of `grid`; 0: as they are.

    A length that is on the grid up to rounding errors stays there.
    """
    return np.ceil(length / grid * (1 - 1e-12)) * grid if grid else length


def on_grid(
    counts: Ints,
    grid: int,
    limits: Ints | None = None,
    nodes: Ints | None = None,
    *,
    keep: bool = False,
) -> Ints:
    """The nearest counts with the same sum that are multiples of `grid`, [W].

    What the grid does not divide, which is what an epoch leaves for its last step, goes to one
    rank. If the limits hold no more multiples, the rest goes to as few ranks as have room for it.

    Args:
        counts: samples of each rank, [W], within the limits.
        grid: ≥ 1.
        limits: the most samples of each rank, [W]; their sum is at least that of the counts. None:
            there are no limits.
        nodes: of each rank, 0, 1, …, [W], where samples stay on their nodes: first the nodes' sums
            go to the nearest multiples, then the ranks' counts. None: only the ranks' counts do.
        keep: ranks that have samples keep `grid` of them, if their node has enough for all such
            ranks.
    """
    total = int(counts.sum())
    if nodes is None:
        nodes = np.zeros_like(counts)
    most = np.full(len(counts), total) if limits is None else np.minimum(limits, total)
    room = most // grid
    of_nodes, room_of_nodes = _sums(counts, nodes), _sums(room, nodes)
    number = min(total // grid, int(room.sum()))
    blocks_of_nodes = _blocks(number, of_nodes, np.zeros_like(of_nodes), room_of_nodes, grid)
    least = np.minimum(counts > 0, room) * keep
    blocks = np.zeros_like(counts)
    for node, number in enumerate(blocks_of_nodes.tolist()):
        its = nodes == node
        blocks[its] = _blocks(number, counts[its], least[its], room[its], grid)
    made: Ints = grid * blocks
    rest = total - int(made.sum())
    while rest > 0:
        free = most - made
        # Where one rank has room for all of the rest, the one that misses most samples gets it.
        able = np.flatnonzero(free >= min(rest, int(free.max())))
        missing_on_node = (of_nodes - _sums(made, nodes))[nodes[able]]
        most_missing = np.lexsort((made[able] - counts[able], -missing_on_node))
        rank = able[most_missing[0]]
        given = min(rest, int(free[rank]))
        made[rank] += given
        rest -= given
    return made


def _sums(counts: Ints, nodes: Ints) -> Ints:
    """The sums of the ranks' counts on each node, [nodes]."""
    sums: Ints = np.zeros(int(nodes.max(initial=0)) + 1, np.int64)
    np.add.at(sums, nodes, counts)
    return sums


def _blocks(number: int, counts: Ints, least: Ints, room: Ints, grid: int) -> Ints:
    """So many blocks of `grid` samples, nearest to the counts: within the room, and `least` if
    there are enough for that.
    """
    if least.sum() > number:
        least = np.zeros_like(least)
    blocks = np.maximum(np.minimum(counts // grid, room), least)
    while (left := number - int(blocks.sum())) != 0:
        change = 1 if left > 0 else -1
        able = blocks < room if left > 0 else blocks > least
        missing = np.where(able, change * (counts - grid * blocks), -np.inf)
        blocks[np.argsort(-missing, kind="stable")[: min(abs(left), int(able.sum()))]] += change
    return blocks


def moved(ranks: Ints, counts: Ints) -> Ints:
    """The rank of each sample of a batch if ranks get `counts` samples, [n]; few change their rank.

    Ranks with too many samples give their last ones; they go to the others in the ranks' order.

    Args:
        ranks: of each sample, [n].
        counts: of each rank, [W]; their sum is n.
    """
    before = np.bincount(ranks, minlength=len(counts))
    order = np.argsort(ranks, kind="stable")
    place = np.arange(len(ranks)) - np.repeat(np.cumsum(before) - before, before)
    given = order[place >= np.repeat(counts, before)]
    made: Ints = ranks.copy()
    made[np.sort(given)] = np.repeat(np.arange(len(counts)), np.maximum(counts - before, 0))
    return made


def moved_on_nodes(ranks: Ints, counts: Ints, nodes: Ints, at_home: Bools) -> Ints:
    """As `moved`, but few samples change their node, [n].

    A node whose ranks get fewer samples gives first those that are not at home.

    Args:
        ranks: of each sample, [n].
        counts: of each rank, [W]; their sum is n.
        nodes: of each rank, 0, 1, …, [W].
        at_home: whether the sample's node, as planned, is the one that holds it, [n].
    """
    order = np.argsort(~at_home, kind="stable")
    before = nodes[ranks[order]]
    after = moved(before, _sums(counts, nodes))
    made: Ints = ranks.copy()
    for node in range(int(nodes.max()) + 1):
        its = np.flatnonzero(nodes == node)
        here = after == node
        # Who comes from another node has no rank yet: a further one, which keeps no sample.
        local = np.searchsorted(its, ranks[order[here]])
        local[before[here] != node] = len(its)
        made[order[here]] = its[moved(local, np.append(counts[its], 0))]
    return made
