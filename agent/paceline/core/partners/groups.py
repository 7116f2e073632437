"""RNA's hierarchy (RNA, Sec. 4) without I/O: the groups of ranks, and the times of their pushes."""

from __future__ import annotations

from collections.abc import Iterable


def ordered(groups: Iterable[Iterable[int]]) -> list[list[int]]:
    """Return the groups of ranks, each sorted, ordered by their first ranks."""
    return sorted(sorted(group) for group in groups)


def of_rank(groups: list[list[int]], rank: int) -> int:
    """Return the index of the group that contains a rank."""
    return next(at for at, group in enumerate(groups) if rank in group)


class Pushes:
    """The schedule of a group's pushes of its changes to the parameter server.

    The group's first rank pushes every `every` rounds; None: not before all ranks synchronise. A
    push also pulls the changes of other groups. This correction reaches all ranks of the group with
    a later round. No push begins before the correction of the previous push has been applied.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        # Number of rounds that have been applied.
        self._applied = 0
        # True while a push is under way, or its correction has not been applied.
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
