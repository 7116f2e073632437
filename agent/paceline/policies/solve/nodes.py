"""Placements that keep samples on nodes, for CHRONICA and for data that lives on nodes.

`dealt` makes a run's first placement.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.policies.values import Floats, Ints, Models, Problem, Storage


def homes_of(problem: Problem) -> list[int] | None:
    """Return the index of each rank's node, [W], or None if samples may move between nodes."""
    if problem.storage is None or problem.nodes is None:
        return None
    return problem.nodes.tolist() if problem.storage.keeps(problem.remaining) else None


def kept_on_nodes(placement: Ints, problem: Problem, models: Models) -> Ints:
    """Return a placement, [N], in which fewer samples change their node than in `placement`, [N].

    A sample that goes from node A to node B is exchanged for a sample of similar size that goes
    from B to A. The exchange is not made if it would increase the larger of the two workers' total
    times, or if a node has too little free storage for its new sample (`Problem.storage`). The
    nodes of `problem` must be known.
    """
    assert problem.nodes is not None
    nodes, sizes, placement = problem.nodes, problem.sizes, placement.copy()
    mine = placement[problem.remaining]
    load = np.bincount(mine, sizes[problem.remaining], models.world)
    work = models.a * load + models.c * np.bincount(mine, minlength=models.world)
    # Zeros, so that without storage limits every exchange is possible.
    room = lengths = np.zeros(len(sizes), np.int64)
    if problem.storage is not None:
        lengths = problem.storage.lengths
        room = problem.storage.room - held(placement, nodes, problem.storage)
    off, to = nodes[problem.placement], nodes[placement]
    away = np.flatnonzero(off != to)
    off, to = off[away], to[away]
    for first in np.unique(nodes):
        for second in np.unique(nodes[nodes > first]):
            out = _largest_first(away[(off == first) & (to == second)], sizes)
            back = _largest_first(away[(off == second) & (to == first)], sizes)
            for one_way, other_way in zip(out.tolist(), back.tolist(), strict=False):
                # Number of bytes that the first node gains.
                more = lengths[one_way] - lengths[other_way]
                if more > max(room[first], 0) or -more > max(room[second], 0):
                    continue
                if _exchange(placement, work, (one_way, other_way), sizes, models):
                    room[first] -= more
                    room[second] += more
    return placement


def _largest_first(samples: Ints, sizes: Floats) -> Ints:
    return samples[np.argsort(-sizes[samples], kind="stable")]


def _exchange(
    placement: Ints, work: Floats, samples: tuple[int, int], sizes: Floats, models: Models
) -> bool:
    ranks = placement[list(samples)]
    more = sizes[samples[1]] - sizes[samples[0]]
    after = work[ranks] + models.a[ranks] * np.array([more, -more])
    if after.max() > work[ranks].max():
        return False
    placement[list(samples)] = ranks[::-1]
    work[ranks] = after
    return True


class Room:
    """Free storage of each node in bytes, while samples move to other ranks one after the other.

    At first, each sample is stored on the node of the rank that holds it in `Problem.placement`.
    """

    def __init__(self, problem: Problem) -> None:
        assert problem.nodes is not None and problem.storage is not None
        self._nodes, self._storage = problem.nodes, problem.storage
        self._left = problem.storage.room - held(problem.placement, problem.nodes, problem.storage)
        self._given = np.zeros_like(self._left)

    def is_exceeded(self, rank: int) -> bool:
        """Return True if the rank's node has too little storage and must give up more samples."""
        node = self._nodes[rank]
        return bool(self._left[node] + self._given[node] < 0)

    def give_up(self, sample: int, rank: int) -> None:
        """Record that a rank gives up a sample, which stays on its node until `take` is called."""
        self._given[self._nodes[rank]] += self._storage.lengths[sample]

    def admitted(self, sample: int, giver: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the ranks that may get a sample that rank `giver` gave up, [W].

        At least one value is True.
        """
        at_home: npt.NDArray[np.bool_] = self._nodes == self._nodes[giver]
        if not (self._storage.ahead or self._storage.loose[sample]):
            return at_home
        elsewhere: npt.NDArray[np.bool_] = ~at_home & (
            self._left[self._nodes] >= self._storage.lengths[sample]
        )
        if self._left[self._nodes[giver]] < 0 and elsewhere.any():
            return elsewhere
        either: npt.NDArray[np.bool_] = elsewhere | at_home
        return either

    def take(self, sample: int, giver: int, rank: int) -> None:
        """Record that `rank` gets a sample that `giver`, possibly the same rank, gave up."""
        length = self._storage.lengths[sample]
        self._left[self._nodes[giver]] += length
        self._left[self._nodes[rank]] -= length


def held(placement: Ints, nodes: Ints, storage: Storage) -> Ints:
    """Return the number of bytes of samples on each node, [nodes], under a placement.

    `placement` has the rank that holds each sample, [N]; `nodes` the node of each rank, [W].
    """
    bytes_ = np.bincount(nodes[placement], storage.lengths, len(storage.room))
    return bytes_.astype(np.int64)


def dealt(holders: Ints, nodes: Ints, storage: Storage) -> Ints:
    """Assign each sample of a data set to a rank on the node that stores the sample, [N].

    `holders` has the node that stores each sample, or -1 if no node stores it, [N]; `nodes` has the
    node of each rank, [W]. A sample i that no node stores goes to rank i mod W. If this rank's node
    would then store too many bytes, the sample goes to the node with the most free storage, if it
    fits there.
    """
    world, samples = len(nodes), len(holders)
    placement = np.arange(samples, dtype=np.int64) % world
    for node in range(len(storage.room)):
        ranks, mine = np.flatnonzero(nodes == node), np.flatnonzero(holders == node)
        placement[mine] = ranks[np.arange(len(mine)) % len(ranks)]
    left = storage.room - held(placement, nodes, storage)
    for sample in np.flatnonzero(holders < 0).tolist() if (left < 0).any() else []:
        length, node = storage.lengths[sample], nodes[placement[sample]]
        if left[node] < 0 and left.max() >= length:
            most = int(left.argmax())
            ranks = np.flatnonzero(nodes == most)
            placement[sample] = ranks[sample % len(ranks)]
            left[node] += length
            left[most] -= length
    return placement
