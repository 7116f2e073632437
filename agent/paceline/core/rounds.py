"""The round protocol of a partial all-reduce, as state machines without I/O, threads or a clock.

A round reduces the gradients of the ranks that are ready; the others compute on. Ranks' threads
(`paceline.train.sync.rounds`) and the simulator drive the same three classes:

- `Call` and `Drift` are a synchroniser's rules: who calls a round, and how far ranks drift apart.
- `Progress` holds what the rounds so far told all ranks. A real rank has its own; in a simulation
  all ranks share one object.
- `Member` is one rank: what it has pending, whether it is ready, and whether it must wait.

A driver reports events (`offer`, `through`, `take`) and acts on the answers::

    if member.offer(gradient, samples): ...      # wait until `must_wait` says no
    match member.announce():
        case Says.CALL: ...                      # call round `progress.over`
        case Says.READY: ...                     # count this rank, then ask `progress.enough`
    # When the round is called, each member contributes, and when it is over, all learn the same:
    gradients = member.contribute(tally)
    progress.begin()
    progress.end(clocks, through)
    says = member.announce()                     # of members with events since `begin`

The protocol knows of no number of steps. Each rank says by `through` when no more steps come, so
ranks may make different numbers of them.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from msgspec import UNSET

from paceline.wire import AGES, MOST_WAITING
from paceline.wire.synchronisation import RoundRules

_NEVER = 2**62  # rounds or steps: a bound that nothing reaches

G = TypeVar("G")
Pending = tuple[int, int, G]  # rounds that it was computed with, samples, gradient


@dataclass(frozen=True)
class Drift:
    """How far ranks may drift apart. A rank waits only for ranks that have done fewer steps.

    So no rank waits for another one that itself waits elsewhere: for its next segment, or in the
    script's own collective.

    Args:
        staleness: rounds after which a gradient is dropped; None: never.
        lead: steps that a rank may be ahead of the slowest; None: any.
        mean: gradients of a rank that waited for the same round count as one, the newest most
            (RNA, Sec. 3.3); else as their sum.
        waits: after its k-th step a rank waits until k rounds are over.
        paced: only ranks that are through with k steps call the k-th round.
    """

    staleness: int | None = 4
    lead: int | None = None
    mean: bool = True
    waits: bool = False
    paced: bool = False

    @staticmethod
    def of(rules: RoundRules) -> Drift:
        """As a synchroniser's rules say."""
        return Drift(rules.staleness, rules.lead, rules.mean, rules.waits, rules.paced)

    @property
    def oldest(self) -> int:
        """The age in rounds up to which a gradient goes into a round."""
        return _NEVER if self.staleness is None else self.staleness

    @property
    def bins(self) -> int:
        """How many ages a round tells apart; the last bin is for gradients that old or older."""
        return AGES if self.staleness is None else min(self.staleness + 1, AGES)

    def weights(self, born: Sequence[int]) -> list[float]:
        """The factors of a rank's gradients in its contribution to a round.

        Args:
            born: rounds that each of them was computed with.
        """
        if not self.mean:
            return [1.0] * len(born)
        weights = [rounds - min(born) + 1 for rounds in born]
        return [weight / sum(weights) for weight in weights]


@dataclass(frozen=True)
class Call:
    """Who calls a round: as many ready ranks as a quorum, or any ready one of a few drawn ranks.

    Args:
        quorum: ranks that must be ready (n-soft's M/n; all but b backup workers). At most as many
            as are still at work are needed.
        probes: instead of a quorum, ranks that are drawn for each round, of which the first ready
            one calls it (RNA, Sec. 3.2). 1 is eager-SGD's majority, the world its solo.
        seed: of the draws; all ranks draw alike.
    """

    quorum: int = 1
    probes: int | None = None
    seed: int = 0

    @staticmethod
    def of(rules: RoundRules, world: int, seed: int) -> Call:
        """As a synchroniser's rules say.

        Args:
            rules: the synchroniser's.
            world: ranks that take part.
            seed: of the draws.
        """
        if rules.probes is not UNSET:
            return Call(1, rules.probes or world, seed)
        return Call(rules.ready(world))

    @property
    def leftovers(self) -> bool:
        """Whether a gradient that misses a round makes its rank ready for the next one.

        Not with probes: a probed rank is ready when it ends a step, as in RNA's Fig. 10. Otherwise
        rounds would run back to back where ranks end their steps at about the same time. The
        gradient goes along with the rank's next one, or with a round that another rank calls.
        """
        return self.probes is None

    def drawn(self, number: int, working: list[int]) -> frozenset[int] | None:
        """The ranks that call a round as soon as they are ready; None: any rank may.

        Args:
            number: of the round.
            working: ranks that were not through after the round before.
        """
        if self.probes is None or self.probes >= len(working):
            return None
        draw = random.Random(f"{self.seed} {number}")
        return frozenset(draw.sample(working, self.probes))


class Progress:
    """What the rounds so far told, the same on all ranks.

    Attributes:
        over: rounds that are over; also the number of the round to come or under way.
        reducing: the round has been called and is not over.
        clocks: steps that each rank is through with, as the last round told, [W].
        working: ranks that were not through with all their steps then.
        drawn: the ranks of which the first ready one calls the next round; None: any may.
        least: the least clock of ranks at work, whose it is (-1: several ranks'), the next least.
    """

    __slots__ = (
        "_call",
        "_drift",
        "_needed",
        "clocks",
        "drawn",
        "least",
        "over",
        "reducing",
        "working",
    )

    def __init__(self, world: int, call: Call, drift: Drift) -> None:
        self._call, self._drift = call, drift
        self.over = 0
        self.reducing = False
        self.clocks = [0] * world
        self.working = list(range(world))
        self.least = self._find_least()
        self._next_call()

    @property
    def call(self) -> Call:
        """Who calls rounds."""
        return self._call

    @property
    def drift(self) -> Drift:
        """How far ranks may drift apart."""
        return self._drift

    def enough(self, ready: int) -> bool:
        """Whether so many ready ranks call the next round."""
        return ready >= self._needed

    @property
    def counted(self) -> bool:
        """Whether several ranks must be ready for the next round, so somebody counts them."""
        return self._needed > 1

    def begin(self) -> None:
        """The round is called: members contribute now."""
        self.reducing = True

    def end(self, clocks: list[int], through: Collection[int]) -> bool:
        """The round is over, and has told these facts; whether they free members that wait.

        Members that wait because they are overfull are freed by their own contribution instead.

        Args:
            clocks: steps that each rank was through with as it contributed, [W].
            through: ranks that had no more steps then.
        """
        self.over += 1
        self.reducing = False
        self.clocks = clocks
        if through:
            self.working = [rank for rank in self.working if rank not in through]
        self._next_call()
        if self._drift.lead is None:
            return self._drift.waits
        before, self.least = self.least, self._find_least()
        return self._drift.waits or self.least != before

    def _next_call(self) -> None:
        self.drawn = self._call.drawn(self.over, self.working)
        self._needed = min(self._call.quorum, len(self.working))

    def _find_least(self) -> tuple[int, int, int]:
        if len(self.working) == len(self.clocks):
            at_work = self.clocks.copy()
        else:
            at_work = [self.clocks[rank] for rank in self.working]
        if not at_work:
            return _NEVER, -1, _NEVER
        least = min(at_work)
        if at_work.count(least) > 1:
            return least, -1, least
        at = at_work.index(least)
        at_work[at] = _NEVER
        return least, self.working[at], min(at_work)


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
        self.taken = self._progress.over

    def through(self) -> None:
        """No more steps come of this rank. Nothing may be on its way to the host."""
        self.done = True
        self._ready_for = self._progress.over + self._progress.reducing

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
        return len(self._pending) > MOST_WAITING

    @property
    def ahead(self) -> int:
        """Steps that the rank is ahead of the slowest other one that is still at work."""
        clocks, working = self._progress.clocks, self._progress.working
        others = [clocks[rank] for rank in working if rank != self._rank]
        return self.clock - min(others, default=self.clock)

    def must_wait(self) -> bool:
        """Whether the rank shall wait for the others before its next step; see `Drift`."""
        progress, clock = self._progress, self.clock
        if len(self._pending) > MOST_WAITING or (self._waits and progress.over < clock):
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
        if len(self._pending) > MOST_WAITING:
            return Says.CALL
        number = progress.over
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
        number, ages, last = self._progress.over, tally.ages, len(tally.ages) - 1
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
        number = self._progress.over + reducing
        if self._paced and self.told_clock <= number:
            return
        if born is None or number - born <= self._oldest:
            self._ready_for = number
