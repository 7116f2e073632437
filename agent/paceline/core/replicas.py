"""Rules for replicas that ranks average, without I/O: ranks and the simulator share them.

- Local SGD: `part_due` chooses the part of the parameters that is averaged after a step, and
  `parted` divides the parameters into parts.
- AD-PSGD: `Partners` draws the rank with which a rank averages, and `staleness` counts replicas by
  age. Lian et al., "Asynchronous decentralized parallel stochastic gradient descent" (2018), Sec.
  3: on a bipartite graph no rank waits for a rank that waits itself. Even ranks send requests, odd
  ranks answer them.
- Hierarchical RNA (RNA, Sec. 4): `ordered_groups` and `group_of` number the groups of ranks, and
  `Pushes` is the schedule of a group's pushes to the parameter server.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from paceline.wire import AGES


def part_due(step: int, every: int | None, parts: int = 1) -> int | None:
    """Return the number of the part of the parameters that is averaged after a step.

    Return None if no part is averaged. Parts take turns, ``every / parts`` steps apart, so that
    each is averaged every `every` steps (called H in local SGD). `every` None: parts are averaged
    only when all ranks synchronise. `parts` is at most `every`.
    """
    if every is None:
        return None
    at = (step + 1) % every
    return next((part for part in range(parts) if part * every // parts == at), None)


def parted(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Divide the parameters into consecutive parts of about equal size; return each part's indices.

    `sizes` has the number of elements of each parameter. With fewer parameters than parts, some
    parts are empty.
    """
    made: list[list[int]] = [[] for _ in range(parts)]
    total, before = max(sum(sizes), 1), 0
    for number, size in enumerate(sizes):
        middle = before + size / 2
        made[min(int(parts * middle / total), parts - 1)].append(number)
        before += size
    return made


def answering(world: int) -> range:
    """Return the ranks of a world that answer requests for averaging."""
    return range(1, world, 2)


def asking(world: int) -> range:
    """Return the ranks of a world that send requests for averaging; empty for a single rank."""
    return range(0, world, 2) if world > 1 else range(0)


class Partners:
    """The ranks with which a rank averages: one is drawn for each of its steps."""

    def __init__(self, rank: int, world: int, seed: int) -> None:
        self._draw = random.Random(f"{seed} {rank}")
        self._answering = answering(world)

    def next(self) -> int:
        """Return the rank with which to average after the next step."""
        return self._draw.choice(self._answering)


def staleness(steps: int, others: int) -> list[int]:
    """Return how many of the two replicas in a mean have each age, from 0 to `AGES` - 1.

    The newer replica has age 0. The age of the older replica is the number of steps that it
    is behind the newer one; higher ages count as `AGES` - 1. `steps` is the number of steps of the
    rank that sent the request, `others` is the number of steps of the rank that answers it.
    """
    ages = [0] * AGES
    ages[0] += 1
    ages[min(abs(steps - others), AGES - 1)] += 1
    return ages


def ordered_groups(groups: Iterable[Iterable[int]]) -> list[list[int]]:
    """Return the groups of ranks, each sorted, in the order of their first ranks."""
    return sorted(sorted(group) for group in groups)


def group_of(groups: list[list[int]], rank: int) -> int:
    """Return the index of the group that contains a rank."""
    return next(at for at, group in enumerate(groups) if rank in group)


class Pushes:
    """The schedule of a group's pushes of its changes to the parameter server.

    The group's first rank pushes every `every` rounds. With `every` None it pushes only when all
    ranks synchronise. A push also pulls the changes of other groups. All ranks of the group get the
    pulled changes, the *correction*, with a later round. No push begins before the correction of
    the previous push has been applied.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        # Number of all-reduce rounds that have been applied.
        self._applied = 0
        # True from a push's beginning until the round with its correction has been applied.
        self._underway = False

    def applied(self, *, correction: bool, idle: bool) -> bool:
        """Record that a round has been applied; return True if a push must begin now.

        `correction`: the round included the correction of the previous push. `idle`: the thread
        that pushes has no task.
        """
        self._applied += 1
        if correction:
            self._underway = False
        due = self._every is not None and self._applied % self._every == 0
        if not due or self._underway or not idle:
            return False
        self._underway = True
        return True
