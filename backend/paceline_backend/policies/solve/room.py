"""Tracks the free storage of nodes while samples get other holders."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline_backend.policies.values import Ints, Problem, Storage


class Room:
    """The bytes that nodes hold and give up, starting from a problem's placement."""

    def __init__(self, problem: Problem) -> None:
        assert problem.nodes is not None and problem.storage is not None
        self._nodes, self._storage = problem.nodes, problem.storage
        self._left = problem.storage.room - held(problem.placement, problem.nodes, problem.storage)
        # The bytes that each node gives up.
        self._given = np.zeros_like(self._left)

    def over(self, rank: int) -> bool:
        """Return True if the rank's node is over its storage and must give up more samples."""
        node = self._nodes[rank]
        return bool(self._left[node] + self._given[node] < 0)

    def give_up(self, sample: int, rank: int) -> None:
        """Give up a rank's sample. Its node keeps the room until another node takes it."""
        self._given[self._nodes[rank]] += self._storage.lengths[sample]

    def admitted(self, sample: int, giver: int) -> npt.NDArray[np.bool_]:
        """Return a mask of ranks that may take a sample that was given up, [W]; never empty."""
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
        """Give a rank a sample that another rank, or the rank itself, gave up."""
        length = self._storage.lengths[sample]
        self._left[self._nodes[giver]] += length
        self._left[self._nodes[rank]] -= length


def held(placement: Ints, nodes: Ints, storage: Storage) -> Ints:
    """Return the bytes that each node holds, [nodes], given the ranks' nodes, [W]."""
    bytes_ = np.bincount(nodes[placement], storage.lengths, len(storage.room))
    return bytes_.astype(np.int64)


def dealt(holders: Ints, nodes: Ints, storage: Storage) -> Ints:
    """Return a rank for each sample of a data set, [N]: one of the node that has it, else in turn.

    `holders` are the nodes that have each sample, or -1, [N]. Samples that no node has go to ranks
    by their index, but not to nodes without room while others have room.
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
