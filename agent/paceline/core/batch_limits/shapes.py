"""A grid for sample counts and padded lengths, so that local batches have few distinct shapes.

Compiled models recompile for a new shape, and cuDNN's benchmark mode measures its kernels again.
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
        samples: each rank's number of samples in a step is a multiple of `samples`; 1: any number.
            `samples` divides the global batch.
        length: batches are padded to a multiple of `length`, in the unit of the sizes; 0: to the
            length of their longest sample. Your collate function pads them, using `padded`.

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
            raise ValueError(f"shapes: length is {self.length}: it must be finite and at least 0")

    @staticmethod
    def of(given: Any) -> Shapes:
        """Convert the argument `shapes` of `Session`: `Shapes`, a number of samples, or None."""
        if given is None:
            return Shapes()
        return given if isinstance(given, Shapes) else Shapes(given)

    def padded(self, length: int) -> int:
        """Return the length to which a batch is padded, given the length of its longest sample."""
        return math.ceil(float(raised(length, self.length)))


def raised(length: Any, grid: float) -> Any:
    """Round lengths, an array or a number, up to multiples of `grid`.

    If `grid` is 0, return the lengths unchanged. A length that exceeds a multiple only by a
    rounding error is not raised to the next multiple.
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
    """Round each rank's number of samples to a multiple of `grid`, without changing their sum.

    If the sum is not a multiple, as in an epoch's last step, the remainder goes to one rank. If the
    limits leave no room for further blocks of `grid` samples, the remaining samples go to as few
    ranks as possible.

    Args:
        counts: number of samples of each rank, within the limits.
        grid: the number to whose multiples counts are rounded, ≥ 1.
        limits: the maximum number of samples of each rank. The sum of the limits is at least the
            sum of the counts. None: there are no limits.
        nodes: the number of each rank's node, from 0, if samples should stay on their nodes: then
            the nodes' sums are rounded first, and the ranks' counts second. None: only the ranks'
            counts are rounded.
        keep: do not round a rank that has samples down to 0. Ignored on a node that has too few
            samples for that, and for a rank whose limit is below `grid`.
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
        # Consider the ranks with room for the whole rest or, if there are none, the ranks with the
        # most room. Among the nodes of these ranks, choose the one that lacks the most samples, and
        # on that node the rank that lacks the most.
        able = np.flatnonzero(free >= min(rest, int(free.max())))
        missing_on_node = (of_nodes - _sums(made, nodes))[nodes[able]]
        most_missing = np.lexsort((made[able] - counts[able], -missing_on_node))
        rank = able[most_missing[0]]
        given = min(rest, int(free[rank]))
        made[rank] += given
        rest -= given
    return made


def _sums(counts: Ints, nodes: Ints) -> Ints:
    sums: Ints = np.zeros(int(nodes.max(initial=0)) + 1, np.int64)
    np.add.at(sums, nodes, counts)
    return sums


def _blocks(number: int, counts: Ints, least: Ints, room: Ints, grid: int) -> Ints:
    """Return the number of blocks of `grid` samples for each rank or node; the sum is `number`.

    `room` and `least` are the maximum and minimum number of blocks of each rank or node. The
    minimum is ignored if there are too few blocks. Within these bounds, the numbers of samples are
    as near to `counts` as possible.
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
    """Move as few samples as possible so that ranks have `counts`; return each sample's new rank.

    Ranks with too many samples give away their last samples. Ranks with too few get these samples
    in rank order. `ranks` is the rank of each sample before the move. `counts` has the new number
    of samples of each rank.
    """
    before = np.bincount(ranks, minlength=len(counts))
    order = np.argsort(ranks, kind="stable")
    place = np.arange(len(ranks)) - np.repeat(np.cumsum(before) - before, before)
    given = order[place >= np.repeat(counts, before)]
    made: Ints = ranks.copy()
    made[np.sort(given)] = np.repeat(np.arange(len(counts)), np.maximum(counts - before, 0))
    return made


def moved_on_nodes(ranks: Ints, counts: Ints, nodes: Ints, at_home: Bools) -> Ints:
    """Move samples as `moved` does, but few of them between nodes; return each sample's new rank.

    A node that must give samples away starts with samples that it does not store. `nodes` is the
    number of each rank's node, from 0. `at_home` has, for each sample, True if the node of its
    planned rank stores it.
    """
    order = np.argsort(~at_home, kind="stable")
    before = nodes[ranks[order]]
    after = moved(before, _sums(counts, nodes))
    made: Ints = ranks.copy()
    for node in range(int(nodes.max()) + 1):
        its = np.flatnonzero(nodes == node)
        here = after == node
        # Samples that come from another node have no rank on this node yet. They start on an extra
        # rank whose new count is 0, so `moved` gives all of them to ranks of this node.
        local = np.searchsorted(its, ranks[order[here]])
        local[before[here] != node] = len(its)
        made[order[here]] = its[moved(local, np.append(counts[its], 0))]
    return made
