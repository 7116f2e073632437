"""A segment's batches as a pool: ranks that get on faster take batches over from slower ones.

Under a relaxed synchroniser each rank has a queue: its own batches of a span of steps, as planned.
A rank trains its queue from the front. A rank whose queue is empty takes over the last batch of the
rank that would be the last to finish. So ranks make as many steps as their speeds allow, and each
batch is trained once.

This module decides, without I/O. Ranks (`paceline.train.sync.pool`) keep each `Share` in their
store and change it by compare-and-set; the simulator keeps shares in a list. Both follow the same
protocol::

    while share.left and is_worth_it(shares, rank, batch_s): ...  # `share.begin()`, then train it
    if share.left: ...                                     # `share.leave()`: the others are sooner
    while (other := slowest(shares, rank)) is not None and is_worth_it(shares, rank, batch_s):
        ...                                                # `shares[other].give()`, then train it
    ...                                                    # `share.stop()`

A rank that trains nothing does not learn what its batches take now. One that was held up once would
leave all its batches for good. So after a while it trains one again (`is_due`).

Two rules make sure that each batch finds a rank. A rank that leaves looks at the shares again
afterwards: unless another rank is still at work, it trains its batches itself (`share.resume()`).
A rank that stops looks again, too: if a rank has left batches, it goes on taking over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from msgspec import UNSET

from paceline.core.means import part_due
from paceline.wire.synchronisation import (
    Averaging,
    Hierarchical,
    Pairwise,
    Partial,
    Synchronisation,
)

FASTEST = 1.5  # of the fastest other rank's batches: a rank that needs no longer always goes on
NEWEST = 0.5  # weight of the newest batch in `Pace`
RESTS = 20.0  # times as long as one of its batches: a rank that has trained none tries again
_HALF = 0.5  # of a batch under way is still to be trained, on average


class Stance(IntEnum):
    """What a rank does about the batches of a span."""

    WORKS = 0
    LEAVES = 1  # its queue is for the others, who will have trained it sooner
    STOPPED = 2  # it trains nothing more of this span


class Share(NamedTuple):
    """One rank's queue in a span. Only its owner moves `begun`; only other ranks move `end`."""

    begun: int  # batches of the queue that the owner has begun, from the front
    end: int  # the queue's batches from here on have been taken over by others
    batch_s: float = 0.0  # what a batch takes this rank; 0: unknown
    stance: Stance = Stance.WORKS

    @property
    def left(self) -> int:
        """Batches of the queue that nobody has begun."""
        return self.end - self.begun

    @property
    def finishes_s(self) -> float:
        """How long the owner would need for the rest of its queue."""
        if self.stance is not Stance.WORKS or not self.batch_s:
            return float("inf")
        return (self.left + _HALF) * self.batch_s

    def begin(self, batch_s: float) -> Share:
        """The owner begins its next batch; its batches take `batch_s` of late."""
        return self._replace(begun=self.begun + 1, batch_s=batch_s, stance=Stance.WORKS)

    def give(self) -> Share:
        """Another rank takes over the queue's last batch, number `end` - 1."""
        return self._replace(end=self.end - 1)

    def leave(self) -> Share:
        """The owner leaves the rest of the queue to the others."""
        return self._replace(stance=Stance.LEAVES)

    def resume(self) -> Share:
        """The owner trains on."""
        return self._replace(stance=Stance.WORKS)

    def stop(self) -> Share:
        """The owner trains nothing more of this span."""
        return self._replace(stance=Stance.STOPPED)


def is_pooled(what: Synchronisation) -> bool:
    """Whether ranks take batches over from each other under a synchroniser.

    Not where its rules compare ranks' numbers of steps: under SSP, whose fast ranks wait for slow
    ones, and where each step has its round (eager-SGD), unless the round leaves slow ranks out
    (backup workers).
    """
    if isinstance(what, Averaging | Pairwise):
        return True
    if not isinstance(what, Partial | Hierarchical):
        return False
    rules = what.parameters
    stepwise = rules.paced or (rules.waits and rules.spare is UNSET)
    return rules.lead is None and not stepwise


def ends_span(what: Synchronisation, step: int, *, last: bool) -> bool:
    """Whether a span of pooled batches ends with a step.

    It does where all ranks exchange something after the same step: at a mean of replicas, and at a
    segment's end.

    Args:
        what: the synchroniser; it is pooled.
        step: of the run.
        last: it is the last step of its segment.
    """
    if last or not isinstance(what, Averaging):
        return last
    return part_due(step, what.parameters.every, what.parameters.parts) is not None


def slowest(
    shares: Sequence[Share], rank: int, fits: Callable[[int], bool] = lambda _: True
) -> int | None:
    """The rank that would be the last to finish its queue; None: there is nothing to take over.

    Args:
        shares: of all ranks, [W].
        rank: that asks; its own queue is not looked at.
        fits: whether the asking rank's memory has room for the last batch of a rank's queue.
    """
    able = [k for k, share in enumerate(shares) if k != rank and share.left and fits(k)]
    return max(able, key=lambda k: (shares[k].finishes_s, shares[k].left), default=None)


def is_worth_it(shares: Sequence[Share], rank: int, batch_s: float) -> bool:
    """Whether a rank should begin one more batch: not if the others will be through sooner.

    So nobody waits at a span's end for longer than one of its own batches takes, as far as ranks
    keep their pace.

    Args:
        shares: of all ranks, [W].
        rank: that asks.
        batch_s: what a batch takes this rank; 0: unknown.
    """
    paces = [
        share.batch_s
        for k, share in enumerate(shares)
        if k != rank and share.stance is Stance.WORKS
    ]
    if not (batch_s and paces and all(paces)):
        return True
    left = sum(share.left for share in shares)
    together_s = finish_s(left, len(paces), sum(1 / pace for pace in paces))
    return batch_s <= max(together_s, FASTEST * min(paces))


def finish_s(left: float, ranks: int, per_s: float) -> float:
    """How long ranks at work need for what is left, and for the batches that they are in.

    Args:
        left: batches that nobody has begun.
        ranks: how many are at work.
        per_s: batches that these ranks train in a second, together.
    """
    return (left + _HALF * ranks) / per_s


def is_due(rests_s: float, batch_s: float) -> bool:
    """Whether a rank trains a batch to learn its pace, though the others would be through sooner.

    The others wait for one batch of the rank, so they lose at most one in `RESTS` of their time.

    Args:
        rests_s: how long the rank has trained no batch.
        batch_s: what its batches took last.
    """
    return rests_s >= RESTS * batch_s


def is_looked_after(shares: Sequence[Share], rank: int) -> bool:
    """Whether another rank is at work, and so will see the batches that this rank leaves."""
    return any(share.stance is Stance.WORKS for k, share in enumerate(shares) if k != rank)


def is_left(shares: Sequence[Share], rank: int) -> bool:
    """Whether another rank has left batches that nobody has taken over yet."""
    return any(
        share.left and share.stance is Stance.LEAVES for k, share in enumerate(shares) if k != rank
    )


class Pace:
    """What a rank's batches take of late: a moving mean, in seconds."""

    def __init__(self) -> None:
        self.batch_s = 0.0  # 0: unknown

    def add(self, seconds: float) -> None:
        """A batch took so long, from its begin to the next one's, without waiting for others."""
        before = self.batch_s or seconds
        self.batch_s = before + NEWEST * (seconds - before)
