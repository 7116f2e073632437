"""AD-PSGD's means of two on the virtual clock; see `paceline.train.sync.pairwise`."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort

import numpy as np

from paceline.core import pairs
from paceline_backend.policies.base import Floats
from paceline_backend.simulator.sync.base import Costs, Round, Timeline, Work

_MEANS = 2  # where all meet: of the replicas, and of what their optimisers hold


class Pairwise:
    """Each rank steps by itself; after each step those of even number ask one of odd number.

    A rank that asks computes its next step meanwhile, and has the answer before it is through with
    that. Draws are those of real ranks. Of questions to the same rank those of an earlier segment
    come first: a later one is answered in between, where there is time.

    Args:
        world: ranks.
        seed: of the draws.
    """

    def __init__(self, world: int, seed: int) -> None:
        self.goes_on = True  # until an epoch ends
        asking = pairs.asking(world)
        self._partners = {rank: pairs.Partners(rank, world, seed) for rank in asking}
        self._answering = {rank: _Answering() for rank in pairs.answering(world)}
        # On a clock of its own, which goes on from segment to segment:
        self._ended_at: Floats | None = None  # [W] the newest step of each,
        self._answered_at = dict.fromkeys(asking, 0.0)  # and when it had its newest answer
        self._steps = 0

    def run(self, starts: Floats, work: Work) -> Timeline:
        """See `Synchroniser.run`."""
        steps = len(work.work_s)
        wait_s, communication_s = np.zeros_like(work.work_s), np.zeros_like(work.work_s)
        if not steps:
            return Timeline(work.work_s, wait_s, communication_s, [])
        since = self._since(starts)
        now = starts + since
        ended_at = now + np.cumsum(work.work_s, axis=0)  # of those that answer: they never wait
        for rank, answers in self._answering.items():
            answers.forget(float(now.min()))
            answers.goes_on(ended_at[:, rank].tolist())
        work_s: list[list[float]] = work.work_s.T.tolist()
        answered_at, rounds = self._answered_at, []
        # When ranks will be through with a step: then they ask, and so in the order of time.
        through = [
            (max(float(ended_at[0, rank]), answered_at[rank]), rank, 0) for rank in self._partners
        ]
        heapq.heapify(through)
        while through:
            at, rank, k = heapq.heappop(through)
            ended_at[k, rank] = at
            round_ = self._ask(rank, k, at, work, since)
            rounds.append(round_)
            answered_at[rank] = at + round_.waited_s + round_.reduced_s
            if k + 1 < steps:
                ends = max(at + work_s[rank][k + 1], answered_at[rank])
                heapq.heappush(through, (ends, rank, k + 1))
        begun = np.concatenate([now[None], ended_at[:-1]])
        asking = list(self._partners)
        waited_s = (ended_at - begun - work.work_s)[:, asking]
        wait_s[:, asking] = np.maximum(waited_s, 0.0)  # sums are rounded
        if work.epoch_end:
            wait_s[-1] += self._met_at(ended_at[-1]) - ended_at[-1]
            communication_s[-1] = _MEANS * work.costs.round_s
            self.goes_on = False
        self._ended_at, self._steps = ended_at[-1], self._steps + steps
        rounds.sort(key=lambda mean: (mean.ended_at, mean.rank))
        return Timeline(work.work_s, wait_s, communication_s, rounds)

    def meet(self, starts: Floats, costs: Costs) -> float:
        """See `Synchroniser.meet`."""
        since = self._since(starts)
        return self._met_at(starts + since) - since + _MEANS * costs.round_s

    def _since(self, starts: Floats) -> float:
        """What the own clock is ahead."""
        return 0.0 if self._ended_at is None else float(self._ended_at[0] - starts[0])

    def _met_at(self, ended_at: Floats) -> float:
        return max(float(ended_at.max()), *self._answered_at.values(), 0.0)

    def _ask(self, rank: int, k: int, at: float, work: Work, since: float) -> Round:
        """A question after a step of the segment, at a time on the own clock."""
        costs, takes_s = work.costs, work.costs.exchange_s()
        other = self._answering[self._partners[rank].next()]
        asked_at = other.begins(at + costs.call_s, takes_s) + takes_s / 2
        return Round(
            number=self._steps + k,
            step=min(k + 1, len(work.work_s) - 1),
            contributors=2,
            staleness=pairs.staleness(self._steps + k + 1, other.clock(asked_at)),
            dropped=0,
            waited_s=asked_at - at,
            reduced_s=takes_s / 2,
            bytes=costs.bytes,
            ended_at=asked_at + takes_s / 2 - since,
            rank=rank,
            world=2,
        )


class _Answering:
    """A rank that answers: one question at a time, whatever it computes meanwhile."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []  # in order: when it answers,
        self._ended_at: list[float] = []  # and its steps' ends
        self._before = 0  # steps before these

    def goes_on(self, ended_at: list[float]) -> None:
        """It will have done these steps, too."""
        self._ended_at += ended_at

    def begins(self, at: float, takes_s: float) -> float:
        """When it begins to answer a question that comes at a time; it is busy with it then."""
        earlier = max(bisect_left(self._taken, (at,)) - 1, 0)
        for begun, end in self._taken[earlier:]:
            if begun >= at + takes_s:
                break
            at = max(at, end)
        insort(self._taken, (at, at + takes_s))
        return at

    def clock(self, at: float) -> int:
        """How many steps it is through with, as far as they are known."""
        return self._before + bisect_right(self._ended_at, at)

    def forget(self, before: float) -> None:
        """What was before a time; nobody asks about it any more."""
        count = bisect_right(self._ended_at, before)
        self._before += count
        del self._ended_at[:count]
        self._taken = [span for span in self._taken if span[1] > before]
