"""Rounds of a partial all-reduce on one rank: ready ranks contribute gradients, others zeros.

The protocol is in `paceline.core.rounds`. This module adds threads, the store and the all-reduce.

Each rank has a communication thread. The thread waits for a round to be called, contributes the
rank's pending gradients, and keeps the sum until the training thread takes it. Meanwhile the rank
continues to compute. All ranks get the same sums in the same order. The vector that a round reduces
also has counts and the ranks' progress (`RoundOutcome`), so that all ranks get the same progress
with the same sum.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError
from paceline.core.member import Member, RoundAction, RoundCounts, WaitReason
from paceline.core.rounds import Call, Drift, RoundProgress
from paceline.train.sync.base import Channel, Ranks, Round
from paceline.train.sync.gradients import Gradient

logger = logging.getLogger(__name__)

# A rank that waits calls a round each time this many seconds have passed. If another rank is gone,
# the all-reduce of the round fails, and the wait ends with an error.
_PULSE_S = 4.0
# A wait for other ranks that lasts this many seconds is logged.
_LOG_S = 1.0
_GO, _ABORT = "go", "abort "
# Number of counts in the vector: contributors, dropped samples, and ranks that give a further
# vector.
_COUNTS = 3


@dataclass(frozen=True)
class Sum:
    """The result of a round, the same on all ranks.

    `total` is the sum of the contributions. `extra` is the vector that rank 0 gave to all ranks, if
    any.
    """

    total: torch.Tensor
    contributors: int
    extra: torch.Tensor | None = None


class Rounds:
    """Participation of one rank in the rounds of a segment.

    The thread that trains calls `offer`, `take` and `finish`. They raise a PacelineError if a rank
    has left or was silent for too long; the message names this rank. No other object may use the
    ranks' process group, because two threads that use one group get wrong sums. The channel's
    `on_round` is called in the communication thread. `extra` is the length of the vector that rank
    0 may `give`.
    """

    def __init__(
        self, channel: Channel, length: int, call: Call, drift: Drift, extra: int = 0
    ) -> None:
        ranks = channel.ranks
        self._rank, self._world = ranks.rank, ranks.world
        self._ranks, self._calls = ranks, RoundCalls(ranks, channel.prefix)
        self._drift, self._vector = drift, RoundVector(length, drift.bins, ranks.world)
        self._timeout_s = ranks.timeout.total_seconds()
        self._on_round, self._extra = channel.on_round, extra
        # A condition's lock is reentrant. The lock protects all attributes below.
        self._changed = threading.Condition()
        self._progress = RoundProgress(ranks.world, call, drift)
        self._member = Member[torch.Tensor](ranks.rank, self._progress)
        self._sums: list[Sum] = []
        # Seconds that copying the pending gradients took.
        self._copied_s = 0.0
        # On rank 0, the vector that all ranks get with the next round.
        self._given: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._copier: ThreadPoolExecutor | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-rounds", daemon=True)
        self._thread.start()

    def offer(self, gradient: Gradient | None, *, ends_step: bool = True) -> None:
        """Offer a gradient to the next rounds; None: a step has ended without a gradient.

        Wait while this rank has a `WaitReason`; a wait of more than a second is logged. `ends_step`
        is True for the first of a step's gradients, so that the step counts once.
        """
        with self._changed:
            if gradient is None:
                self._member.offer(None, ends_step=ends_step)
            else:
                self._offer(gradient, ends_step=ends_step)
            self._announce()
        self._wait(self._member.wait_reason)
        with self._changed:
            self._member.waiting = None

    def take(self) -> list[Sum]:
        """Return the results of the rounds that ended since the last call, in order."""
        with self._changed:
            self._check()
            sums, self._sums = self._sums, []
            self._member.take()
            return sums

    def give(self, extra: torch.Tensor) -> None:
        """Send a vector from rank 0 to all ranks, with the next round that has not started."""
        with self._changed:
            self._given = extra

    @property
    def ahead(self) -> int:
        """Return the number of steps by which this rank leads the slowest rank with steps left."""
        with self._changed:
            return self._member.ahead

    def finish(self) -> list[Sum]:
        """Wait until no rank has steps left; return the remaining sums."""
        self._wait(lambda: WaitReason.COPYING if self._member.underway else None)
        with self._changed:
            self._member.finish()
            self._announce()
        self._wait(lambda: WaitReason.SYNC_POINT if self._progress.working else None)
        self._thread.join()
        if self._copier is not None:
            self._copier.shutdown()
        return self.take()

    def abort(self, reason: str) -> None:
        """Leave in the middle of the segment; the other ranks notice it at once."""
        with self._changed:
            if not self._progress.working or self._error is not None:
                return
            # No round ends while this thread has the lock, so the number of rounds does not change.
            self._calls.abort(self._progress.rounds_done, reason)
        self._thread.join(timeout=1.0)
        if self._copier is not None:
            self._copier.shutdown(wait=False)

    def _offer(self, gradient: Gradient, *, ends_step: bool) -> None:
        """Offer a gradient to this rank's `Member`. The caller holds the lock."""
        vector, on_host = gradient.vector, gradient.arrive is None
        self._member.offer(vector, gradient.samples, ends_step=ends_step, on_host=on_host)
        if gradient.arrive is None:
            self._copied_s += gradient.copied_s
            return
        self._copier = self._copier or ThreadPoolExecutor(1, "paceline-copies")
        self._copier.submit(self._arrive, gradient.arrive)

    def _arrive(self, arrive: Callable[[], float]) -> None:
        """Wait in the copying thread until the oldest gradient in transit is on the host."""
        try:
            copied_s = arrive()
            with self._changed:
                self._copied_s += copied_s
                self._member.arrived()
                self._announce()
                self._changed.notify_all()
        # The training thread raises this error later.
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _wait(self, reason: Callable[[], WaitReason | None]) -> None:
        """Wait until `reason` returns None. A long wait is logged once.

        During the wait, call a round every `_PULSE_S` seconds; the round fails if a rank is gone.
        """
        began = time.monotonic()
        log_at, pulse_at, deadline = began + _LOG_S, began + _PULSE_S, began + self._timeout_s
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._error is not None or reason() is None,
                min(log_at, pulse_at, deadline) - time.monotonic(),
            ):
                now = time.monotonic()
                if now >= log_at:
                    log_at = math.inf
                    self._log(reason())
                if now >= deadline:
                    slow = self._others(self._progress.working)
                    self._error = PacelineError(
                        f"waited {self._timeout_s:g} s for ranks {slow}, some of which are stuck "
                        "or gone"
                    )
                elif now >= pulse_at:
                    pulse_at = now + _PULSE_S
                    self._announce(calls=True)
            self._check()

    def _log(self, reason: WaitReason | None) -> None:
        """Log why this rank waits, who is slow, and the rounds' progress.

        The caller holds the lock.
        """
        progress, member = self._progress, self._member
        if reason is None:
            return
        logger.info(
            "rank %d has waited %g s after relaxed step %d of its segment: %s. Ranks that have "
            "done the fewest steps, as far as this rank knows: %s. Round %s %s",
            self._ranks.of_run(self._rank),
            _LOG_S,
            member.clock,
            reason.value,
            self._others(member.slowest),
            self._calls.key(progress.rounds_done),
            "is being reduced" if progress.reducing else "has not been called",
        )

    def _others(self, ranks: Iterable[int]) -> list[int]:
        return [self._ranks.of_run(rank) for rank in ranks if rank != self._rank]

    def _check(self) -> None:
        if self._error is not None:
            rank, number = self._ranks.of_run(self._rank), self._progress.rounds_done
            raise PacelineError(f"rank {rank}, round {number}: {self._error}") from self._error

    def _announce(self, *, calls: bool = False) -> None:
        """Call the round or count this rank as ready, as `Member.announce` decides.

        `calls`: call the round in any case. The caller holds the lock.
        """
        progress = self._progress
        if progress.reducing or not progress.working:
            return
        action, number = self._member.announce(), progress.rounds_done
        if action is RoundAction.READY:
            calls |= progress.enough(self._calls.count_ready(number))
        if calls or action is RoundAction.CALL:
            self._calls.call(number)

    def _run(self) -> None:
        try:
            while self._progress.working:
                self._reduce()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _reduce(self) -> None:
        began = time.perf_counter()
        number = self._progress.rounds_done
        self._calls.wait(number)
        called = time.perf_counter()
        with self._changed:
            vector, extra, copied_s = self._contribution()
        # The group is read only once, because `Ranks.close` removes it.
        group = self._ranks.group
        dist.all_reduce(vector, group=group)
        total, outcome = self._vector.unpack(vector)
        if outcome.extra:
            extra = torch.empty(self._extra) if extra is None else extra
            dist.broadcast(extra, group=group, group_src=0)
        ended = time.perf_counter()
        self._end(outcome, Sum(total, outcome.contributors, extra))
        if self._on_round is not None:
            counts = outcome.contributors, outcome.ages, outcome.dropped
            times = called - began, ended - called
            self._on_round(
                Round(number, self._world, *counts, *times, bytes=vector.nbytes, copied_s=copied_s)
            )

    def _contribution(self) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        """Return the vector to reduce, rank 0's extra vector, and the seconds of copying.

        The caller holds the lock.
        """
        tally = RoundCounts(self._drift)
        entries = self._member.contribute(tally)
        self._progress.begin()
        weights = self._drift.weights(len(entries))
        extra, self._given = self._given, None
        copied_s, self._copied_s = self._copied_s, 0.0
        vector = self._vector.pack(
            [(vector, weight) for (_, _, vector), weight in zip(entries, weights, strict=True)],
            tally,
            extra=extra is not None,
            rank=self._rank,
            clock=self._member.reported_clock,
            finished=self._member.done,
        )
        return vector, extra, copied_s

    def _end(self, outcome: RoundOutcome, result: Sum) -> None:
        number = self._progress.rounds_done
        if self._rank == 0:
            # All ranks have read the key of the previous round. If no rank has further steps, this
            # round is the last one, so its keys are deleted, too.
            last = len(outcome.finished) == self._world
            for old in range(number - 1, number + last):
                self._calls.forget(old)
        with self._changed:
            self._sums.append(result)
            self._progress.end(outcome.clocks, outcome.finished)
            self._announce()
            self._changed.notify_all()


class RoundCalls:
    """Caller of a segment's rounds, through keys in the ranks' store.

    Two threads may use it, but only one of them calls `wait` and `forget`.
    """

    def __init__(self, ranks: Ranks, prefix: str) -> None:
        self._ranks, self._prefix = ranks, prefix

    def key(self, number: int) -> str:
        """Return the store's key that is set to call a round."""
        return f"{self._prefix}/{number}"

    def call(self, number: int) -> None:
        """Call a round, unless it has been called."""
        self._ranks.store.compare_set(self.key(number), "", _GO)

    def count_ready(self, number: int) -> int:
        """Count this rank as ready for a round; return the number of ranks that are ready now."""
        return int(self._ranks.store.add(f"{self.key(number)}/ready", 1))

    def abort(self, number: int, reason: str) -> None:
        """End all ranks' rounds, because this rank leaves.

        `number` is the current or the next round. A round that has been called completes; `wait`
        for the round after it raises the reason on all ranks.
        """
        word = f"{_ABORT}rank {self._ranks.of_run(self._ranks.rank)} {reason}"
        while self._ranks.store.compare_set(self.key(number), "", word) != word.encode():
            number += 1

    def wait(self, number: int) -> None:
        """Wait until a round is called; raise a PacelineError if a rank has left instead."""
        word = self._ranks.blocking_store.get(self.key(number)).decode()
        if word.startswith(_ABORT):
            raise PacelineError(word.removeprefix(_ABORT))

    def forget(self, number: int) -> None:
        """Delete the keys of a round that no rank waits for any longer."""
        for part in ("", "/ready"):
            self._ranks.blocking_store.delete_key(f"{self.key(number)}{part}")


@dataclass(frozen=True)
class RoundOutcome:
    """Counts and progress of the ranks, which all ranks get from a round.

    `contributors` is the number of ranks with a gradient in the round. `dropped` is the number of
    samples whose gradients were too old. `extra`: rank 0 broadcasts a vector after the round.
    `ages`: see `RoundCounts.ages`. `clocks`: number of steps that each rank has done, [W].
    `finished`: ranks that have no further steps.
    """

    contributors: int
    dropped: int
    extra: bool
    ages: list[int]
    clocks: list[int]
    finished: list[int]


class RoundVector:
    """Layout of a round's vector: gradients, then the entries of `RoundOutcome` as numbers.

    `length` is the length of a gradient's vector. `bins` is the number of gradient ages that a
    round distinguishes.
    """

    def __init__(self, length: int, bins: int, world: int) -> None:
        self._length, self._world = length, world
        self._size = length + _COUNTS + bins + 2 * world

    def pack(
        self,
        gradients: Sequence[tuple[torch.Tensor, float]],
        tally: RoundCounts,
        *,
        extra: bool,
        rank: int,
        clock: int,
        finished: bool,
    ) -> torch.Tensor:
        """Build one rank's vector: its weighted gradients, then its entries of `RoundOutcome`."""
        world, vector = self._world, torch.empty(self._size)
        own, outcome = vector[: self._length], vector[self._length :].zero_()
        if not gradients:
            own.zero_()
        for at, (gradient, weight) in enumerate(gradients):
            if at == 0:
                torch.mul(gradient, weight, out=own)
            else:
                own.add_(gradient, alpha=weight)
        outcome[0], outcome[1], outcome[2] = tally.contributors, tally.dropped, extra
        outcome[_COUNTS : -2 * world] = torch.tensor(tally.ages)
        outcome[-2 * world + rank] = clock
        outcome[-world + rank] = finished
        return vector

    def unpack(self, vector: torch.Tensor) -> tuple[torch.Tensor, RoundOutcome]:
        """Split the sum of all ranks' vectors into the sum of gradients and the `RoundOutcome`."""
        world = self._world
        outcome = [round(value) for value in vector[self._length :].tolist()]
        contributors, dropped, extra = outcome[:_COUNTS]
        ages, clocks = outcome[_COUNTS : -2 * world], outcome[-2 * world : -world]
        finished = [rank for rank, done in enumerate(outcome[-world:]) if done]
        of_all = RoundOutcome(contributors, dropped, bool(extra), ages, clocks, finished)
        return vector[: self._length], of_all
