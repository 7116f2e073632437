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
    """How far ranks may drift apart.

    A rank waits only for ranks that have done fewer steps. Those do not wait for it elsewhere,
    neither for the next segment nor in a collective of the script's own, because the rank has
    passed the points that they have reached.

    A rank's newest gradient goes into the round, however old it is: so the work of a rank that is
    slow for good counts. Of the gradients that wait for the same round, those that are older than
    `staleness` and than the newest are dropped (RNA, Sec. 3.3: "overwrite the stale data and only
    keep results within the bound"). With a `staleness` of 0, the newest may be dropped, too.

    Args:
        staleness: rounds after which a gradient is dropped; None: never.
        lead: steps that a rank may be ahead of the slowest rank; None: any number.
        mean: a rank that has several gradients pending for a round gives their mean, in which
            newer gradients weigh more (RNA, Sec. 3.3); else it gives their sum.
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
        """The drift that a synchroniser's rules allow."""
        return Drift(rules.staleness, rules.lead, rules.mean, rules.waits, rules.paced)

    @property
    def oldest(self) -> int:
        """The age in rounds up to which a gradient goes into a round."""
        return _NEVER if self.staleness is None else self.staleness

    @property
    def keeps_newest(self) -> bool:
        """Whether a rank's newest gradient goes into the round though it is too old."""
        return self.staleness != 0

    @property
    def bins(self) -> int:
        """How many ages a round tells apart. The last bin counts that age and all higher ages."""
        return AGES if self.staleness is None else min(self.staleness + 1, AGES)

    def weights(self, born: Sequence[int]) -> list[float]:
        """The factors of a rank's gradients in its contribution to a round.

        Args:
            born: how many rounds were in the parameters that each gradient was computed with.
        """
        if not self.mean:
            return [1.0] * len(born)
        weights = [rounds - min(born) + 1 for rounds in born]
        return [weight / sum(weights) for weight in weights]


@dataclass(frozen=True)
class Call:
    """Who calls a round: a quorum of ready ranks, or the first ready rank of a few drawn ones.

    Args:
        quorum: ranks that must be ready (n-soft's M/n; all but b backup workers). When fewer ranks
            are still at work, all of those must be ready.
        probes: how many ranks are drawn for each round, instead of a quorum. The first of them to
            be ready calls the round (RNA, Sec. 3.2). 1 is eager-SGD's majority, the world its solo.
        seed: of the draws. It is the same on all ranks, and so are the draws.
    """

    quorum: int = 1
    probes: int | None = None
    seed: int = 0

    @staticmethod
    def of(rules: RoundRules, world: int, seed: int) -> Call:
        """The call that a synchroniser's rules describe.

        Args:
            rules: of the synchroniser.
            world: ranks that take part.
            seed: of the draws.
        """
        if rules.probes is not UNSET:
            return Call(1, rules.probes or world, seed)
        return Call(rules.ready(world))

    @property
    def leftovers(self) -> bool:
        """Whether a gradient that misses a round makes its rank ready for the next one.

        With probes it does not: a probed rank is ready when it ends a step, as in RNA's Fig. 10.
        Otherwise rounds would run back to back where ranks end their steps at about the same time.
        The gradient goes into the next round, whoever calls that.
        """
        return self.probes is None

    def drawn(self, number: int, working: list[int]) -> frozenset[int] | None:
        """The ranks drawn for a round, any of which calls it once ready; None: any rank may.

        Args:
            number: of the round.
            working: ranks that had steps left when the previous round ended.
        """
        if self.probes is None or self.probes >= len(working):
            return None
        draw = random.Random(f"{self.seed} {number}")
        return frozenset(draw.sample(working, self.probes))


class Progress:
    """What the rounds so far have told, the same on all ranks.

    Attributes:
        rounds_done: rounds that are over; also the number of the round to come or under way.
        reducing: a round has been called and is not over.
        clocks: steps that each rank is through with, as the last round told, [W].
        working: ranks that had steps left, as the last round told: the ranks at work.
        drawn: the ranks of which the first ready one calls the next round; None: any rank may.
        least: the fewest steps of any rank at work, the rank that has them (-1: several ranks do),
            and the fewest steps of all other ranks at work.
    """

    __slots__ = (
        "_call",
        "_drift",
        "_needed",
        "clocks",
        "drawn",
        "least",
        "reducing",
        "rounds_done",
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
        """Whether this number of ready ranks calls the next round."""
        return ready >= self._needed

    @property
    def counted(self) -> bool:
        """Whether the next round needs several ready ranks, so that they must be counted."""
        return self._needed > 1

    def begin(self) -> None:
        """The round is called: members contribute now."""
        self.reducing = True

    def end(self, clocks: list[int], through: Collection[int]) -> bool:
        """The round is over, and has told all ranks these facts.

        Args:
            clocks: steps that each rank was through with when it contributed, [W].
            through: ranks that had no more steps then.

        Returns:
            whether the facts may free members that wait. Overfull members do not depend on them:
            the end of a round that they contributed to frees them.
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
