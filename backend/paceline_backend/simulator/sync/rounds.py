"""Rounds of a partial all-reduce on the virtual clock: RNA, eager-SGD, n-soft, SSP, backup workers.

Event by event what `paceline.train.sync.rounds` does on real ranks, with the same draws.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

import numpy as np
from msgspec import UNSET

from paceline.wire import AGES, MOST_WAITING
from paceline.wire.synchronisation import RoundRules
from paceline_backend.policies.base import Floats, Ints
from paceline_backend.simulator.sync.base import Costs, Course, Round, Work
from paceline_backend.simulator.sync.stealing import Stealing

_NEVER = 2**62  # steps: the clock of a rank that nobody waits for


@dataclass(frozen=True)
class Call:
    """Who calls a round: the first ready of some ranks drawn at random, or so many being ready.

    Args:
        quorum: ranks that must be ready, at most all that are at work; of the drawn ones, if any.
        probes: ranks that are drawn for each round; None: any rank counts.
        seed: of the draws.
    """

    quorum: int
    probes: int | None = None
    seed: int = 0

    @staticmethod
    def of(rules: RoundRules, world: int, seed: int) -> Call:
        """As a synchroniser's rules say."""
        if rules.probes is not UNSET:
            return Call(1, rules.probes or world, seed)
        return Call(rules.ready(world))

    @property
    def leftovers(self) -> bool:
        """Whether a gradient that came while a round was reduced makes ready for the next one."""
        return self.probes is None

    def drawn(self, number: int, working: list[int]) -> frozenset[int] | None:
        """The ranks of which one must be ready for a round; None: any."""
        if self.probes is None or self.probes >= len(working):
            return None
        draw = random.Random(f"{self.seed} {number}")
        return frozenset(draw.sample(working, self.probes))


@dataclass(frozen=True)
class Limits:
    """How far ranks may drift apart; see `paceline.train.sync.rounds.Limits`."""

    staleness: int | None = 4
    lead: int | None = None
    waits: bool = False
    paced: bool = False

    @staticmethod
    def of(rules: RoundRules) -> Limits:
        """As a synchroniser's rules say."""
        return Limits(rules.staleness, rules.lead, rules.waits, rules.paced)

    def fresh(self, age: int) -> bool:
        """Whether a gradient so many rounds old goes into a round."""
        return self.staleness is None or age <= self.staleness


class Partial:
    """Each rank computes on while rounds reduce what is ready.

    Args:
        call: who calls a round.
        limits: how far ranks may drift apart.
        steals: a rank that is ahead takes over part of the slowest one's next batch.
    """

    goes_on = False

    def __init__(self, call: Call, limits: Limits, *, steals: bool = False) -> None:
        self._call, self._limits, self._steals = call, limits, steals

    def run(self, starts: Floats, work: Work) -> Course:
        """See `Synchroniser.run`."""
        if not len(work.work_s):
            return Course(work.work_s, work.work_s, work.work_s, [])
        stealing = None
        if self._steals and work.dealing is not None:
            stealing = Stealing(work.samples, work.dealing)
        segment = _Segment(self._call, self._limits, starts, work, stealing)
        segment.run()
        begun = np.concatenate([starts[None], segment.ended_at[:-1]])
        # Sums are rounded: not below 0 for that.
        work_s = segment.work_s
        wait_s = np.maximum(segment.ended_at - begun - work_s, 0.0)
        return Course(work_s, wait_s, np.zeros_like(wait_s), segment.rounds)

    def meet(self, starts: Floats, costs: Costs) -> float:
        """See `Synchroniser.meet`."""
        return float(starts.max())


class _Segment:
    """All ranks in one segment, from event to event."""

    def __init__(
        self, call: Call, limits: Limits, starts: Floats, work: Work, stealing: Stealing | None
    ) -> None:
        self._steps, world = work.work_s.shape
        self._stealing = stealing
        self.ended_at = np.zeros((self._steps, world))
        self.rounds: list[Round] = []
        self._call, self._limits, self._costs = call, limits, work.costs
        # Of each rank:
        self._work_s: list[list[float]] = work.work_s.T.tolist()
        self._samples: list[list[int]] = work.samples.T.tolist()
        self._clock: Ints = np.zeros(world, np.int64)  # steps that are through
        self._taken = [0] * world  # rounds that it had when it began its step
        self._pending: list[list[tuple[int, int]]] = [[] for _ in range(world)]  # taken, samples
        # Ranks:
        self._ready = set[int]()  # for the next round, which may be called for them,
        self._holding = set[int]()  # with something for it,
        self._full = set[int]()  # with so much that they call it themselves,
        self._blocked = set[int]()  # that wait for a round,
        self._freed = set[int]()  # of these, that need not after the one under way,
        self._through = set[int]()  # whose last step is through since the last call,
        self._leaving = set[int]()  # or before it
        self._working = list(range(world))  # not through, as the last round told
        self._at_work = np.ones(world, bool)
        self._called = 0  # rounds,
        self._over = 0  # and those that are over
        self._drawn = call.drawn(0, self._working)
        self._told = self._seen = self._clock.copy()  # clocks at the last call, of the last round
        self._least = _least(self._told)
        self._given = (0, [0], 0)  # contributors, ages and samples dropped in the last call
        # What is under way: a call (known to all then), or a round.
        self._reducing = False
        self._until = math.inf
        self._called_at = 0.0
        self._waited_since = float(starts[0])  # rank 0, for a round
        # When ranks will have computed their steps.
        self._computed = [
            (start + self._work_s[rank][0], rank) for rank, start in enumerate(starts.tolist())
        ]
        heapq.heapify(self._computed)

    def run(self) -> None:
        """From the first step until all have met."""
        now = 0.0
        while self._working:
            now = min(self._computed[0][0] if self._computed else math.inf, self._until)
            assert now < math.inf, "ranks wait for each other"
            # All that happens at one moment comes before whether a round is due then.
            while self._computed and self._computed[0][0] <= now:
                self._offer(heapq.heappop(self._computed)[1], now)
            if self._until <= now:
                if self._reducing:
                    self._end(now)
                else:
                    self._take(now)
            if self._until == math.inf and self._due():
                self._until = now + self._costs.call_s
        self.ended_at[-1] = now

    @property
    def work_s(self) -> Floats:
        """What each step took each rank, [S, W]."""
        return np.array(self._work_s).T

    def _offer(self, rank: int, now: float) -> None:
        """A rank has computed a step."""
        samples, born = self._samples[rank][self._clock[rank]], self._taken[rank]
        self._clock[rank] += 1
        if samples:
            pending = self._pending[rank]
            pending.append((born, samples))
            self._holding.add(rank)
            if len(pending) > MOST_WAITING:
                self._full.add(rank)
        waits = self._waits(rank)
        if self._offers(rank, waits) and (not samples or self._limits.fresh(self._called - born)):
            self._ready.add(rank)
        if waits:
            self._blocked.add(rank)
        else:
            self._go_on(rank, now)

    def _offers(self, rank: int, waits: bool) -> bool:
        """Whether a rank that is through with a step may be ready for the next round."""
        if self._limits.paced and self._clock[rank] <= self._called:
            return False
        return waits or self._call.leftovers or not self._reducing

    def _waits(self, rank: int) -> bool:
        """Whether a rank shall wait for the others."""
        limits, clock = self._limits, self._clock[rank]
        if rank in self._full or (limits.waits and self._over < clock):
            return True
        if limits.lead is None:
            return False
        least, whose, second = self._least
        return bool(clock - (second if rank == whose else least) > limits.lead)

    def _go_on(self, rank: int, now: float) -> None:
        """To its next step, with the rounds that are over."""
        clock = int(self._clock[rank])
        self.ended_at[clock - 1, rank] = now
        if clock < self._steps:
            self._taken[rank] = self._over
            if self._stealing is not None:
                other = self._stealing.work_s(rank, clock, self._seen)
                if other is not None:
                    self._work_s[rank][clock], self._samples[rank][clock] = other
            heapq.heappush(self._computed, (now + self._work_s[rank][clock], rank))
        else:
            self._through.add(rank)
            self._ready.add(rank)

    def _due(self) -> bool:
        """Whether the next round is called."""
        if self._full:
            return True
        if self._drawn is not None:
            return not self._drawn.isdisjoint(self._ready)
        return len(self._ready) >= min(self._call.quorum, len(self._working))

    def _take(self, now: float) -> None:
        """A round is called: it takes what is there."""
        number, limits = self._called, self._limits
        bins = AGES if limits.staleness is None else min(limits.staleness + 1, AGES)
        ages = [0] * bins
        contributors = dropped = 0
        for rank in self._holding:
            gives = False
            for born, samples in self._pending[rank]:
                age = number - born
                if limits.fresh(age):
                    ages[min(age, bins - 1)] += 1
                    gives = True
                else:
                    dropped += samples
            contributors += gives
            self._pending[rank].clear()
        self._given = (contributors, ages, dropped)
        self._freed = self._full
        self._leaving, self._through = self._through, set()
        self._ready, self._holding, self._full = set(), set(), set()
        if limits.lead is not None or self._stealing is not None:
            self._told = self._clock.copy()
        self._called += 1
        self._called_at, self._until, self._reducing = now, now + self._costs.round_s, True

    def _end(self, now: float) -> None:
        """A round is over: all ranks have its sum."""
        contributors, ages, dropped = self._given
        self.rounds.append(
            Round(
                number=self._over,
                step=min(int(self._clock[0]) - (0 in self._blocked), self._steps - 1),
                contributors=contributors,
                staleness=ages,
                dropped=dropped,
                waited_s=self._called_at - self._waited_since,
                reduced_s=now - self._called_at,
                bytes=self._costs.bytes,
                ended_at=now,
            )
        )
        self._over += 1
        self._until, self._reducing, self._waited_since = math.inf, False, now
        self._seen, before = self._told, self._least
        if self._leaving:
            self._working = [rank for rank in self._working if rank not in self._leaving]
            self._at_work[list(self._leaving)] = False
            self._leaving = set()
        if self._limits.lead is not None:
            self._least = _least(np.where(self._at_work, self._told, _NEVER))
        self._drawn = self._call.drawn(self._called, self._working)
        # With many ranks that wait for the slowest, it is not asked of each after each round.
        may_go = self._blocked if self._limits.waits or self._least != before else self._freed
        for rank in [rank for rank in may_go if rank in self._blocked and not self._waits(rank)]:
            self._blocked.remove(rank)
            self._go_on(rank, now)


def _least(clocks: Ints) -> tuple[int, int, int]:
    """The least clock, whose it is (-1: of several ranks), and that of the others, [W]."""
    if len(clocks) == 1:
        return int(clocks[0]), 0, _NEVER
    least, second = np.partition(clocks, 1)[:2].tolist()
    return (least, int(clocks.argmin()), second) if second > least else (least, -1, least)
