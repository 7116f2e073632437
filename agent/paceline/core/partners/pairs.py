"""AD-PSGD's means of two replicas, as rules without I/O: who asks whom, and how stale a mean is.

Lian et al., "Asynchronous decentralized parallel stochastic gradient descent" (2018), Sec. 3: on a
bipartite graph no rank waits for one that waits. Ranks of even number ask, those of odd number
answer. Ranks (`paceline.train.sync.pairwise`) and the simulator draw the same partners.
"""

from __future__ import annotations

import random

from paceline.wire import AGES


def answering(world: int) -> range:
    """The ranks of a world that answer."""
    return range(1, world, 2)


def asking(world: int) -> range:
    """The ranks of a world that ask. A rank alone asks nobody."""
    return range(0, world, 2) if world > 1 else range(0)


class Partners:
    """The ranks that a rank asks, one after each of its steps.

    Args:
        rank: that asks.
        world: ranks.
        seed: of the draws.
    """

    def __init__(self, rank: int, world: int, seed: int) -> None:
        self._draw = random.Random(f"{seed} {rank}")
        self._answering = answering(world)

    def next(self) -> int:
        """The rank to ask after the next step."""
        return self._draw.choice(self._answering)


def staleness(steps: int, others: int) -> list[int]:
    """The ages in a mean of two replicas: 0 for one, and for the other how far they are apart.

    Args:
        steps: of its own that the asking rank's replica has.
        others: steps of its own that the other rank's replica has.
    """
    ages = [0] * AGES
    ages[0] += 1
    ages[min(abs(steps - others), AGES - 1)] += 1
    return ages
