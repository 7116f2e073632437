"""Model of AD-PSGD, which averages two replicas at a time; see `paceline.train.sync.pairwise`."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort

import numpy as np

from paceline.core import replicas
from paceline.policies.base import Floats
from paceline_backend.simulator.sync.base import Costs, SimulatedRound, SimulatedTimeline, Work

# At an epoch's end, ranks compute this many means: of replicas, and of optimiser states.
_MEANS = 2


class SimulatedPairwise:
    """Ranks that train without an all-reduce, and average replicas in pairs.

    After each step, a rank with an even number requests a mean of two replicas from a rank with an
    odd number. The requesting rank computes its next step meanwhile; this step does not end before
    the answer arrives. Partners are drawn from `seed`, as on real ranks. The requests of a segment
    are simulated before those of the next segment, so a later segment's request never delays them.
    """

    def __init__(self, world: int, seed: int) -> None:
        # True until an epoch ends.
        self.goes_on = True
        asking = replicas.asking(world)
        self._partners = {rank: replicas.Partners(rank, world, seed) for rank in asking}
        self._answering = {rank: _Answering() for rank in replicas.answering(world)}
        # End of each rank's newest step, [W]. All times in this object's attributes are on a clock
        # of its own, which continues from segment to segment.
        self._ended_at: Floats | None = None
        # Time of the newest answer to each requesting rank.
        self._answered_at = dict.fromkeys(asking, 0.0)
        # Each rank's number of steps in earlier segments.
        self._steps = np.zeros(world, np.int64)

    def run(self, starts: Floats, work: Work) -> SimulatedTimeline:
        """See `SimulatedSync.run`."""
        steps = len(work.work_s)
        wait_s, communication_s = np.zeros_like(work.work_s), np.zeros_like(work.work_s)
        if not steps:
            return SimulatedTimeline(work.work_s, wait_s, communication_s, [])
        since = self._since(starts)
        now = starts + since
        made_s = np.where(work.made, work.work_s, 0.0)
        # For answering ranks, which never wait, these times are final. The times of requesting
        # ranks are corrected below.
        ended_at = now + np.cumsum(made_s, axis=0)
        ends = work.of_ranks(ended_at)
        for rank, answers in self._answering.items():
            answers.forget(float(now.min()))
            answers.goes_on(ends[rank])
        work_s = work.of_ranks(work.work_s)
        answered_at, rounds = self._answered_at, []
        # Heap of (time, rank, step): the end of each requesting rank's next step, so that requests
        # are processed in the order of time.
        step_ends = [
            (max(ends[rank][0], answered_at[rank]), rank, 0)
            for rank in self._partners
            if ends[rank]
        ]
        heapq.heapify(step_ends)
        while step_ends:
            at, rank, k = heapq.heappop(step_ends)
            ended_at[k:, rank] = at
            round_ = self._ask(rank, k, at, work, since)
            rounds.append(round_)
            answered_at[rank] = at + round_.waited_s + round_.reduced_s
            if k + 1 < len(work_s[rank]):
                until = max(at + work_s[rank][k + 1], answered_at[rank])
                heapq.heappush(step_ends, (until, rank, k + 1))
        begun = np.concatenate([now[None], ended_at[:-1]])
        asking = list(self._partners)
        waits_s = (ended_at - begun - made_s)[:, asking]
        # Rounding of sums may make a wait negative.
        wait_s[:, asking] = np.maximum(waits_s, 0.0)
        if work.epoch_end:
            wait_s[-1] += self._met_at(ended_at[-1]) - ended_at[-1]
            communication_s[-1] = _MEANS * work.costs.round_s
            self.goes_on = False
        self._ended_at = ended_at[-1]
        self._steps = self._steps + (steps if work.steps is None else work.steps)
        rounds.sort(key=lambda mean: (mean.ended_at, mean.rank))
        return SimulatedTimeline(work.work_s, wait_s, communication_s, rounds)

    def synchronise(self, starts: Floats, costs: Costs) -> float:
        """See `SimulatedSync.synchronise`."""
        since = self._since(starts)
        return self._met_at(starts + since) - since + _MEANS * costs.round_s

    def _since(self, starts: Floats) -> float:
        return 0.0 if self._ended_at is None else float(self._ended_at[0] - starts[0])

    def _met_at(self, ended_at: Floats) -> float:
        return max(float(ended_at.max()), *self._answered_at.values(), 0.0)

    def _ask(self, rank: int, k: int, at: float, work: Work, since: float) -> SimulatedRound:
        costs, takes_s = work.costs, work.costs.exchange_s()
        steps = int(self._steps[rank]) + k
        other = self._answering[self._partners[rank].next()]
        asked_at = other.begins(at + costs.call_s, takes_s) + takes_s / 2
        return SimulatedRound(
            number=steps,
            step=min(k + 1, len(work.work_s) - 1),
            contributors=2,
            staleness=replicas.staleness(steps + 1, other.clock(asked_at)),
            dropped=0,
            waited_s=asked_at - at,
            reduced_s=takes_s / 2,
            bytes=costs.bytes,
            ended_at=asked_at + takes_s / 2 - since,
            rank=rank,
            world=2,
        )


class _Answering:
    """A rank that answers one request at a time, also while it computes."""

    def __init__(self) -> None:
        # Intervals of time in which the rank answers, ascending.
        self._taken: list[tuple[float, float]] = []
        # Ends of the rank's steps, ascending.
        self._ended_at: list[float] = []
        # Number of steps whose ends `forget` has removed from `_ended_at`.
        self._before = 0

    def goes_on(self, ended_at: list[float]) -> None:
        self._ended_at += ended_at

    def begins(self, at: float, takes_s: float) -> float:
        """Reserve `takes_s` seconds for the answer to a request that arrives at time `at`.

        Return the time at which the answer begins: the start of the first free gap of this length.
        """
        earlier = max(bisect_left(self._taken, (at,)) - 1, 0)
        for begun, end in self._taken[earlier:]:
            if begun >= at + takes_s:
                break
            at = max(at, end)
        insort(self._taken, (at, at + takes_s))
        return at

    def clock(self, at: float) -> int:
        """Return the number of steps that the rank has finished by time `at`."""
        return self._before + bisect_right(self._ended_at, at)

    def forget(self, before: float) -> None:
        count = bisect_right(self._ended_at, before)
        self._before += count
        del self._ended_at[:count]
        self._taken = [span for span in self._taken if span[1] > before]
