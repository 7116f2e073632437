"""Sharing of a segment's batches: faster ranks take batches over from slower ones.

A *span* is a range of steps that ends with a step after which all ranks exchange data. Under
relaxed synchronisation each rank has a queue: its planned batches of a span. A rank trains its
queue from the front. A rank whose queue is empty takes over the last batch of the rank that would
be the last to finish. So ranks make as many steps as their speeds allow, and each batch is trained
once.

Ranks (`paceline.train.sync.pool`) keep each queue in their store and change it by compare-and-set;
the simulator keeps queues in a list. Ranks and the simulator follow the same protocol::

    while queue.left and is_worth_it(queues, rank, batch_s): ...  # `queue.begin()`, then train it
    if queue.left: ...                                    # `queue.leave()`: others finish it sooner
    while (other := slowest(queues, rank)) is not None and is_worth_it(queues, rank, batch_s):
        ...                                                # `queues[other].give()`, then train it
    ...                                                    # `queue.stop()`

A rank that trains nothing cannot measure its current speed. A rank that was slow once would then
leave all its batches to other ranks forever. So after a while it trains a batch again (`is_due`).

Two rules ensure that every batch is trained. A rank that leaves its queue checks the queues again
afterwards: if no other rank is at work any more, it trains its batches itself (`queue.resume()`). A
rank that stops checks the queues again, too: if another rank has left batches, it takes them over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from msgspec import UNSET

from paceline.core.replicas import part_due
from paceline.wire.synchronisation import (
    Averaging,
    Hierarchical,
    Pairwise,
    Partial,
    Synchronisation,
)

# A rank always begins one more batch if its time per batch is at most this multiple of the fastest
# other rank's.
FASTEST = 1.5
# Weight of the newest batch in the moving mean of `Pace`.
NEWEST = 0.5
# A rank that has trained no batch for this multiple of its batch time trains one again.
RESTS = 20.0
# Average fraction of a rank's current batch that the rank has yet to train.
_HALF = 0.5


class Stance(IntEnum):
    """A rank's decision about the batches in its queue: train them, or leave them to others."""

    WORKS = 0
    # The rank leaves the rest of its queue to other ranks, which will finish it sooner.
    LEAVES = 1
    # The rank trains no more batches of this span.
    STOPPED = 2


class RankQueue(NamedTuple):
    """One rank's queue in a span.

    Only the rank itself, the queue's owner, changes `begun`. Only other ranks change `end`.
    """

    # Number of batches at the front of the queue that the owner has begun.
    begun: int
    # Other ranks have taken over all batches from this number to the end of the queue.
    end: int
    # Seconds that the owner takes for a batch; 0: unknown.
    batch_s: float = 0.0
    stance: Stance = Stance.WORKS

    @property
    def left(self) -> int:
        """Number of batches of the queue that no rank has begun."""
        return self.end - self.begun

    @property
    def finishes_s(self) -> float:
        """Seconds that the owner needs for the rest of its queue.

        Infinite if the owner does not train its queue, or if its time per batch is unknown.
        """
        if self.stance is not Stance.WORKS or not self.batch_s:
            return float("inf")
        return (self.left + _HALF) * self.batch_s

    def begin(self, batch_s: float) -> RankQueue:
        """Return the queue after the owner begins a batch; `batch_s` is its recent batch time."""
        return self._replace(begun=self.begun + 1, batch_s=batch_s, stance=Stance.WORKS)

    def give(self) -> RankQueue:
        """Return the queue after another rank takes over the last batch, number `end` - 1."""
        return self._replace(end=self.end - 1)

    def leave(self) -> RankQueue:
        """Return the queue after the owner leaves the rest of the queue to other ranks."""
        return self._replace(stance=Stance.LEAVES)

    def resume(self) -> RankQueue:
        """Return the queue after the owner resumes training its queue."""
        return self._replace(stance=Stance.WORKS)

    def stop(self) -> RankQueue:
        """Return the queue after the owner stops training batches of this span."""
        return self._replace(stance=Stance.STOPPED)


def is_pooled(what: Synchronisation) -> bool:
    """Return True if ranks take batches over from each other under a synchronisation.

    A rank that takes over batches makes more steps than other ranks. SSP prevents this, because a
    rank that is too many steps ahead waits. Eager-SGD prevents it, because its k-th all-reduce
    round follows the k-th step of the ranks. With backup workers the k-th round also follows the
    k-th step, but it leaves slow ranks out, so ranks take over batches.
    """
    if isinstance(what, Averaging | Pairwise):
        return True
    if not isinstance(what, Partial | Hierarchical):
        return False
    rules = what.parameters
    stepwise = rules.paced or (rules.waits and rules.spare is UNSET)
    return rules.lead is None and not stepwise


def ends_span(what: Synchronisation, step: int, *, last: bool) -> bool:
    """Return True if a span of pooled batches ends after the given step.

    A span ends with a step after which all ranks exchange data: when replicas are averaged, and at
    a segment's end (`last`).
    """
    if last or not isinstance(what, Averaging):
        return last
    return part_due(step, what.parameters.every, what.parameters.parts) is not None


def slowest(
    rank_queues: Sequence[RankQueue], rank: int, fits: Callable[[int], bool] = lambda _: True
) -> int | None:
    """Return the rank that would finish its queue last; None if no batch can be taken over.

    `rank`, the caller, is skipped. `fits` returns True if the caller's memory has room for the last
    batch of a rank's queue.
    """
    able = [k for k, queue in enumerate(rank_queues) if k != rank and queue.left and fits(k)]
    return max(able, key=lambda k: (rank_queues[k].finishes_s, rank_queues[k].left), default=None)


def is_worth_it(rank_queues: Sequence[RankQueue], rank: int, batch_s: float) -> bool:
    """Return True if a rank should begin one more batch, rather than leave it to faster ranks.

    With this rule, and if ranks keep their speeds, no rank waits at a span's end for longer than
    one of its own batches takes. `batch_s` is the rank's time per batch; 0: unknown.
    """
    paces = [
        queue.batch_s
        for k, queue in enumerate(rank_queues)
        if k != rank and queue.stance is Stance.WORKS
    ]
    if not (batch_s and paces and all(paces)):
        return True
    left = sum(queue.left for queue in rank_queues)
    together_s = finish_s(left, len(paces), sum(1 / pace for pace in paces))
    return batch_s <= max(together_s, FASTEST * min(paces))


def finish_s(left: float, ranks: int, per_s: float) -> float:
    """Return the seconds that ranks need to finish their current batches and the remaining ones.

    `ranks` ranks are training; together they train `per_s` batches per second. `left` batches have
    not begun.
    """
    return (left + _HALF * ranks) / per_s


def is_due(rests_s: float, batch_s: float) -> bool:
    """Return True if a rank that trained nothing for `rests_s` s must train, to measure its speed.

    The other ranks wait for this one batch, which took `batch_s` seconds before, so they lose at
    most 1 / `RESTS` of their time.
    """
    return rests_s >= RESTS * batch_s


def has_working_peer(rank_queues: Sequence[RankQueue], rank: int) -> bool:
    """Return True if another rank still trains: it will find the batches that this rank leaves."""
    return any(queue.stance is Stance.WORKS for k, queue in enumerate(rank_queues) if k != rank)


def is_left(rank_queues: Sequence[RankQueue], rank: int) -> bool:
    """Return True if another rank has left batches that no rank has taken over yet."""
    return any(
        queue.left and queue.stance is Stance.LEAVES
        for k, queue in enumerate(rank_queues)
        if k != rank
    )


class Pace:
    """The recent time per batch of a rank: a moving mean, in seconds."""

    def __init__(self) -> None:
        # Mean seconds per batch; 0: unknown.
        self.batch_s = 0.0

    def add(self, seconds: float) -> None:
        """Add the time of a batch.

        `seconds` is the time from the batch's start to the start of the next batch, without waits
        for other ranks.
        """
        before = self.batch_s or seconds
        self.batch_s = before + NEWEST * (seconds - before)
