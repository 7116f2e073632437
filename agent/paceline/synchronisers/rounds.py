"""Rounds of a partial all-reduce: gradients of those that are ready, nothing of the others.

Each rank has a communication thread. It waits for a round to be called, gives what its rank has
ready, and keeps the sum for it; meanwhile the rank computes on. All ranks get the same sums in the
same order. Who calls a round is a `Call`: RNA's probes, or as soon as so many are ready.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.synchronisers._base import Ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_WAITING = 4  # gradients of a rank that wait for the same round, before it waits too
_GO, _ABORT = "go", "abort "


@dataclass(frozen=True)
class Gradient:
    """What a rank computed for one update."""

    vector: torch.Tensor  # weighted, then what else is summed up; see `Rounds`
    samples: int  # that it is of


@dataclass(frozen=True)
class Round:
    """What came of one: the same on all ranks, but for the times."""

    number: int
    total: torch.Tensor  # Σ of the contributions
    contributors: int
    staleness: list[int]  # gradients that went in, by how many rounds old they were
    dropped: int  # samples whose gradients were too old
    waited_s: float  # until it was called, since this rank had finished the one before
    reduced_s: float  # from then until its sum was there


def spoil(ranks: Ranks, prefix: str, number: int, reason: str) -> bool:
    """Makes a round one that tells why this rank will not come; False: it has been called."""
    word = f"{_ABORT}rank {ranks.rank} {reason}"
    return bool(ranks.asking.compare_set(f"{prefix}/{number}", "", word) == word.encode())


class Call(Protocol):
    """Who calls a round."""

    def ready(self, number: int, working: list[int]) -> bool:
        """This rank is ready for a round; whether it calls it. Once for each round.

        Args:
            number: of the round.
            working: ranks that were not through with their batches after the round before.
        """
        ...


@dataclass(frozen=True)
class Probes:
    """RNA: the first to be ready of so many ranks drawn at random (RNA, Sec. 3.2).

    1 is eager-SGD's majority, the world its solo.
    """

    rank: int
    count: int
    seed: int

    def ready(self, number: int, working: list[int]) -> bool:
        """See `Call.ready`. All ranks draw the same."""
        draw = random.Random(f"{self.seed} {number}")
        return self.rank in draw.sample(working, min(self.count, len(working)))


@dataclass(frozen=True)
class Quorum:
    """As soon as so many ranks are ready: n-soft's M/n, or all but b backup workers."""

    store: TCPStore
    prefix: str
    count: int

    def ready(self, number: int, working: list[int]) -> bool:
        """See `Call.ready`."""
        ready = self.store.add(f"{self.prefix}/{number}/ready", 1)
        return ready >= min(self.count, len(working))


@dataclass
class _Pending:
    gradient: Gradient
    born: int  # rounds that were in the parameters it was computed with


@dataclass(frozen=True)
class Limits:
    """How far ranks may drift apart.

    Args:
        staleness: rounds after which a gradient is dropped.
        lead: steps that a rank may be ahead of the slowest; None: any.
        mean: gradients that waited for the same round count as one, the newest most (RNA, Eq. 3);
            else as their sum.
        waits: a rank goes on only with a round that it has not seen yet.
    """

    staleness: int = 4
    lead: int | None = None
    mean: bool = True
    waits: bool = False


class Rounds:
    """One rank's part in the rounds of a segment.

    The thread that trains calls `offer`, `take`, `through` and `finish`. Sums come in the order of
    rounds.

    Args:
        ranks: that take part; their group is used by nobody else: two threads on one group give
            wrong sums.
        prefix: of keys in the store, new for each segment.
        length: of a gradient's vector.
        call: who calls a round.
        limits: how far ranks may drift apart.
        told: called with each round, in the communication thread.
    """

    def __init__(
        self,
        ranks: Ranks,
        prefix: str,
        length: int,
        call: Call,
        limits: Limits,
        told: Callable[[Round], None] | None = None,
    ) -> None:
        self._group, self._rank, self._world = ranks.group, ranks.rank, ranks.world
        self._ranks, self._prefix = ranks, prefix
        self._store, self._own_store = ranks.asking, ranks.waiting
        self._length, self._call, self._limits = length, call, limits
        self._timeout_s = ranks.timeout.total_seconds()
        self._told = told
        self._changed = threading.Condition()  # its lock is reentrant
        # All below is under the lock.
        self._pending: deque[_Pending] = deque()
        self._sums: deque[Round] = deque()
        self._taken = 0  # rounds that the training thread has
        self._round = 0  # that the communication thread is in
        self._announced = -1  # for which round the rank has said that it is ready
        self._busy = False  # a round is being reduced
        self._clock = 0  # steps that are through
        self._idle = False  # a step without samples is through: ready, with nothing
        self._done = False  # no more will come,
        self._clocks = [0] * ranks.world  # as the last round told of all ranks,
        self._working = list(range(ranks.world))  # and who was not done
        self._dropped = 0  # samples since the last round
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-rounds", daemon=True)
        self._thread.start()

    def offer(self, gradient: Gradient | None) -> None:
        """A step is through; its gradient, or None if it had no samples, goes into a round.

        Waits while this rank is too far ahead.

        Raises:
            PacelineError: a rank has left, or was silent for too long; the message names it.
        """
        with self._changed:
            self._clock += 1
            self._idle = gradient is None
            if gradient is not None:
                self._pending.append(_Pending(gradient, self._taken))
        self._announce()
        self._wait(lambda: not self._ahead())

    def take(self) -> list[Round]:
        """The rounds since the last call, in order.

        Raises:
            PacelineError: see `offer`.
        """
        with self._changed:
            self._check()
            found = list(self._sums)
            self._sums.clear()
            self._taken += len(found)
            return found

    @property
    def ahead(self) -> int:
        """Steps that this rank is ahead of the slowest that is still at work."""
        with self._changed:
            others = [self._clocks[rank] for rank in self._working if rank != self._rank]
            return self._clock - min(others, default=self._clock)

    def through(self) -> None:
        """No more comes of this rank: the others do not wait for it any more."""
        with self._changed:
            self._done = True
        self._announce()

    def finish(self) -> list[Round]:
        """Waits until all ranks are through, and gives the last sums.

        Raises:
            PacelineError: see `offer`.
        """
        self.through()
        self._wait(lambda: not self._working)
        self._thread.join()
        return self.take()

    def abort(self, reason: str) -> None:
        """This rank leaves in the middle: the others learn it at once instead of waiting."""
        with self._changed:
            if not self._working:
                return
            number = self._round
            while not spoil(self._ranks, self._prefix, number, reason):
                number += 1  # that one has been called, and runs; none ends while the lock is held
        self._thread.join(timeout=1.0)

    def _ahead(self) -> bool:
        """Whether this rank shall wait for the others."""
        if self._limits.waits and not self._sums:
            return True
        if len(self._pending) > _WAITING:
            return True
        return self._limits.lead is not None and self.ahead > self._limits.lead

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._error is not None or until(), self._timeout_s
            ):
                slow = [rank for rank in self._working if rank != self._rank]
                raise PacelineError(
                    f"rank {self._rank} waited {self._timeout_s:g} s in round {self._round} for "
                    f"ranks {slow}, of which some are stuck or gone"
                )
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise PacelineError(
                f"rank {self._rank}, round {self._round}: {self._error}"
            ) from self._error

    def _announce(self) -> None:
        """Tells, once a round, that this rank is ready, and calls the round if it is to."""
        with self._changed:
            number, working = self._round, self._working
            ready = bool(self._pending) or self._idle or (self._done and self._rank in working)
            if self._busy or not ready or self._announced == number or not working:
                return
            self._announced = number
            if self._call.ready(number, working):
                self._store.compare_set(f"{self._prefix}/{number}", "", _GO)

    def _run(self) -> None:
        try:
            while self._working:
                self._reduce()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _reduce(self) -> None:
        self._announce()
        began = time.perf_counter()
        key = f"{self._prefix}/{self._round}"
        word = self._own_store.get(key).decode()
        if word.startswith(_ABORT):
            raise PacelineError(word.removeprefix(_ABORT))
        called = time.perf_counter()
        with self._changed:
            self._busy = True
            vector = self._contribution()
        dist.all_reduce(vector, group=self._group)
        ended = time.perf_counter()
        length, bins = self._length, self._limits.staleness + 1
        head = vector[length:].tolist()
        staleness = [round(count) for count in head[2 : 2 + bins]]
        clocks = head[2 + bins : 2 + bins + self._world]
        done = head[2 + bins + self._world :]
        found = Round(
            self._round,
            vector[:length],
            round(head[0]),
            staleness,
            round(head[1]),
            called - began,
            ended - called,
        )
        if self._rank == 0 and self._round:  # nobody waits for the one before any more
            for key in ("", "/ready"):
                self._own_store.delete_key(f"{self._prefix}/{self._round - 1}{key}")
        with self._changed:
            self._sums.append(found)
            self._clocks = [round(clock) for clock in clocks]
            self._working = [rank for rank in range(self._world) if not round(done[rank])]
            self._round += 1
            self._busy = False
            self._changed.notify_all()
        if self._told is not None:
            self._told(found)

    def _contribution(self) -> torch.Tensor:
        """What this rank gives to the round; the lock is held."""
        length, bins, limits = self._length, self._limits.staleness + 1, self._limits
        vector = torch.zeros(length + 2 + bins + 2 * self._world)
        head = vector[length:]
        fresh = []
        for one in self._pending:
            age = self._round - one.born
            if age <= limits.staleness:
                fresh.append((one, age))
                head[2 + age] += 1
            else:
                self._dropped += one.gradient.samples
        self._pending.clear()
        self._idle = False
        if fresh:
            oldest = max(age for _, age in fresh)
            weights = [oldest - age + 1 if limits.mean else 1 for _, age in fresh]
            scale = sum(weights) if limits.mean else 1
            for (one, _), weight in zip(fresh, weights, strict=True):
                vector[:length].add_(one.gradient.vector, alpha=weight / scale)
            head[0] = 1
        head[1] = self._dropped
        self._dropped = 0
        head[2 + bins + self._rank] = self._clock
        head[2 + bins + self._world + self._rank] = self._done
        return vector
