"""Simulation of batch sharing on the virtual clock, with the decisions of `paceline.core.pool`.

A rank that has trained its own batches of a span takes over batches of slower ranks. A span is the
steps of a segment up to the next exchange among all ranks (`core.pool.ends_span`)::

    pool = SimulatedPool(world)
    timeline = pool.run(what, model, starts, work)  # instead of `model.run(starts, work)`

First the pool assigns the batches of each span to ranks, as if no rank waited within a span. Until
the time that `settled` returns, each rank trains its own batches. For later times, `Events`
simulates which batch each rank trains next.

Then the synchronisation's model runs the batches that each rank trains. The resulting times are
added up to one record per rank and step, as real ranks report them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core import pool
from paceline.core.pool import RankQueue, Stance
from paceline.policies.base import Floats, Ints
from paceline.wire.synchronisation import Synchronisation
from paceline_backend.simulator.sync.base import (
    Bodies,
    Dealing,
    Prices,
    SimulatedSync,
    SimulatedTimeline,
    Work,
)


class SimulatedPool:
    """Simulation of batch sharing in a run's segments, one after the other. Not thread-safe."""

    def __init__(self, world: int) -> None:
        self._world = world
        # Moving average of each rank's seconds per batch, [W]; 0: unknown.
        self._pace_s = np.zeros(world)

    def run(
        self, what: Synchronisation, model: SimulatedSync, starts: Floats, work: Work
    ) -> SimulatedTimeline:
        """Run the model of the synchronisation `what`; ranks may take over each other's batches.

        `starts` has the time at which each rank begins, [W]. `work.dealing` records the batches
        that ranks train instead of the planned batches.
        """
        steps = len(work.work_s)
        if not (steps and self._world > 1 and work.dealing and pool.is_pooled(what)):
            return model.run(starts, work)
        now, parts = starts, []
        for first, end in _spans(what, work.first_step, steps):
            span = _part(work, first, end)
            bodies = self._share_out(now, span, first, work.dealing)
            if bodies is None:
                timeline = model.run(now, span)
                if first:
                    rounds = [replace(each, step=each.step + first) for each in timeline.rounds]
                    timeline = replace(timeline, rounds=rounds)
            else:
                work.dealing.pool(bodies)
                timeline = _reported(model.run(now, _uneven(span, bodies)), bodies)
            took_s = timeline.work_s + timeline.wait_s + timeline.communication_s
            now = now + took_s.sum(axis=0)
            parts.append(timeline)
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _share_out(self, starts: Floats, span: Work, first: int, dealing: Dealing) -> Bodies | None:
        """Assign a span's batches to ranks.

        Return None if each rank trains its own batches, and no batch is empty. `starts` has the
        time at which each rank begins the span, [W]. `first` is the span's first step, counted from
        the segment's first step.
        """
        queues = Queues.of(span.work_s, span.samples)
        ends_at = starts + np.vstack([np.zeros(self._world), np.cumsum(queues.work_s, axis=0)])
        pace_s = paces(self._pace_s, queues.work_s)
        begun = queues.begun_before(settled(queues, ends_at, pace_s), ends_at)
        ranks = np.arange(self._world)
        takes = Takes()
        self._pace_s = pace_s[queues.count, ranks]
        if (begun < queues.count).any():
            events = Events(queues, span.samples, first, dealing)
            begun, self._pace_s = events.run(ends_at, pace_s, begun)
            takes = events.takes
        elif (queues.count == len(span.work_s)).all():
            return None
        return _bodies(span, first, queues, begun, takes)


def without_empty(work: Work) -> Work:
    """Return `work` without the steps in which a rank's batch has no samples."""
    queues = Queues.of(work.work_s, work.samples)
    return replace(
        work,
        work_s=queues.work_s,
        samples=np.take_along_axis(work.samples, queues.step, axis=0),
        steps=queues.count,
        planned=len(work.work_s),
    )


def _bodies(span: Work, first: int, queues: Queues, own: Ints, takes: Takes) -> Bodies:
    """Make the list of the batches that each rank trains in a span.

    Rank j trains the first ``own[j]`` batches of its queue, and then the batches that it took over.
    `first` is the span's first step, counted from the segment's first step.
    """
    steps, world = span.work_s.shape
    taker = np.array(takes.rank, np.int64)
    count = own + np.bincount(taker, minlength=world)
    most, ranks = max(int(count.max()), 1), np.arange(world)
    mine = np.arange(min(most, steps))[:, None] < own
    batch = np.full((most, world), -1)
    step = np.full((most, world), first + steps - 1)
    work_s, samples = np.zeros((most, world)), np.zeros((most, world), np.int64)
    mine, planned = mine[: len(queues.step)], queues.step[: len(mine)]
    rows = slice(0, len(mine))
    batch[rows] = np.where(mine, (first + planned) * world + ranks, -1)
    step[rows] = np.where(mine, first + planned, first + steps - 1)
    work_s[rows] = np.where(mine, queues.work_s[: len(mine)], 0.0)
    samples[rows] = np.where(mine, np.take_along_axis(span.samples, planned, axis=0), 0)
    if len(taker):
        at = own[taker] + np.array(takes.number)
        planned, whose = np.array(takes.batch).T
        batch[at, taker] = (first + planned) * world + whose
        work_s[at, taker] = takes.work_s
        samples[at, taker] = span.samples[planned, whose]
    return Bodies(first, steps, count, batch, step, work_s, samples)


def _spans(what: Synchronisation, first_step: int, steps: int) -> Iterator[tuple[int, int]]:
    first = 0
    for k in range(steps):
        if pool.ends_span(what, first_step + k, last=k == steps - 1):
            yield first, k + 1
            first = k + 1


def _part(work: Work, first: int, end: int) -> Work:
    part, steps = slice(first, end), len(work.work_s)
    if (first, end) == (0, steps):
        return work
    return replace(
        work,
        first_step=work.first_step + first,
        work_s=work.work_s[part],
        samples=work.samples[part],
        all_reduce_s=work.all_reduce_s[part],
        epoch_end=work.epoch_end and end == steps,
    )


def _uneven(span: Work, bodies: Bodies) -> Work:
    return replace(
        span,
        work_s=bodies.work_s,
        samples=bodies.samples,
        all_reduce_s=np.zeros_like(bodies.work_s),
        dealing=None,
        steps=bodies.count,
        planned=bodies.span,
    )


def _reported(timeline: SimulatedTimeline, bodies: Bodies) -> SimulatedTimeline:
    step, last = bodies.step.copy(), bodies.first + bodies.span - 1
    # The wait at the span's end belongs to the last step.
    step[-1] = last
    ends = replace(bodies, step=step)
    of_rank = [bodies.step[:count, k].tolist() for k, count in enumerate(bodies.count.tolist())]
    rounds = []
    for each in timeline.rounds:
        mine = of_rank[each.rank]
        at = mine[each.step] if each.step < len(mine) else last
        rounds.append(each if each.step == at else replace(each, step=at))
    return SimulatedTimeline(
        bodies.reported(bodies.work_s),
        ends.reported(timeline.wait_s),
        ends.reported(timeline.communication_s),
        rounds,
    )


def _joined(parts: list[SimulatedTimeline]) -> SimulatedTimeline:
    return SimulatedTimeline(
        np.concatenate([part.work_s for part in parts]),
        np.concatenate([part.wait_s for part in parts]),
        np.concatenate([part.communication_s for part in parts]),
        [each for part in parts for each in part.rounds],
    )


@dataclass
class Takes:
    """Batches that ranks took over from other ranks, sorted by time."""

    # The rank that took the batch.
    rank: list[int] = field(default_factory=list)
    # Index of the batch among the batches that the same rank took over.
    number: list[int] = field(default_factory=list)
    # The batch, as a pair: its step, counted from the span's first step, and the rank for which the
    # batch was planned.
    batch: list[tuple[int, int]] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Queues:
    """The batches in a span that were planned for each rank, without empty batches.

    `step` has the step of each batch, counted from the span's first step; only the first `count`
    values of a rank are valid. `work_s` has the time of each batch; it is 0 beyond `count`.
    """

    count: Ints  # [W]
    step: Ints  # [S, W]
    work_s: Floats  # [S, W]

    @staticmethod
    def of(work_s: Floats, samples: Ints) -> Queues:
        """Return the queues of a span's work and samples, [S, W]."""
        filled = samples > 0
        step = np.argsort(~filled, axis=0, kind="stable")
        work_s = np.take_along_axis(np.where(filled, work_s, 0.0), step, axis=0)
        return Queues(filled.sum(axis=0), step, work_s)

    @property
    def made(self) -> npt.NDArray[np.bool_]:
        """Mask that is True where `step` and `work_s` have a batch, [S, W]."""
        return np.asarray(np.arange(len(self.step))[:, None] < self.count)

    def begun_before(self, time: float, ends_at: Floats) -> Ints:
        """Return each rank's number of own batches that begin before a time, [W].

        `ends_at` has the times at which each rank begins and ends its batches, [S + 1, W].
        """
        return np.asarray((self.made & (ends_at[:-1] < time)).sum(axis=0))


def paces(before_s: Floats, work_s: Floats) -> Floats:
    """Return each rank's moving average of its time per batch, before and after each batch.

    The result is in seconds, [S + 1, W]; see `core.pool.Pace`. `before_s` is the average before the
    first batch, [W], and `work_s` the time of each batch, [S, W].
    """
    pace_s = np.empty((len(work_s) + 1, len(before_s)))
    pace_s[0] = before_s
    for k, seconds in enumerate(work_s):
        before = np.where(pace_s[k] > 0, pace_s[k], seconds)
        pace_s[k + 1] = before + pool.NEWEST * (seconds - before)
    return pace_s


def settled(queues: Queues, ends_at: Floats, pace_s: Floats) -> float:
    """Return a time before which each rank trains its own batches, regardless of other ranks.

    Before this time each rank has batches of its own left, and is fast enough to train them itself,
    rather than leave them to faster ranks. `ends_at` has the times at which each rank begins and
    ends its batches, [S + 1, W]. `pace_s` comes from `paces`.
    """
    world = len(queues.count)
    first_end = float(ends_at[queues.count, np.arange(world)].min())
    known = (pace_s > 0) & np.vstack([np.ones(world, bool), queues.made])
    fastest_s = np.where(known, pace_s, np.inf).min(axis=0)
    slowest_s = float(np.where(known, pace_s, 0.0).max())
    if slowest_s <= pool.FASTEST * fastest_s.min():
        return first_end
    # If more than this many batches are left, the slowest rank trains its own batches, instead of
    # leaving them to faster ranks. The formula follows from `core.pool.finish_s`.
    left = slowest_s * float((1 / fastest_s).sum())
    settled = int(queues.count.sum() - left) - 1
    if settled <= 0:
        return -np.inf
    begins = ends_at[:-1][queues.made]
    if settled >= len(begins):
        return first_end
    return min(first_end, float(np.partition(begins, settled)[settled]))


class Board:
    """The queues of all ranks, with running totals for fast decisions.

    The decisions are those of the functions in `core.pool`, which go through all queues each time.
    """

    def __init__(self, rank_queues: list[RankQueue]) -> None:
        self.rank_queues = rank_queues
        working = [queue for queue in rank_queues if queue.stance is Stance.WORKS]
        self._left = sum(queue.left for queue in rank_queues)
        self._working = len(working)
        self._unknown = sum(not queue.batch_s for queue in working)
        self._per_s = sum(1 / queue.batch_s for queue in working if queue.batch_s)
        # Seconds per batch of the fastest working rank, and its number; None: not computed yet.
        self._least: tuple[float, int] | None = None
        self._versions = [0] * len(rank_queues)
        # Heap of (−finish time, −batches left, rank, version) of the ranks with batches left, so
        # that the rank that finishes last comes first. Entries with older versions are ignored.
        self._last: list[tuple[float, int, int, int]] = []
        for rank, queue in enumerate(rank_queues):
            if queue.left:
                self._last.append((-queue.finishes_s, -queue.left, rank, 0))
        heapq.heapify(self._last)

    def put(self, rank: int, queue: RankQueue) -> None:
        """Store a rank's new `RankQueue`, and update the totals."""
        before, self.rank_queues[rank] = self.rank_queues[rank], queue
        self._left += queue.left - before.left
        if (before.batch_s, before.stance) != (queue.batch_s, queue.stance):
            self._count(before, -1)
            self._count(queue, 1)
            works, least = queue.stance is Stance.WORKS, self._least
            if least is not None and works and queue.batch_s <= least[0]:
                self._least = queue.batch_s, rank
            elif least is not None and least[1] == rank:
                self._least = None
        self._versions[rank] += 1
        if queue.left:
            entry = (-queue.finishes_s, -queue.left, rank, self._versions[rank])
            heapq.heappush(self._last, entry)

    def _count(self, queue: RankQueue, times: int) -> None:
        if queue.stance is Stance.WORKS:
            self._working += times
            if queue.batch_s:
                self._per_s += times / queue.batch_s
            else:
                self._unknown += times

    def has_working_peer(self, rank: int) -> bool:
        """Return the result of `core.pool.has_working_peer` for all queues."""
        return self._working > (self.rank_queues[rank].stance is Stance.WORKS)

    def is_worth_it(self, rank: int, batch_s: float) -> bool:
        """Return the result of `core.pool.is_worth_it` for a rank that takes `batch_s` a batch."""
        mine = self.rank_queues[rank]
        working, unknown, per_s = self._working, self._unknown, self._per_s
        if mine.stance is Stance.WORKS:
            working, unknown = working - 1, unknown - (not mine.batch_s)
            per_s -= 1 / mine.batch_s if mine.batch_s else 0.0
        if not (batch_s and working) or unknown:
            return True
        if batch_s <= pool.finish_s(self._left, working, per_s):
            return True
        return batch_s <= pool.FASTEST * self._least_but(rank)

    def _least_but(self, rank: int) -> float:
        if self._least is None:
            self._least = self._find_least(-1)
        least_s, which = self._least
        return least_s if which != rank else self._find_least(rank)[0]

    def _find_least(self, but: int) -> tuple[float, int]:
        return min(
            (queue.batch_s, rank)
            for rank, queue in enumerate(self.rank_queues)
            if queue.stance is Stance.WORKS and rank != but
        )

    def slowest(self, rank: int, room: float, of_last: Any) -> int | None:
        """Return the result of `core.pool.slowest` for a rank with memory for `room` samples.

        `of_last` returns the number of samples of the last batch in a rank's queue.
        """
        aside, answer = [], None
        while self._last and answer is None:
            entry = self._last[0]
            other, version = entry[2:]
            if version != self._versions[other]:
                heapq.heappop(self._last)
            elif other == rank or of_last(other) > room:
                aside.append(heapq.heappop(self._last))
            else:
                answer = other
        for entry in aside:
            heapq.heappush(self._last, entry)
        return answer


class Events:
    """Event simulation of a span. Each event is a rank that needs its next batch."""

    def __init__(self, queues: Queues, samples: Ints, first: int, dealing: Dealing) -> None:
        self.takes = Takes()
        self._world = len(queues.count)
        self._queues, self._first = queues, first
        self._own_s: list[list[float]] = queues.work_s.tolist()
        self._steps: list[list[int]] = queues.step.tolist()
        self._samples: list[list[int]] = samples.tolist()
        self._dealing = dealing
        # Times of the batches of a step on all ranks, by step of the span.
        self._prices: dict[int, Prices] = {}
        self._room = [dealing.room(rank) for rank in range(self._world)]
        # A rank leaves its own batches to faster ranks only if every batch fits into every rank's
        # memory.
        self._may_leave = min(self._room) >= int(samples.max())

    def run(self, ends_at: Floats, pace_s: Floats, begun: Ints) -> tuple[Ints, Floats]:
        """Simulate to the span's end.

        Return the number of its own batches that each rank has begun, and the moving average of
        each rank's seconds per batch, [W] each. `ends_at` and `pace_s` are as for `settled`.
        `begun` is the number of its own batches that each rank has begun before the simulation,
        [W].
        """
        ranks = np.arange(self._world)
        reported_s = np.where(begun > 0, pace_s[np.maximum(begun - 1, 0), ranks], 0.0)
        ends = self._queues.count.tolist()
        rank_queues = map(RankQueue, begun.tolist(), ends, reported_s.tolist())
        self._board = Board(list(rank_queues))
        self._pace_s: list[float] = pace_s[begun, ranks].tolist()
        self._counts = [0] * self._world
        free = [(at, rank) for rank, at in enumerate(ends_at[begun, ranks].tolist())]
        heapq.heapify(free)
        while free:
            now, rank = free[0]
            lasts_s = self._next(rank)
            if lasts_s is None:
                heapq.heappop(free)
                continue
            before = self._pace_s[rank] or lasts_s
            self._pace_s[rank] = before + pool.NEWEST * (lasts_s - before)
            heapq.heapreplace(free, (now + lasts_s, rank))
        return np.array([queue.begun for queue in self._board.rank_queues]), np.array(self._pace_s)

    def _next(self, rank: int) -> float | None:
        """Return the seconds of a rank's next batch; None: the rank is done with the span."""
        board, queue = self._board, self._board.rank_queues[rank]
        worth = board.is_worth_it(rank, self._pace_s[rank])
        if queue.left:
            if not worth and self._may_leave and board.has_working_peer(rank):
                board.put(rank, queue.leave())
                return None
            board.put(rank, queue.begin(self._pace_s[rank]))
            return self._own_s[queue.begun][rank]
        other = board.slowest(rank, self._room[rank], self._of_last) if worth else None
        if other is None:
            board.put(rank, queue.stop())
            return None
        return self._take(rank, other)

    def _take(self, rank: int, other: int) -> float:
        board, queue = self._board, self._board.rank_queues[other].give()
        board.put(other, queue)
        step = self._steps[queue.end][other]
        lasts_s = self._lasts_s(rank, step, other)
        takes = self.takes
        takes.rank.append(rank)
        takes.number.append(self._counts[rank])
        takes.batch.append((step, other))
        takes.work_s.append(lasts_s)
        self._counts[rank] += 1
        return lasts_s

    def _lasts_s(self, rank: int, step: int, other: int) -> float:
        if step not in self._prices:
            self._prices[step] = self._dealing.prices(self._first + step)
        prices = self._prices[step]
        load_s = prices.load_s[rank] * prices.load[other]
        sample_s = prices.sample_s[rank] * self._samples[step][other]
        return float(load_s + sample_s + prices.batch_s[rank])

    def _of_last(self, rank: int) -> int:
        return self._samples[self._steps[self._board.rank_queues[rank].end - 1][rank]][rank]
