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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError
from paceline.train.sync.base import Ranks, Round, Told
from paceline.train.sync.gradients import Gradient
from paceline.wire import AGES, MOST_WAITING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_PULSE_S = 4.0  # a rank that has waited so long calls a round: it fails if a rank is gone
_GO, _ABORT = "go", "abort "


@dataclass(frozen=True)
class Sum:
    """What came of a round: the same on all ranks."""

    total: torch.Tensor  # Σ of the contributions
    contributors: int
    extra: torch.Tensor | None = None  # what rank 0 gave to all, if anything


def spoil(ranks: Ranks, prefix: str, number: int, reason: str) -> bool:
    """Makes a round one that tells why this rank will not come; False: it has been called."""
    word = f"{_ABORT}rank {ranks.rank} {reason}"
    return bool(ranks.asking.compare_set(f"{prefix}/{number}", "", word) == word.encode())


class Call(Protocol):
    """Who calls a round."""

    leftovers: bool  # a gradient that came while a round was reduced makes ready for the next one

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

    1 is eager-SGD's majority, the world its solo. A rank is ready when it is through with a step,
    as in RNA's Fig. 10, not for what a round came too early for: else one round would
    follow the other where ranks end steps at about the same time. What a round left goes along with
    the rank's next gradient, or with a round that another calls.
    """

    leftovers = False
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

    leftovers = True
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
    there: bool  # else it is still on its way to the host
    copied_s: float = 0.0


@dataclass(frozen=True)
class Limits:
    """How far ranks may drift apart. A rank waits only for ranks that have done fewer steps.

    So none waits for one that waits elsewhere: for its next segment, or in the script's own
    collective.

    Args:
        staleness: rounds after which a gradient is dropped; None: never.
        lead: steps that a rank may be ahead of the slowest; None: any.
        mean: gradients that waited for the same round count as one, the newest most (RNA,
            Sec. 3.3); else as their sum.
        waits: after its k-th step a rank waits until k rounds are over.
        paced: only ranks that are through with k steps call the k-th round.
    """

    staleness: int | None = 4
    lead: int | None = None
    mean: bool = True
    waits: bool = False
    paced: bool = False

    def fresh(self, age: int) -> bool:
        """Whether a gradient so many rounds old goes into a round."""
        return self.staleness is None or age <= self.staleness


class Rounds:
    """One rank's part in the rounds of a segment.

    The thread that trains calls `offer`, `take`, `through` and `finish`. Sums come in the order of
    rounds. A rank that lags behind holds those that it has not taken yet.

    Args:
        ranks: that take part; their group is used by nobody else: two threads on one group give
            wrong sums.
        prefix: of keys in the store, new for each segment.
        length: of a gradient's vector.
        call: who calls a round.
        limits: how far ranks may drift apart.
        told: called with each round, in the communication thread.
        extra: length of what rank 0 may `give`.
    """

    def __init__(
        self,
        ranks: Ranks,
        prefix: str,
        length: int,
        call: Call,
        limits: Limits,
        told: Told | None = None,
        extra: int = 0,
    ) -> None:
        self._rank, self._world = ranks.rank, ranks.world
        self._ranks, self._prefix = ranks, prefix
        self._length, self._call, self._limits = length, call, limits
        self._timeout_s = ranks.timeout.total_seconds()
        self._told, self._extra = told, extra
        self._changed = threading.Condition()  # its lock is reentrant
        # All below is under the lock.
        self._pending: deque[_Pending] = deque()
        self._sums: deque[Sum] = deque()
        self._taken = 0  # rounds that the training thread has
        self._round = 0  # that the communication thread is in
        self._announced = -1  # for which round the rank has said that it is ready
        self._busy = False  # a round is being reduced
        self._clock = 0  # steps that are through
        self._idle = False  # a step without a gradient is through: ready, with nothing
        self._waiting = False  # the training thread, for a round
        self._done = False  # no more will come,
        self._clocks = [0] * ranks.world  # as the last round told of all ranks,
        self._working = list(range(ranks.world))  # and who was not done
        self._dropped = 0  # samples since the last round
        self._given: torch.Tensor | None = None  # to all, with the next one
        self._error: BaseException | None = None
        self._copier: ThreadPoolExecutor | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-rounds", daemon=True)
        self._thread.start()

    def offer(self, gradient: Gradient | None, *, ends_step: bool = True) -> None:
        """A gradient is to go into a round; None: a step is through that has none.

        Waits while this rank is too far ahead.

        Args:
            gradient: what this rank computed.
            ends_step: it is the first of its step.

        Raises:
            PacelineError: a rank has left, or was silent for too long; the message names it.
        """
        with self._changed:
            self._clock += ends_step
            self._idle = gradient is None
            if gradient is not None:
                one = _Pending(gradient, self._taken, gradient.arrive is None, gradient.copied_s)
                self._pending.append(one)
                if not one.there:
                    self._copier = self._copier or ThreadPoolExecutor(1, "paceline-copies")
                    self._copier.submit(self._arrive, one)
        self._announce()
        self._wait(lambda: not self._ahead())

    def take(self) -> list[Sum]:
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

    def give(self, extra: torch.Tensor) -> None:
        """All ranks get it from rank 0, with one and the same later round if there is one."""
        with self._changed:
            self._given = extra

    @property
    def clocks(self) -> list[int]:
        """Steps that ranks are through with, as the last round told, [W]."""
        with self._changed:
            return self._clocks

    @property
    def ahead(self) -> int:
        """Steps that this rank is ahead of the slowest that is still at work."""
        with self._changed:
            others = [self._clocks[rank] for rank in self._working if rank != self._rank]
            return self._clock - min(others, default=self._clock)

    def finish(self) -> list[Sum]:
        """No more comes of this rank: waits until all ranks are through, and gives the last sums.

        Raises:
            PacelineError: see `offer`.
        """
        self._wait(lambda: not self._on_their_way)
        with self._changed:
            self._done = True
        self._announce()
        self._wait(lambda: not self._working)
        self._thread.join()
        if self._copier is not None:
            self._copier.shutdown()
        return self.take()

    def abort(self, reason: str) -> None:
        """This rank leaves in the middle: the others learn it at once instead of waiting."""
        with self._changed:
            if not self._working or self._error is not None:
                return
            number = self._round
            while not spoil(self._ranks, self._prefix, number, reason):
                number += 1  # that one has been called, and runs; none ends while the lock is held
        self._thread.join(timeout=1.0)
        if self._copier is not None:
            self._copier.shutdown(wait=False)

    def _arrive(self, one: _Pending) -> None:
        """A gradient comes to the host, while the device computes on."""
        assert one.gradient.arrive is not None
        try:
            one.copied_s = one.gradient.arrive()
            with self._changed:
                one.there = True
                self._changed.notify_all()
            self._announce()
        except BaseException as error:  # nobody looks at this thread
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    @property
    def _on_their_way(self) -> int:
        return sum(not one.there for one in self._pending)

    @property
    def _through(self) -> int:
        """Steps whose gradients are there."""
        return self._clock - self._on_their_way

    def _ahead(self) -> bool:
        """Whether this rank shall wait for the others; see `Limits`."""
        if self._overfull or (self._limits.waits and self._round < self._clock):
            return True
        if self._on_their_way > 1:  # the device computes one step beside the copy of another
            return True
        return self._limits.lead is not None and self.ahead > self._limits.lead

    @property
    def _overfull(self) -> bool:
        """Whether gradients wait for a round that nobody else may call for long."""
        return len(self._pending) - self._on_their_way > MOST_WAITING

    def _wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            if not until():  # a round may have ended since, whose leftovers nobody looked for
                self._waiting = True
                self._announce()
            while not self._changed.wait_for(
                lambda: self._error is not None or until(),
                min(_PULSE_S, deadline - time.monotonic()),
            ):
                if time.monotonic() < deadline:
                    self._announce(calls=True)
                    continue
                slow = [rank for rank in self._working if rank != self._rank]
                self._error = PacelineError(
                    f"waited {self._timeout_s:g} s for ranks {slow}, of which some are stuck or "
                    "gone"
                )
            self._waiting = False
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise PacelineError(
                f"rank {self._rank}, round {self._round}: {self._error}"
            ) from self._error

    def _announce(self, *, calls: bool = False) -> None:
        """Tells, once a round, that this rank is ready, and calls the round if it is to."""
        with self._changed:
            number, working = self._round, self._working
            if self._busy or not working:
                return
            calls |= self._overfull
            if self._announced < number and self._ready():
                self._announced = number
                calls |= self._call.ready(number, working)
            if calls:
                self._ranks.asking.compare_set(f"{self._prefix}/{number}", "", _GO)

    def _ready(self) -> bool:
        """Whether a round would be of use to this rank, or need not wait for it."""
        if self._done and self._rank in self._working:
            return True
        if self._limits.paced and self._through <= self._round:
            return False
        ages = (self._round - one.born for one in self._pending if one.there)
        return self._idle or any(self._limits.fresh(age) for age in ages)

    def _run(self) -> None:
        try:
            while self._working:
                self._reduce()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _reduce(self) -> None:
        with self._changed:
            if self._waiting or self._call.leftovers:
                self._announce()
        began = time.perf_counter()
        key = f"{self._prefix}/{self._round}"
        word = self._ranks.waiting.get(key).decode()
        if word.startswith(_ABORT):
            raise PacelineError(word.removeprefix(_ABORT))
        called = time.perf_counter()
        with self._changed:
            self._busy = True
            vector, copied_s = self._contribution()
            extra, self._given = self._given, None
            vector[self._length + 2] = extra is not None
        group = self._ranks.group  # closing the session takes it away
        dist.all_reduce(vector, group=group)
        length, world = self._length, self._world
        head = [round(one) for one in vector[length:].tolist()]
        if head[2]:
            extra = torch.empty(self._extra) if extra is None else extra
            dist.broadcast(extra, group=group, group_src=0)
        ended = time.perf_counter()
        ages, clocks, done = head[3 : -2 * world], head[-2 * world : -world], head[-world:]
        last = all(done)
        if self._rank == 0:
            # Nobody waits for the one before any more; and who is in the last one has read its key.
            for number in range(self._round - 1, self._round + last):
                for part in ("", "/ready"):
                    self._ranks.waiting.delete_key(f"{self._prefix}/{number}{part}")
        with self._changed:
            self._sums.append(Sum(vector[:length], head[0], extra))
            self._clocks = clocks
            self._working = [rank for rank in range(world) if not done[rank]]
            number, self._round = self._round, self._round + 1
            self._busy = False
            self._changed.notify_all()
        if self._told is not None:
            times = called - began, ended - called, vector.nbytes, copied_s
            self._told(Round(number, world, head[0], ages, head[1], *times))

    def _contribution(self) -> tuple[torch.Tensor, float]:
        """What this rank gives to the round, and what copying it took; the lock is held."""
        length, world, limits = self._length, self._world, self._limits
        bins = AGES if limits.staleness is None else min(limits.staleness + 1, AGES)
        vector = torch.empty(length + 3 + bins + 2 * world)
        own, head = vector[:length], vector[length:].zero_()
        fresh = []
        given = [one for one in self._pending if one.there]
        self._pending = deque(one for one in self._pending if not one.there)
        for one in given:
            age = self._round - one.born
            if limits.fresh(age):
                fresh.append((one, age))
                head[3 + min(age, bins - 1)] += 1
            else:
                self._dropped += one.gradient.samples
        self._idle = False
        if not fresh:
            own.zero_()
        else:
            oldest = max(age for _, age in fresh)
            weights = [oldest - age + 1 if limits.mean else 1 for _, age in fresh]
            scale = sum(weights) if limits.mean else 1
            torch.mul(fresh[0][0].gradient.vector, weights[0] / scale, out=own)
            for (one, _), weight in zip(fresh[1:], weights[1:], strict=True):
                own.add_(one.gradient.vector, alpha=weight / scale)
            head[0] = 1
        head[1] = self._dropped
        self._dropped = 0
        head[3 + bins + self._rank] = self._through
        head[3 + bins + world + self._rank] = self._done
        return vector, sum(one.copied_s for one in given)
