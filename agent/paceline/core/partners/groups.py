"""RNA's hierarchy (RNA, Sec. 4) as rules without I/O: its groups, and when one pushes."""

from __future__ import annotations

from collections.abc import Iterable


def ordered(groups: Iterable[Iterable[int]]) -> list[list[int]]:
    """The groups of ranks, each in order, by their first ranks."""
    return sorted(sorted(group) for group in groups)


def of_rank(groups: list[list[int]], rank: int) -> int:
    """The index of the group that a rank is in."""
    return next(at for at, group in enumerate(groups) if rank in group)


class Pushes:
    """When a group's first rank pushes to the parameter server what its group changed.

    A push also pulls what other groups changed. This correction reaches all ranks of the group with
    a later round. No push begins before the correction of the previous push has been applied.

    Args:
        every: rounds between two pushes; None: no push before all ranks meet.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._applied = 0  # rounds that have been applied
        self._underway = False  # a push is under way, or its correction has not been applied

    def applied(self, *, correction: bool, idle: bool) -> bool:
        """A round has been applied; whether a push is to begin now.

        Args:
            correction: the round brought the correction of the previous push.
            idle: the thread that pushes has no task.
        """
        self._applied += 1
        if correction:
            self._underway = False
        due = self._every is not None and self._applied % self._every == 0
        if not due or self._underway or not idle:
            return False
        self._underway = True
        return True
