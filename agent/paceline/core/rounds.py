"""The rounds of a partial all-reduce: their rules, and what they have told all ranks so far.

A round reduces the gradients of the ranks that are ready; the others compute on. The protocol is a
state machine without I/O, threads or a clock. Ranks' threads (`paceline.train.sync.rounds`) and the
simulator (`paceline_backend.simulator.sync.rounds`) drive the same classes:

- `Call` and `Drift` are a synchroniser's rules: who calls a round, and how far ranks drift apart.
- `Progress` holds what the rounds so far have told all ranks. A real rank has its own `Progress`;
  in a simulation all ranks share one.
- `paceline.core.member.Member` is one rank: what it has pending, whether it is ready, and why it
  must wait.

A driver reports events (`offer`, `through`, `take`) and acts on the answers::

    if member.offer(gradient, samples): ...      # wait until `wait_reason` gives None
    match member.announce():
        case Says.CALL: ...                      # call round `progress.rounds_done`
        case Says.READY: ...                     # count this rank, then ask `progress.enough`
    # Once the round is called, each member contributes. Its end tells all members the same:
    gradients = member.contribute(tally)
    progress.begin()
    progress.end(clocks, through)
    says = member.announce()                     # of members with events since `begin`

The protocol knows of no number of steps. Each rank says by `through` that it has no more steps, so
ranks may make different numbers of steps.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from paceline.wire import AGES
from paceline.wire.synchronisation import RoundRules

_NEVER = 2**62  # rounds or steps: a bound that nothing reaches


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
        rounds_done: rounds that are over; also the number of the round to come or under way.
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
        "rounds_done",
        "reducing",
        "working",
    )

    def __init__(self, world: int, call: Call, drift: Drift) -> None:
        self._call, self._drift = call, drift
        self.rounds_done = 0
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
        self.rounds_done += 1
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
        self.drawn = self._call.drawn(self.rounds_done, self.working)
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
