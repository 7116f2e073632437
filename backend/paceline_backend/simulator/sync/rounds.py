"""Models of partial all-reduces: RNA, eager-SGD, n-soft, SSP, backup workers.

Simulated ranks use the protocol of real ranks, `paceline.core.rounds`; this module adds the virtual
clock. In `SimulatedPartial`, all ranks share the same rounds. In `SimulatedHierarchical`, each of
RNA's groups has rounds of its own; see `paceline.train.sync.hierarchical`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from paceline.core.member import Member, RoundAction, RoundCounts
from paceline.core.rounds import Call, Drift, RoundProgress
from paceline.policies.base import Floats
from paceline_backend.simulator.sync.base import Costs, SimulatedRound, SimulatedTimeline, Work

# At a segment's end, all ranks make this many reductions: of the server's parameters, and of the
# optimisers' states.
_REDUCTIONS = 2


class SimulatedPartial:
    """Ranks that continue to compute while rounds reduce the gradients that are ready.

    `call` is the rule by which ranks start a reduction round; `drift` bounds the staleness of
    gradients, and the steps that a rank may be ahead of the slowest rank.
    """

    goes_on = False

    def __init__(self, call: Call, drift: Drift) -> None:
        self._call, self._drift = call, drift

    def run(self, starts: Floats, work: Work) -> SimulatedTimeline:
        """See `SimulatedSync.run`."""
        if not len(work.work_s):
            return SimulatedTimeline(work.work_s, work.work_s, work.work_s, [])
        work_s, samples = work.of_ranks(work.work_s), work.of_ranks(work.samples)
        segment = SegmentRounds(self._call, self._drift, work_s, samples, work.costs)
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
        return SimulatedTimeline(work.work_s, wait_s, np.zeros_like(wait_s), segment.rounds)

    def synchronise(self, starts: Floats, costs: Costs) -> float:
        """See `SimulatedSync.synchronise`."""
        return float(starts.max())


class SegmentRounds:
    """Event simulation of all ranks in one segment, with possibly different numbers of steps.

    `work_s` is the time of each rank's steps, [W][steps of the rank]; `samples` has the same shape.
    `call` and `drift` are as for `SimulatedPartial`.
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
        self.ended_at: list[list[float]] = [[] for _ in range(world)]  # [W][steps of the rank]
        # Time at which all ranks have synchronised.
        self.met_at = 0.0
        self.rounds: list[SimulatedRound] = []
        self._work_s, self._samples = work_s, samples
        self._costs = costs
        self._progress = RoundProgress(world, call, drift)
        self._members = [Member[int](rank, self._progress) for rank in range(world)]
        self._clocks = [0] * world
        self._drift = drift
        # Ranks that have offered a gradient for the next round.
        self._holding: list[int] = []
        # Ranks that wait because too many of their gradients are pending; see `Member.overfull`.
        self._full = set[int]()
        # The ranks in `_full` when the current round began.
        self._freed = set[int]()
        # Ranks that may not begin their next step yet; see `Member.wait_reason`.
        self._blocked = set[int]()
        # Ranks that finished their last step after the newest round began.
        self._through = set[int]()
        # Members that offered a gradient or finished their steps while a round was being reduced.
        self._late: list[Member[int]] = []
        # Number of ranks that have announced that they are ready for the next round.
        self._ready = 0
        # Tally of the current round, and the state that the round reports; see `RoundProgress.end`.
        self._tally = RoundCounts(drift)
        self._reported = self._clocks, self._through
        # True while the request to start a round is in progress.
        self._called = False
        # Time at which all ranks have received the current request, or at which the round ends.
        self._until = math.inf
        self._called_at = self._waited_since = 0.0
        # Heap of (time, rank): the time at which each computing rank will have computed its step.
        self._computed: list[tuple[float, int]] = []

    def run(self, starts: list[float]) -> None:
        """Simulate until all ranks have synchronised; rank j begins at `starts[j]`."""
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
            # Offer the gradients of all steps that end at this moment before a round begins or
            # ends.
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
        member = self._members[rank]
        samples = self._samples[rank][member.clock]
        waits = member.offer(samples or None, samples)
        self._clocks[rank] += 1
        self._holding.append(rank)
        if self._progress.reducing:
            self._late.append(member)
        elif not self._called:
            self._act(member.announce())
        if waits is not None:
            self._blocked.add(rank)
            if member.overfull:
                self._full.add(rank)
        else:
            self._go_on(rank, now)

    def _act(self, action: RoundAction) -> None:
        if action is RoundAction.READY:
            self._ready += 1
            self._called |= self._progress.enough(self._ready)
        elif action is RoundAction.CALL:
            self._called = True

    def _go_on(self, rank: int, now: float) -> None:
        member, work_s = self._members[rank], self._work_s[rank]
        clock = member.clock
        self.ended_at[rank].append(now)
        if clock == len(work_s):
            self._end_steps(rank)
            return
        member.take()
        heapq.heappush(self._computed, (now + work_s[clock], rank))

    def _end_steps(self, rank: int) -> None:
        member = self._members[rank]
        member.finish()
        self._through.add(rank)
        if self._progress.reducing:
            self._late.append(member)
        elif not self._called:
            self._act(member.announce())

    def _begin(self, now: float) -> None:
        self._tally = RoundCounts(self._drift)
        # A rank that occurs several times contributes only the first time.
        for rank in self._holding:
            self._members[rank].contribute(self._tally)
        self._reported = self._clocks.copy(), self._through
        self._freed = self._full
        self._holding, self._through, self._full = [], set(), set()
        self._ready, self._called = 0, False
        self._progress.begin()
        self._called_at, self._until = now, now + self._costs.round_s

    def _end(self, now: float) -> None:
        progress, tally = self._progress, self._tally
        step = self._clocks[0] - (0 in self._blocked)
        self.rounds.append(
            SimulatedRound(
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
        # Check only the waiting ranks that this round may allow to continue. Checking all of them
        # after each round takes long if many ranks wait.
        may_go = self._blocked if progress.end(*self._reported) else self._freed
        late, self._late = self._late, []
        for member in late:
            if self._called:
                break
            self._act(member.announce())
        for rank in [rank for rank in may_go if rank in self._blocked]:
            member = self._members[rank]
            if member.wait_reason() is None:
                self._blocked.remove(rank)
                member.waiting = None
                self._go_on(rank, now)


class SimulatedHierarchical:
    """Groups with reduction rounds of their own. All ranks synchronise at the segment's end.

    During a segment, pushes to the parameter server make no rank wait, so they take no time in this
    model. `groups` has a model for each group; rank 0's group is the first.
    """

    goes_on = False

    def __init__(self, groups: Iterable[tuple[list[int], SimulatedPartial]]) -> None:
        self._groups = list(groups)

    def run(self, starts: Floats, work: Work) -> SimulatedTimeline:
        """See `SimulatedSync.run`."""
        wait_s, rounds = np.zeros_like(work.work_s), []
        if not len(wait_s):
            return SimulatedTimeline(work.work_s, wait_s, wait_s, [])
        for group, partial in self._groups:
            timeline = partial.run(starts[group], _of_group(work, group))
            wait_s[:, group] = timeline.wait_s
            rounds += [replace(each, rank=group[0], world=len(group)) for each in timeline.rounds]
        ended_at = starts + (np.where(work.made, work.work_s, 0.0) + wait_s).sum(axis=0)
        wait_s[-1] += self._met_at(ended_at, work.costs) - ended_at
        rounds.sort(key=lambda each: (each.ended_at, each.rank))
        return SimulatedTimeline(work.work_s, wait_s, np.zeros_like(wait_s), rounds)

    def synchronise(self, starts: Floats, costs: Costs) -> float:
        """See `SimulatedSync.synchronise`."""
        return float(starts.max())

    def _met_at(self, ended_at: Floats, costs: Costs) -> float:
        """Return the time at which all ranks have the server's parameters after the last pushes.

        The server on rank 0 processes one push at a time. A group pushes when all its ranks have
        ended. The push of rank 0's own group takes no time.
        """
        free_at = 0.0
        of_groups = [float(ended_at[group].max()) for group, _ in self._groups]
        for at in sorted(of_groups[1:]):
            free_at = max(at + costs.call_s, free_at) + costs.exchange_s()
        return max(*of_groups, free_at) + _REDUCTIONS * costs.round_s


def _of_group(work: Work, group: list[int]) -> Work:
    return replace(
        work,
        work_s=work.work_s[:, group],
        samples=work.samples[:, group],
        all_reduce_s=work.all_reduce_s[:, group],
        costs=work.costs.among(len(group)),
        dealing=None,
        steps=None if work.steps is None else work.steps[group],
    )
