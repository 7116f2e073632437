"""Rounds of a partial all-reduce on the virtual clock: RNA, eager-SGD, n-soft, SSP, backup workers.

The protocol is that of real ranks, `paceline.core.rounds`. This module adds the clock: when ranks
have computed their steps, and how long calls and rounds take.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from paceline.core.member import Member, Says, Tally
from paceline.core.rounds import Call, Drift, Progress
from paceline_backend.policies.base import Floats
from paceline_backend.simulator.sync.base import Costs, Round, Timeline, Work


class Partial:
    """Each rank computes on while rounds reduce what is ready.

    Args:
        call: who calls a round.
        drift: how far ranks may drift apart.
    """

    goes_on = False

    def __init__(self, call: Call, drift: Drift) -> None:
        self._call, self._drift = call, drift

    def run(self, starts: Floats, work: Work) -> Timeline:
        """See `Synchroniser.run`."""
        if not len(work.work_s):
            return Timeline(work.work_s, work.work_s, work.work_s, [])
        work_s, samples = work.of_ranks(work.work_s), work.of_ranks(work.samples)
        segment = Segment(self._call, self._drift, work_s, samples, work.costs)
        segment.run(starts.tolist())
        ended_at = work.table(segment.ended_at)
        begun = np.concatenate([starts[None], ended_at[:-1]])
        wait_s = ended_at - begun - work.work_s
        if work.steps is not None:
            wait_s[~work.made] = 0.0
            rank = np.flatnonzero(work.steps)
            wait_s[work.steps[rank] - 1, rank] = 0.0
            busy_s = np.where(work.made, work.work_s, 0.0).sum(axis=0) + wait_s.sum(axis=0)
            wait_s[-1] += segment.met_at - starts - busy_s
        # Rounding of sums may make a wait slightly negative.
        wait_s = np.maximum(wait_s, 0.0)
        return Timeline(work.work_s, wait_s, np.zeros_like(wait_s), segment.rounds)

    def meet(self, starts: Floats, costs: Costs) -> float:
        """See `Synchroniser.meet`."""
        return float(starts.max())


class Segment:
    """All ranks in one segment, from event to event. Ranks may have different numbers of steps.

    Args:
        call: who calls a round.
        drift: how far ranks may drift apart.
        work_s: what each step takes each rank, [W][its steps].
        samples: of each step and rank, [W][its steps].
        costs: of exchanges.
    """

    def __init__(
        self,
        call: Call,
        drift: Drift,
        work_s: list[list[float]],
        samples: list[list[int]],
        costs: Costs,
    ) -> None:
        world = len(work_s)
        self.ended_at: list[list[float]] = [[] for _ in range(world)]  # [W][its steps]
        self.met_at = 0.0  # when all ranks have met
        self.rounds: list[Round] = []
        self._work_s, self._samples = work_s, samples
        self._costs = costs
        self._progress = Progress(world, call, drift)
        self._members = [Member[int](rank, self._progress) for rank in range(world)]
        self._clocks = [0] * world
        self._drift = drift
        self._holding: list[int] = []  # ranks that have offered something for the next round
        self._full = set[int]()  # overfull ranks, whose gradients no round has taken yet
        self._freed = set[int]()  # ranks that were overfull before the round under way
        self._blocked = set[int]()  # ranks that wait
        self._through = set[int]()  # ranks that have no more steps, which no round has told yet
        self._late: list[Member[int]] = []  # members with an event while a round is reduced
        self._ready = 0  # ranks that are counted for the next round
        self._tally = Tally(drift)  # of the round under way
        self._reported = self._clocks, self._through  # what it tells; see `Progress.end`
        self._called = False  # a call is under way
        self._until = math.inf  # when all know of the call under way, or the round's end
        self._called_at = self._waited_since = 0.0
        self._computed: list[tuple[float, int]] = []  # when ranks will have computed their steps

    def run(self, starts: list[float]) -> None:
        """Runs from the first step until all have met.

        Args:
            starts: when each rank begins, [W].
        """
        self._waited_since = starts[0]
        for rank, start in enumerate(starts):
            if self._work_s[rank]:
                self._computed.append((start + self._work_s[rank][0], rank))
            else:
                self._end_steps(rank)
        heapq.heapify(self._computed)
        now, computed, progress = max(starts), self._computed, self._progress
        if self._called:
            self._until = now + self._costs.call_s
        while progress.working:
            now = min(computed[0][0] if computed else math.inf, self._until)
            assert now < math.inf, "ranks wait for each other"
            # All steps that end at this moment are offered before a round begins or ends.
            while computed and computed[0][0] <= now:
                self._offer(heapq.heappop(computed)[1], now)
            if self._until <= now:
                if progress.reducing:
                    self._end(now)
                else:
                    self._begin(now)
            if self._called and self._until == math.inf:
                self._until = now + self._costs.call_s
        self.met_at = now
        for ended_at in self.ended_at:
            ended_at[-1:] = [now] if ended_at else []

    def _offer(self, rank: int, now: float) -> None:
        """A rank has computed a step."""
        member = self._members[rank]
        samples = self._samples[rank][member.clock]
        waits = member.offer(samples or None, samples)
        self._clocks[rank] += 1
        self._holding.append(rank)
        if self._progress.reducing:
            self._late.append(member)
        elif not self._called:
            self._hear(member.announce())
        if waits is not None:
            self._blocked.add(rank)
            if member.overfull:
                self._full.add(rank)
        else:
            self._go_on(rank, now)

    def _hear(self, says: Says) -> None:
        """Counts a ready rank, or notes a call."""
        if says is Says.READY:
            self._ready += 1
            self._called |= self._progress.enough(self._ready)
        elif says is Says.CALL:
            self._called = True

    def _go_on(self, rank: int, now: float) -> None:
        """A rank applies the rounds that are over, and begins its next step."""
        member, work_s = self._members[rank], self._work_s[rank]
        clock = member.clock
        self.ended_at[rank].append(now)
        if clock == len(work_s):
            self._end_steps(rank)
            return
        member.take()
        heapq.heappush(self._computed, (now + work_s[clock], rank))

    def _end_steps(self, rank: int) -> None:
        """A rank has no more steps."""
        member = self._members[rank]
        member.through()
        self._through.add(rank)
        if self._progress.reducing:
            self._late.append(member)
        elif not self._called:
            self._hear(member.announce())

    def _begin(self, now: float) -> None:
        """A round begins: it takes all gradients that are pending."""
        self._tally = Tally(self._drift)
        for rank in self._holding:  # a rank that occurs again gives nothing more
            self._members[rank].contribute(self._tally)
        self._reported = self._clocks.copy(), self._through
        self._freed = self._full
        self._holding, self._through, self._full = [], set(), set()
        self._ready, self._called = 0, False
        self._progress.begin()
        self._called_at, self._until = now, now + self._costs.round_s

    def _end(self, now: float) -> None:
        """A round is over: all ranks have its sum."""
        progress, tally = self._progress, self._tally
        step = self._clocks[0] - (0 in self._blocked)
        self.rounds.append(
            Round(
                number=progress.rounds_done,
                step=max(min(step, len(self._work_s[0]) - 1), 0),
                contributors=tally.contributors,
                staleness=tally.ages,
                dropped=tally.dropped,
                waited_s=self._called_at - self._waited_since,
                reduced_s=now - self._called_at,
                bytes=self._costs.bytes,
                ended_at=now,
            )
        )
        self._until, self._waited_since = math.inf, now
        # Asking all ranks that wait after each round would take long where many wait.
        may_go = self._blocked if progress.end(*self._reported) else self._freed
        late, self._late = self._late, []
        for member in late:
            if self._called:
                break
            self._hear(member.announce())
        for rank in [rank for rank in may_go if rank in self._blocked]:
            member = self._members[rank]
            if member.wait_reason() is None:
                self._blocked.remove(rank)
                member.waiting = None
                self._go_on(rank, now)
