"""One rank in the rounds of a partial all-reduce; `paceline.core.rounds` describes the protocol."""

from __future__ import annotations

from enum import Enum, auto
from typing import Generic, TypeVar

from paceline.core.rounds import Drift, RoundProgress
from paceline.wire import MOST_PENDING

G = TypeVar("G")
# A gradient that waits for a round: the number of rounds that were applied to the parameters with
# which it was computed, its number of samples, and the gradient itself.
Pending = tuple[int, int, G]


class RoundAction(Enum):
    """A member's announcement to the other ranks before a round."""

    NOTHING = auto()
    # The member is ready. Ready members are counted until `RoundProgress.enough` returns True.
    READY = auto()
    # The member calls the round.
    CALL = auto()


class WaitReason(Enum):
    """The reason why a rank waits. The value is the text for the log."""

    PENDING = f"more than {MOST_PENDING} of its gradients wait for a round to end"
    ROUNDS = "it has completed more steps than there were rounds"
    COPYING = "its gradients are still being copied to the host"
    LEAD = "it is further ahead of the slowest rank than `lead` allows"
    SYNC_POINT = "it has no steps left, but other ranks have"


# Simulations often use these enum members, and Python 3.11 takes 0.1 µs to look one up.
_PENDING, _ROUNDS = WaitReason.PENDING, WaitReason.ROUNDS
_COPYING, _LEAD = WaitReason.COPYING, WaitReason.LEAD


class RoundCounts:
    """Counts of the gradients that one or more members contribute to a round.

    Attributes:
        contributors: members with a gradient in the round.
        ages: number of gradients by age in rounds, a list of `Drift.bins` bins. The last bin counts
            its age and all higher ages.
        dropped: number of samples whose gradients were dropped because they were too old.
    """

    __slots__ = ("ages", "contributors", "dropped")

    def __init__(self, drift: Drift) -> None:
        self.contributors = 0
        self.ages = [0] * drift.bins
        self.dropped = 0


class Member(Generic[G]):
    """One rank in the rounds of a segment.

    Attributes:
        clock: number of steps that the rank has completed.
        taken: number of rounds that are applied to the rank's parameters.
        waiting: why the rank waits; None: it does not wait. `offer` sets `waiting`. The caller of
            `offer` sets it to None once `wait_reason` returns None.
        done: True if the rank has no more steps.
    """

    __slots__ = (
        "_announced",
        "_held_until",
        "_keeps_newest",
        "_lead",
        "_leftovers",
        "_oldest",
        "_paced",
        "_pending",
        "_progress",
        "_rank",
        "_ready_for",
        "_underway",
        "_waits",
        "clock",
        "done",
        "taken",
        "waiting",
    )

    def __init__(self, rank: int, progress: RoundProgress) -> None:
        self._rank, self._progress = rank, progress
        drift = progress.drift
        self._oldest, self._lead = drift.oldest, drift.lead
        self._keeps_newest = drift.keeps_newest
        self._waits, self._paced = drift.waits, drift.paced
        self._leftovers = progress.call.leftovers
        # Gradients on the host that wait for a round.
        self._pending: list[Pending[G]] = []
        # Gradients that are being copied to the host.
        self._underway: list[Pending[G]] = []
        # Number of the newest round for which the rank has been ready.
        self._ready_for = -1
        # Number of rounds that must have ended before the rank continues.
        self._held_until = 0
        # Number of the newest round for which the rank has announced that it is ready.
        self._announced = -1
        self.clock = 0
        self.taken = 0
        self.waiting: WaitReason | None = None
        self.done = False

    def offer(
        self, gradient: G | None, samples: int = 0, *, ends_step: bool = True, on_host: bool = True
    ) -> WaitReason | None:
        """Add a gradient of the rank for a round; return why the rank must wait, or None.

        Args:
            gradient: the new gradient, or None if a step has ended without a gradient.
            samples: number of samples from which the gradient was computed.
            ends_step: True for the first of a step's gradients, so that the step counts once.
            on_host: the gradient is on the host; else it is being copied there, see `arrived`.
        """
        self.clock += ends_step
        if gradient is not None:
            (self._pending if on_host else self._underway).append((self.taken, samples, gradient))
        self.waiting = self.wait_reason()
        if on_host:
            self._update_ready(self.taken if gradient is not None else None)
        return self.waiting

    def arrived(self) -> None:
        """Record that the oldest gradient that was being copied to the host has arrived there."""
        arrived = self._underway.pop(0)
        self._pending.append(arrived)
        self._update_ready(arrived[0])

    def take(self) -> None:
        """Record that all rounds that have ended are applied to the rank's parameters."""
        self.taken = self._progress.rounds_done

    def finish(self) -> None:
        """Record that the rank has no more steps.

        The caller must first wait until no gradient is being copied to the host (the CPU).
        """
        self.done = True
        self._ready_for = self._progress.rounds_done + self._progress.reducing

    @property
    def underway(self) -> int:
        """Number of gradients that are being copied to the host."""
        return len(self._underway)

    @property
    def reported_clock(self) -> int:
        """Number of completed steps whose gradients are on the host.

        Each round distributes this number to all ranks.
        """
        return self.clock - len(self._underway)

    @property
    def overfull(self) -> bool:
        """True if so many gradients are pending that the rank calls a round and waits for it."""
        return len(self._pending) > MOST_PENDING

    @property
    def slowest(self) -> list[int]:
        """The slowest of the other ranks that have steps left, according to the last round."""
        clocks = self._others()
        fewest = min(clocks.values(), default=0)
        return [rank for rank, clock in clocks.items() if clock == fewest]

    @property
    def ahead(self) -> int:
        """Number of steps that the rank is ahead of the slowest other rank that has steps left."""
        return self.clock - min(self._others().values(), default=self.clock)

    def wait_reason(self) -> WaitReason | None:
        """Return the reason why the rank must wait before its next step; None if it need not.

        `Drift` describes the rules.
        """
        progress, clock = self._progress, self.clock
        if len(self._pending) > MOST_PENDING or progress.rounds_done < self._held_until:
            return _PENDING
        if self._waits and progress.rounds_done < clock:
            return _ROUNDS
        # One gradient may be copied while the device computes the next gradient.
        if len(self._underway) > 1:
            return _COPYING
        if self._lead is None:
            return None
        least, whose, second = progress.least
        others = second if whose == self._rank else least
        return _LEAD if clock - others > self._lead else None

    def announce(self) -> RoundAction:
        """Return what this rank must announce to the others; `READY` at most once for each round.

        Callers call this after each event, such as `offer`. While a round is reduced, the result is
        `NOTHING`, so callers call this again when that round has ended.
        """
        progress = self._progress
        if progress.reducing:
            return RoundAction.NOTHING
        if len(self._pending) > MOST_PENDING:
            return RoundAction.CALL
        number = progress.rounds_done
        if self._ready_for != number or self._announced == number:
            return RoundAction.NOTHING
        self._announced = number
        if progress.drawn is not None:
            return RoundAction.CALL if self._rank in progress.drawn else RoundAction.NOTHING
        return RoundAction.READY if progress.counted else RoundAction.CALL

    def contribute(self, tally: RoundCounts) -> list[Pending[G]]:
        """Return the gradients that the rank contributes to a round, and count them in `tally`.

        Afterwards no gradient of the rank is pending. Gradients that are too old are dropped; see
        `Drift` for the bound.
        """
        fresh, self._pending = self._pending, []
        number, ages, last = self._progress.rounds_done, tally.ages, len(tally.ages) - 1
        if len(fresh) > MOST_PENDING:
            self._held_until = number + 1
        # A gradient is contributed only if at least this many rounds had been applied to the
        # parameters with which it was computed.
        least = number - self._oldest
        if self._keeps_newest and fresh:
            least = min(least, fresh[-1][0])
        stale = False
        for born, samples, _ in fresh:
            if born >= least:
                age = number - born
                ages[age if age < last else last] += 1
            else:
                tally.dropped += samples
                stale = True
        if stale:
            fresh = [entry for entry in fresh if entry[0] >= least]
        if fresh:
            tally.contributors += 1
        return fresh

    def _others(self) -> dict[int, int]:
        clocks, working = self._progress.clocks, self._progress.working
        return {rank: clocks[rank] for rank in working if rank != self._rank}

    def _update_ready(self, born: int | None) -> None:
        """Mark the rank as ready if it may call the next round, or counts in that round's quorum.

        `born` is the number of rounds that were applied to the parameters with which the newest
        gradient was computed; None: the step had no gradient.
        """
        reducing = self._progress.reducing
        if reducing and not self._leftovers and self.waiting is None:
            return
        number = self._progress.rounds_done + reducing
        if self._paced and self.reported_clock <= number:
            return
        if born is None or self._keeps_newest or number - born <= self._oldest:
            self._ready_for = number
