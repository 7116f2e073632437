"""AD-PSGD's means of two replicas, without I/O: the choice of partners and the staleness of a mean.

Lian et al., "Asynchronous decentralized parallel stochastic gradient descent" (2018), Sec. 3: on a
bipartite graph no rank waits for a rank that waits itself. Ranks of even number ask, ranks of odd
number answer. Ranks (`paceline.train.sync.pairwise`) and the simulator draw the same partners.
"""

from __future__ import annotations

import random

from paceline.wire import AGES


def answering(world: int) -> range:
    """Return the ranks of a world that answer."""
    return range(1, world, 2)


def asking(world: int) -> range:
    """Return the ranks of a world that ask. A single rank has no partner to ask."""
    return range(0, world, 2) if world > 1 else range(0)


class Partners:
    """The ranks that a rank asks, one after each of its steps."""

    def __init__(self, rank: int, world: int, seed: int) -> None:
        self._draw = random.Random(f"{seed} {rank}")
        self._answering = answering(world)

    def next(self) -> int:
        """Return the rank to ask after the next step."""
        return self._draw.choice(self._answering)


def staleness(steps: int, others: int) -> list[int]:
    """Return a mean's ages: 0 for one replica, and for the other the steps between the two.

    `steps` is the asking rank's number of steps, `others` the other rank's.
    """
    ages = [0] * AGES
    ages[0] += 1
    ages[min(abs(steps - others), AGES - 1)] += 1
    return ages
