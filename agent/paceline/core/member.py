"""One rank in the rounds of a partial all-reduce; `paceline.core.rounds` says how it is driven."""

from __future__ import annotations

from enum import Enum, auto
from typing import Generic, TypeVar

from paceline.core.rounds import Drift, Progress
from paceline.wire import MOST_PENDING

G = TypeVar("G")
Pending = tuple[int, int, G]  # rounds that it was computed with, samples, gradient


class Says(Enum):
    """What a member tells the others before a round."""

    NOTHING = auto()
    READY = auto()  # to be counted; `Progress.enough` says if the count calls the round
    CALL = auto()  # calls the round


class Tally:
    """What goes into a round: of one member, or of several that are counted together.

    Attributes:
        contributors: members with a gradient in the round.
        ages: gradients by how many rounds old they are; the last bin: or older, [`Drift.bins`].
        dropped: samples of gradients that were too old.
    """

    __slots__ = ("ages", "contributors", "dropped")

    def __init__(self, drift: Drift) -> None:
        self.contributors = 0
        self.ages = [0] * drift.bins
        self.dropped = 0


class Member(Generic[G]):
    """One rank in the rounds of a segment.

    Attributes:
        clock: steps that are through.
        taken: rounds that are in the rank's parameters.
        waiting: the rank waits for the others. `offer` sets it; the driver ends it where
            `must_wait` allows that.
        done: no more steps come.
    """

    __slots__ = (
        "_announced",
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

    def __init__(self, rank: int, progress: Progress) -> None:
        self._rank, self._progress = rank, progress
        drift = progress.drift
        self._oldest, self._lead = drift.oldest, drift.lead
        self._waits, self._paced = drift.waits, drift.paced
        self._leftovers = progress.call.leftovers
        self._pending: list[Pending[G]] = []  # gradients that wait for a round,
        self._underway: list[Pending[G]] = []  # and those on their way to the host
        self._ready_for = -1  # the newest round that the rank has been ready for,
        self._announced = -1  # and for which it has said so
        self.clock = 0
        self.taken = 0
        self.waiting = False
        self.done = False

    def offer(
        self, gradient: G | None, samples: int = 0, *, ends_step: bool = True, on_host: bool = True
    ) -> bool:
        """A gradient is to go into a round; None: a step is through that has none.

        Args:
            gradient: what the rank computed.
            samples: that it is of.
            ends_step: it is the first of its step.
            on_host: else it is still on its way there; see `arrived`.

        Returns:
            whether the rank shall wait for the others before its next step.
        """
        self.clock += ends_step
        if gradient is not None:
            (self._pending if on_host else self._underway).append((self.taken, samples, gradient))
        self.waiting = self.must_wait()
        if on_host:
            self._look(self.taken if gradient is not None else None)
        return self.waiting

    def arrived(self) -> None:
        """The oldest gradient on its way to the host is there."""
        arrived = self._underway.pop(0)
        self._pending.append(arrived)
        self._look(arrived[0])

    def take(self) -> None:
        """The rank applies all rounds that are over."""
        self.taken = self._progress.rounds_done

    def through(self) -> None:
        """No more steps come of this rank. Nothing may be on its way to the host."""
        self.done = True
        self._ready_for = self._progress.rounds_done + self._progress.reducing

    @property
    def underway(self) -> int:
        """Gradients that are on their way to the host."""
        return len(self._underway)

    @property
    def told_clock(self) -> int:
        """Steps that are through and whose gradients are on the host: what a round tells."""
        return self.clock - len(self._underway)

    @property
    def overfull(self) -> bool:
        """Whether so many gradients wait that the rank calls a round itself, and waits for it."""
        return len(self._pending) > MOST_PENDING

    @property
    def ahead(self) -> int:
        """Steps that the rank is ahead of the slowest other one that is still at work."""
        clocks, working = self._progress.clocks, self._progress.working
        others = [clocks[rank] for rank in working if rank != self._rank]
        return self.clock - min(others, default=self.clock)

    def must_wait(self) -> bool:
        """Whether the rank shall wait for the others before its next step; see `Drift`."""
        progress, clock = self._progress, self.clock
        if len(self._pending) > MOST_PENDING or (self._waits and progress.rounds_done < clock):
            return True
        if len(self._underway) > 1:  # the device computes one step beside the copy of another
            return True
        if self._lead is None:
            return False
        least, whose, second = progress.least
        return clock - (second if whose == self._rank else least) > self._lead

    def announce(self) -> Says:
        """What the rank tells the others now, if anything; that it is ready, once for each round.

        To be asked after each event, and again when a round is over if there was one meanwhile.
        """
        progress = self._progress
        if progress.reducing:
            return Says.NOTHING
        if len(self._pending) > MOST_PENDING:
            return Says.CALL
        number = progress.rounds_done
        if self._ready_for != number or self._announced == number:
            return Says.NOTHING
        self._announced = number
        if progress.drawn is not None:
            return Says.CALL if self._rank in progress.drawn else Says.NOTHING
        return Says.READY if progress.counted else Says.CALL

    def contribute(self, tally: Tally) -> list[Pending[G]]:
        """What the rank gives to the round that was called; nothing is pending afterwards.

        Args:
            tally: is added to.

        Returns:
            the gradients that go in: not those that are too old.
        """
        fresh, self._pending = self._pending, []
        number, ages, last = self._progress.rounds_done, tally.ages, len(tally.ages) - 1
        stale = False
        for born, samples, _ in fresh:
            age = number - born
            if age <= self._oldest:
                ages[age if age < last else last] += 1
            else:
                tally.dropped += samples
                stale = True
        if stale:
            fresh = [entry for entry in fresh if number - entry[0] <= self._oldest]
        if fresh:
            tally.contributors += 1
        return fresh

    def _look(self, born: int | None) -> None:
        """Whether the next round would be of use to this rank, or need not wait for it.

        Args:
            born: rounds that its newest gradient was computed with; None: its step had none.
        """
        reducing = self._progress.reducing
        if reducing and not (self._leftovers or self.waiting):
            return
        number = self._progress.rounds_done + reducing
        if self._paced and self.told_clock <= number:
            return
        if born is None or number - born <= self._oldest:
            self._ready_for = number
