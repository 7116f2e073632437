"""Lets fast ranks take batches over from slow ranks, within a span of steps of a segment.

A span ends with a step after which all ranks exchange data. `paceline.core.pool` has the rules by
which ranks decide who trains a batch. The state is in the ranks' store: each rank's `RankQueue`
(its batches in a span) is an entry, which ranks change by compare-and-set. So a batch is begun
only once: by the rank for which it was planned, or by the rank that took it over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from paceline.core import pool
from paceline.core.pool import Pace, RankQueue, Stance
from paceline.train.plan_shard import LocalStep, PlanShard, decode_shard, encode_shard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Before a batch, a rank reads all queues only if that takes at most this fraction of its time per
# batch.
_READ_COST = 0.01


def _queue_key(segment: int, span: int, rank: int) -> str:
    return f"pool/{segment}/{span}/{rank}"


def _shard_key(segment: int, rank: int) -> str:
    return f"pool/{segment}/shard/{rank}"


def _finished_key(segment: int) -> str:
    return f"pool/{segment}/finished"


def spans_of(shard: PlanShard) -> list[list[LocalStep]]:
    """Split a rank's shard of a segment into spans: lists of those steps that have samples."""
    spans: list[list[LocalStep]] = [[]]
    for step in shard.steps():
        if step.samples:
            spans[-1].append(step)
        if ends_span(step) and not step.last:
            spans.append([])
    return spans


def _batches_of_spans(shard: PlanShard) -> list[int]:
    """Return the number of batches in each span of `spans_of`, without making the steps."""
    batches, last = [0], len(shard.counts) - 1
    for k, count in enumerate(shard.counts):
        batches[-1] += count > 0
        step = shard.first_step + k
        if k < last and shard.pooled and pool.ends_span(shard.synchroniser, step, last=False):
            batches.append(0)
    return batches


def ends_span(step: LocalStep) -> bool:
    """Return whether a step is the last of a span of shared batches."""
    return step.pooled and pool.ends_span(step.synchroniser, step.step, last=step.last)


def put(store: Store, shards: list[PlanShard]) -> None:
    """Store the shared batches of a segment, from all ranks' shards, [W].

    Call it before any rank reads its shard of the segment.
    """
    segment = shards[0].segment
    keys, values = [], []
    for rank, shard in enumerate(shards):
        keys.append(_shard_key(segment, rank))
        values.append(encode_shard(shard))
        for number, batches in enumerate(_batches_of_spans(shard)):
            keys.append(_queue_key(segment, number, rank))
            values.append(_Entry(RankQueue(0, batches), "").text.encode())
    store.multi_set(keys, values)  # type: ignore[attr-defined]


class SharedBatches:
    """One rank's access to the shared batches of its segments. Not thread-safe.

    Call `begins` for each planned step in order. At a span's end, call `takes_over` until it
    returns None. `limits` has the maximum number of samples that fit into each rank's memory, [W];
    empty: no limits.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        limits: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._limit = limits[rank] if limits else None
        self._least_limit = min(limits) if limits else None
        self._pace = Pace()
        self._clock, self._worked_at = clock, clock()
        # Each rank's seconds per batch, as this rank last read them from that rank's queue, perhaps
        # in an earlier span; 0: unknown.
        self._paces = [0.0] * world
        # Smoothed time of reading all queues, in seconds.
        self._read_s = 0.0
        self._segment, self._span = -1, 0
        # This rank's entry in the store as last seen; None if unknown.
        self._mine: _Entry | None = None
        self._writes = 0
        # By rank: the batches of the rank's shard, in one list for each span of the segment. Only
        # shards that this rank has read from the store are included.
        self._spans: dict[int, list[list[LocalStep]]] = {}

    def begins(self, step: LocalStep, *, may_leave: bool) -> bool:
        """Begin this rank's next planned batch; return False if other ranks train it.

        With `may_leave`, this rank leaves the batch to other ranks if they will finish it sooner.
        """
        self._enter(step)
        if may_leave and self._leaves():
            return False
        return self._change(self._next)

    def _next(self, queue: RankQueue) -> RankQueue | None:
        return queue.begin(self._pace.batch_s) if queue.left else None

    def is_taken_over(self, step: LocalStep) -> bool:
        """Return True if it is certain that this rank will not train its next planned batch."""
        mine = self._mine
        if step.segment != self._segment or mine is None:
            return False
        return mine.queue.stance is Stance.LEAVES or not mine.queue.left

    def worked(self, seconds: float) -> None:
        """Record the time of a batch on this rank, not including waits for other ranks."""
        self._pace.add(seconds)
        self._worked_at = self._clock()

    def takes_over(self, step: LocalStep) -> LocalStep | None:
        """Take over another rank's batch of the current span, and return it.

        Return None if no batch of the span is left for this rank. `step` is the span's last step.
        """
        self._enter(step)
        entries = self._read_entries()
        while True:
            rank_queues = self._rank_queues(entries)
            other = pool.slowest(rank_queues, self._rank, partial(self._fits, rank_queues))
            worth = pool.is_worth_it(rank_queues, self._rank, self._pace.batch_s)
            if other is None or not worth or rank_queues[self._rank].stance is Stance.LEAVES:
                if self._stops(rank_queues[self._rank]):
                    return None
                entries = self._read_entries()
                continue
            now = self._write(other, entries[other], entries[other].queue.give())
            if now is None:
                batch = self._batches(other)[rank_queues[other].end - 1]
                return replace(
                    batch,
                    step=step.step,
                    planned=batch.step,
                    ett_s=None,
                    threads=step.threads,
                    last=False,
                    epoch_end=False,
                    shared=True,
                )
            entries[other] = now

    def end_span(self, step: LocalStep) -> None:
        """End the span whose last step is `step`; this rank begins no more batches of the span."""
        self._enter(step)
        self._span, self._mine = self._span + 1, None
        if step.last and self._store.add(_finished_key(self._segment), 1) == self._world:
            for rank in range(self._world):
                self._store.delete_key(_shard_key(self._segment, rank))
                for span in range(self._span):
                    self._store.delete_key(_queue_key(self._segment, span, rank))
            self._store.delete_key(_finished_key(self._segment))

    def _enter(self, step: LocalStep) -> None:
        if step.segment != self._segment:
            self._segment, self._span, self._mine = step.segment, 0, None
            self._spans.clear()

    def _leaves(self) -> bool:
        """Leave the rest of this rank's queue to other ranks if they will finish it sooner.

        Return True if the rest of the queue is left to other ranks, by this call or an earlier one.
        """
        if self._mine is not None and self._mine.queue.stance is Stance.LEAVES:
            return True
        if pool.is_due(self._clock() - self._worked_at, self._pace.batch_s):
            self._pace = Pace()
            return False
        if self._read_s > _READ_COST * self._pace.batch_s:
            return False
        rank_queues = self._rank_queues(self._read_entries())
        if pool.is_worth_it(rank_queues, self._rank, self._pace.batch_s):
            return False
        if not self._fits_all(rank_queues[self._rank]):
            return False
        self._change(RankQueue.leave)
        if pool.has_working_peer(self._rank_queues(self._read_entries()), self._rank):
            return True
        self._change(RankQueue.resume)
        return False

    def _stops(self, mine: RankQueue) -> bool:
        """Return True if this rank trains no more batches of the span.

        It trains none if it has left its own batches to other ranks, if no other rank has left
        batches, or if a rank that still trains will take these over.
        """
        if mine.stance is Stance.LEAVES:
            return True
        self._change(RankQueue.stop)
        rank_queues = self._rank_queues(self._read_entries())
        if not pool.is_left(rank_queues, self._rank) or pool.has_working_peer(
            rank_queues, self._rank
        ):
            return True
        self._change(RankQueue.resume)
        return False

    def _change(self, change: Callable[[RankQueue], RankQueue | None]) -> bool:
        """Change this rank's queue in the store; return False if `change` returns None."""
        if self._mine is None:
            self._mine = _Entry.of(self._store.get(self._key(self._rank)))
        while (after := change(self._mine.queue)) is not None:
            if (now := self._write(self._rank, self._mine, after)) is None:
                return True
            self._mine = now
        return False

    def _write(self, rank: int, before: _Entry, queue: RankQueue) -> _Entry | None:
        """Change a rank's entry; return the current entry instead if it is not `before`."""
        self._writes += 1
        after = _Entry(queue, f"{self._rank}.{self._writes}")
        text = self._store.compare_set(self._key(rank), before.text, after.text)
        if text.decode() != after.text:
            return _Entry.of(text)
        if rank == self._rank:
            self._mine = after
        return None

    def _read_entries(self) -> list[_Entry]:
        began = time.perf_counter()
        keys = [self._key(rank) for rank in range(self._world)]
        entries = [_Entry.of(text) for text in self._store.multi_get(keys)]
        read_s = time.perf_counter() - began
        # Let the time at most double, so that a single slow read does not count in full.
        self._read_s = min(read_s, 2 * self._read_s) if self._read_s else read_s
        self._mine = entries[self._rank]
        return entries

    def _rank_queues(self, entries: list[_Entry]) -> list[RankQueue]:
        """Return the ranks' queues.

        If a queue has no time per batch, it gets the newest time that its rank has reported.
        """
        rank_queues = [entry.queue for entry in entries]
        for rank, queue in enumerate(rank_queues):
            self._paces[rank] = queue.batch_s or self._paces[rank]
        return [
            queue._replace(batch_s=pace)
            for queue, pace in zip(rank_queues, self._paces, strict=True)
        ]

    def _fits_all(self, mine: RankQueue) -> bool:
        least = self._least_limit
        if least is None:
            return True
        left = self._batches(self._rank)[mine.begun : mine.end]
        return all(batch.samples <= least for batch in left)

    def _fits(self, rank_queues: list[RankQueue], rank: int) -> bool:
        """Return whether this rank's memory has room for the last batch in the queue of `rank`."""
        if self._limit is None:
            return True
        return self._batches(rank)[rank_queues[rank].end - 1].samples <= self._limit

    def _batches(self, rank: int) -> list[LocalStep]:
        if rank not in self._spans:
            shard = decode_shard(self._store.get(_shard_key(self._segment, rank)))
            self._spans[rank] = spans_of(shard)
        return self._spans[rank][self._span]

    def _key(self, rank: int) -> str:
        return _queue_key(self._segment, self._span, rank)


class _Entry(NamedTuple):
    """A queue as stored, with an identifier of the write: the rank and the number of its write.

    Without `write`, if two ranks wrote equal queues, both compare-and-sets would seem to succeed.
    """

    queue: RankQueue
    write: str

    @property
    def text(self) -> str:
        begun, end, batch_s, stance = self.queue
        return f"{begun} {end} {batch_s:.6g} {int(stance)} {self.write}"

    @staticmethod
    def of(text: bytes) -> _Entry:
        begun, end, batch_s, stance, write = text.decode().split(" ")
        return _Entry(RankQueue(int(begun), int(end), float(batch_s), Stance(int(stance))), write)
