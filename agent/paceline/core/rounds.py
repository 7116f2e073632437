"""The rules of the rounds of a partial all-reduce, and the state that all ranks share.

A round reduces the gradients of the ranks that are ready; the others continue to compute. The
protocol is a state machine without I/O, threads or a clock. Ranks' threads
(`paceline.train.sync.rounds`) and the simulator (`paceline_backend.simulator.sync.rounds`) drive
the same classes:

- `Call` and `Drift` are the rules of a synchronisation: which rank calls a round, and how far ranks
  drift apart.
- `RoundProgress` holds the state that the rounds so far have distributed to all ranks. A real rank
  has its own `RoundProgress`; in a simulation all ranks share one.
- `paceline.core.member.Member` is one rank: its pending gradients, whether it is ready, and why it
  must wait.

The caller reports events (`offer`, `finish`, `take`) and acts on the answers::

    if member.offer(gradient, samples): ...      # wait until `wait_reason` returns None
    match member.announce():
        case RoundAction.CALL: ...               # call round `progress.rounds_done`
        case RoundAction.READY: ...              # count this rank, call `progress.enough`
    # Once the round is called, each member contributes. The round's end gives all ranks one state:
    gradients = member.contribute(tally)
    progress.begin()
    progress.end(clocks, finished)
    action = member.announce()                   # of each member that had events since `begin`

The protocol has no fixed number of steps. Each rank calls `Member.finish` when it has no more
steps, so ranks may make different numbers of steps.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from msgspec import UNSET

from paceline.wire import AGES
from paceline.wire.synchronisation import RoundRules

# A number of rounds or steps that no run reaches.
_NEVER = 2**62


@dataclass(frozen=True)
class Drift:
    """The bounds on how far ranks may drift apart.

    A rank waits only for ranks that have done fewer steps. No deadlock is possible. The
    rank with fewer steps may itself wait for others, at the segment's end or in a collective of the
    script, but a rank with more steps has already passed that point.

    A rank's newest gradient goes into the round, however old it is, so that the work of a
    permanently slow rank counts. If several gradients of a rank wait for the same round, those
    other than the newest are dropped if they are older than `staleness` (RNA, Sec. 3.3: "overwrite
    the stale data and only keep results within the bound"). With a `staleness` of 0, a gradient
    that is too old is dropped even if it is the newest.

    Args:
        staleness: number of rounds after which a gradient is dropped (see above); None: never.
        lead: maximum number of steps that a rank may be ahead of the slowest rank; None: no limit.
        mean: True: a rank that has several gradients pending for a round contributes their mean, in
            which newer gradients have more weight; see `weights`. False: it contributes their sum.
        waits: True: after its k-th step a rank waits until k rounds have ended.
        paced: True: only ranks that have completed k steps call the k-th round.
    """

    staleness: int | None = 4
    lead: int | None = None
    mean: bool = True
    waits: bool = False
    paced: bool = False

    @staticmethod
    def of(rules: RoundRules) -> Drift:
        """Return the bounds on drift that a synchronisation's parameters describe."""
        return Drift(rules.staleness, rules.lead, rules.mean, rules.waits, rules.paced)

    @property
    def oldest(self) -> int:
        """Maximum age, in rounds, of a gradient that goes into a round."""
        return _NEVER if self.staleness is None else self.staleness

    @property
    def keeps_newest(self) -> bool:
        """True if a rank's newest gradient goes into the round even if it is too old."""
        return self.staleness != 0

    @property
    def bins(self) -> int:
        """Number of ages that a round distinguishes. The last bin also counts all higher ages."""
        return AGES if self.staleness is None else min(self.staleness + 1, AGES)

    def weights(self, count: int) -> list[float]:
        """Return the weights of a rank's gradients in its contribution to a round, oldest first.

        With `mean`, they are those of RNA, Sec. 3.3: Σ (t − (k − τ) + 1) g_t / Σ (t − (k − τ) + 1).
        There, t is the rank's own iteration that computed the gradient, and k − τ is the iteration
        of the oldest gradient. An iteration computes one gradient, so the weights are in proportion
        to 1, 2, …, `count`, however many rounds ended in between.
        """
        if not self.mean:
            return [1.0] * count
        total = count * (count + 1) / 2
        return [number / total for number in range(1, count + 1)]


@dataclass(frozen=True)
class Call:
    """The rule for who calls a round: a quorum of ready ranks, or one of a few drawn ranks.

    Args:
        quorum: number of ranks that must be ready before a round is called: for M ranks, M/n with
            n-soft, and M − b with b backup workers. When fewer ranks have steps left, all of those
            must be ready.
        probes: number of ranks drawn for each round, instead of a quorum. The first of them to be
            ready calls the round (RNA, Sec. 3.2). With 1, this is eager-SGD's majority all-reduce;
            with the world size, it is eager-SGD's solo all-reduce.
        seed: seed of the draws. All ranks have the same seed, so all draw the same ranks.
    """

    quorum: int = 1
    probes: int | None = None
    seed: int = 0

    @staticmethod
    def of(rules: RoundRules, world: int, seed: int) -> Call:
        """Return the rule for calling rounds that a synchronisation's parameters describe."""
        if rules.probes is not UNSET:
            return Call(1, rules.probes or world, seed)
        return Call(rules.ready(world))

    @property
    def leftovers(self) -> bool:
        """True if a gradient that misses a round makes its rank ready for the next one.

        With probes this is False: a probed rank is ready when it ends a step, as in RNA's Fig. 10.
        If it were True, rounds would run back to back whenever ranks end their steps at about the
        same time. The gradient still goes into the next round, whichever rank calls that round.
        """
        return self.probes is None

    def drawn(self, number: int, working: list[int]) -> frozenset[int] | None:
        """Return the ranks drawn for a round; the first of them to be ready calls the round.

        Return None if any rank may call the round. `working` are the ranks that had steps left when
        the previous round ended.
        """
        if self.probes is None or self.probes >= len(working):
            return None
        draw = random.Random(f"{self.seed} {number}")
        return frozenset(draw.sample(working, self.probes))


class RoundProgress:
    """The state that the rounds so far have distributed, the same on all ranks.

    Attributes:
        rounds_done: number of rounds that have ended; also the index of the current or next round.
        reducing: True while a round that has been called has not ended.
        clocks: number of steps that each rank had completed, according to the last round.
        working: ranks that had steps left, according to the last round.
        drawn: the ranks drawn for the next round; the first of them to be ready calls the round.
            None: any rank may call it.
        least: a triple: the fewest completed steps of any rank in `working`, that rank (-1: there
            are several), and the fewest completed steps of the other ranks in `working`.
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
        """The rule that calls rounds."""
        return self._call

    @property
    def drift(self) -> Drift:
        """The bounds on the ranks' drift."""
        return self._drift

    def enough(self, ready: int) -> bool:
        """Return True if this many ready ranks are enough to call the next round."""
        return ready >= self._needed

    @property
    def counted(self) -> bool:
        """True if the next round needs several ready ranks, so that they must be counted."""
        return self._needed > 1

    def begin(self) -> None:
        """Record that a rank has started the round, to which members now contribute."""
        self.reducing = True

    def end(self, clocks: list[int], finished: Collection[int]) -> bool:
        """Record the end of a round; return True if members that wait may now continue.

        The round has distributed `clocks`, the number of steps that each rank had completed when it
        contributed, and `finished`, the ranks that had no more steps then. The result does not
        consider members that wait because they have too many pending gradients (`overfull`): such
        a member continues after a round to which it contributed, whatever the result is.
        """
        self.rounds_done += 1
        self.reducing = False
        self.clocks = clocks
        if finished:
            self.working = [rank for rank in self.working if rank not in finished]
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
