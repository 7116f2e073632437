"""Rounds of a partial all-reduce: gradients of those that are ready, nothing of the others.

The protocol is `paceline.core.rounds`. Here are its threads, the store and the all-reduce.

Each rank has a communication thread. It waits for a round to be called, gives what its rank has
ready, and keeps the sum for it; meanwhile the rank computes on. All ranks get the same sums in the
same order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError
from paceline.core.rounds import Call, Drift, Member, Progress, Says, Tally
from paceline.train.sync.base import OnRound, Ranks, Round
from paceline.train.sync.gradients import Gradient

# After so long a wait a rank calls the round: its all-reduce fails if a rank is gone.
_PULSE_S = 4.0
_GO, _ABORT = "go", "abort "


@dataclass(frozen=True)
class Sum:
    """The result of a round: the same on all ranks."""

    total: torch.Tensor  # Σ of the contributions
    contributors: int
    extra: torch.Tensor | None = None  # what rank 0 gave to all, if anything


def spoil(ranks: Ranks, prefix: str, number: int, reason: str) -> bool:
    """Makes a round one that tells why this rank will not come; False: it has been called."""
    word = f"{_ABORT}rank {ranks.rank} {reason}"
    return bool(ranks.asking.compare_set(f"{prefix}/{number}", "", word) == word.encode())


class Rounds:
    """One rank's part in the rounds of a segment.

    The thread that trains calls `offer`, `take` and `finish`. Sums come in the order of rounds. A
    rank that lags behind holds those that it has not taken yet.

    Args:
        ranks: that take part; their group is used by nobody else: two threads on one group give
            wrong sums.
        prefix: of keys in the store, new for each segment.
        length: of a gradient's vector.
        call: who calls a round.
        drift: how far ranks may drift apart.
        on_round: called with each round, in the communication thread.
        extra: length of what rank 0 may `give`.
    """

    def __init__(
        self,
        ranks: Ranks,
        prefix: str,
        length: int,
        call: Call,
        drift: Drift,
        on_round: OnRound | None = None,
        extra: int = 0,
    ) -> None:
        self._rank, self._world = ranks.rank, ranks.world
        self._ranks, self._prefix = ranks, prefix
        self._length, self._drift = length, drift
        self._timeout_s = ranks.timeout.total_seconds()
        self._on_round, self._extra = on_round, extra
        self._changed = threading.Condition()  # its lock is reentrant
        # All below is under the lock.
        self._progress = Progress(ranks.world, call, drift)
        self._member = Member[torch.Tensor](ranks.rank, self._progress)
        self._sums: list[Sum] = []  # that the training thread has not taken
        self._copied_s = 0.0  # what copying took of the gradients that wait for a round
        self._given: torch.Tensor | None = None  # to all, with the next round
        self._error: BaseException | None = None
        self._copier: ThreadPoolExecutor | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-rounds", daemon=True)
        self._thread.start()

    def offer(self, gradient: Gradient | None, *, ends_step: bool = True) -> None:
        """A gradient is to go into a round; None: a step is through that has none.

        Waits while `Member.must_wait` says so.

        Args:
            gradient: what this rank computed.
            ends_step: it is the first of its step.

        Raises:
            PacelineError: a rank has left, or was silent for too long; the message names it.
        """
        with self._changed:
            if gradient is None:
                self._member.offer(None, ends_step=ends_step)
            else:
                self._offer(gradient, ends_step=ends_step)
            self._announce()
        self._wait(lambda: not self._member.must_wait())
        with self._changed:
            self._member.waiting = False

    def take(self) -> list[Sum]:
        """The rounds since the last call, in order.

        Raises:
            PacelineError: see `offer`.
        """
        with self._changed:
            self._check()
            sums, self._sums = self._sums, []
            self._member.take()
            return sums

    def give(self, extra: torch.Tensor) -> None:
        """All ranks get it from rank 0, with one and the same later round if there is one."""
        with self._changed:
            self._given = extra

    @property
    def clocks(self) -> list[int]:
        """Steps that ranks are through with, as the last round told, [W]."""
        with self._changed:
            return self._progress.clocks

    @property
    def ahead(self) -> int:
        """Steps that this rank is ahead of the slowest other one that is still at work."""
        with self._changed:
            return self._member.ahead

    def finish(self) -> list[Sum]:
        """No more comes of this rank: waits until all ranks are through, and gives the last sums.

        Raises:
            PacelineError: see `offer`.
        """
        self._wait(lambda: not self._member.underway)
        with self._changed:
            self._member.through()
            self._announce()
        self._wait(lambda: not self._progress.working)
        self._thread.join()
        if self._copier is not None:
            self._copier.shutdown()
        return self.take()

    def abort(self, reason: str) -> None:
        """This rank leaves in the middle: the others learn it at once instead of waiting."""
        with self._changed:
            if not self._progress.working or self._error is not None:
                return
            number = self._progress.over
            while not spoil(self._ranks, self._prefix, number, reason):
                number += 1  # this round has been called; no round ends while the lock is held
        self._thread.join(timeout=1.0)
        if self._copier is not None:
            self._copier.shutdown(wait=False)

    def _offer(self, gradient: Gradient, *, ends_step: bool) -> None:
        """The lock is held."""
        on_host = gradient.arrive is None
        self._member.offer(gradient.vector, gradient.samples, ends_step=ends_step, on_host=on_host)
        if gradient.arrive is None:
            self._copied_s += gradient.copied_s
            return
        self._copier = self._copier or ThreadPoolExecutor(1, "paceline-copies")
        self._copier.submit(self._arrive, gradient.arrive)

    def _arrive(self, arrive: Callable[[], float]) -> None:
        """A gradient comes to the host, while the device computes on; one after the other."""
        try:
            copied_s = arrive()
            with self._changed:
                self._copied_s += copied_s
                self._member.arrived()
                self._announce()
                self._changed.notify_all()
        except BaseException as error:  # nobody looks at this thread
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._error is not None or until(),
                min(_PULSE_S, deadline - time.monotonic()),
            ):
                if time.monotonic() < deadline:
                    self._announce(calls=True)
                    continue
                slow = [rank for rank in self._progress.working if rank != self._rank]
                self._error = PacelineError(
                    f"waited {self._timeout_s:g} s for ranks {slow}, of which some are stuck or "
                    "gone"
                )
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise PacelineError(
                f"rank {self._rank}, round {self._progress.over}: {self._error}"
            ) from self._error

    def _announce(self, *, calls: bool = False) -> None:
        """Tells what this rank has to tell before a round, and calls it if it must. Under the lock.

        Args:
            calls: in any case.
        """
        progress = self._progress
        if progress.reducing or not progress.working:
            return
        says, key = self._member.announce(), f"{self._prefix}/{progress.over}"
        if says is Says.READY:
            calls |= progress.enough(self._ranks.asking.add(f"{key}/ready", 1))
        if calls or says is Says.CALL:
            self._ranks.asking.compare_set(key, "", _GO)

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
        number = self._progress.over
        word = self._ranks.waiting.get(f"{self._prefix}/{number}").decode()
        if word.startswith(_ABORT):
            raise PacelineError(word.removeprefix(_ABORT))
        called = time.perf_counter()
        with self._changed:
            vector, copied_s = self._contribution()
            extra, self._given = self._given, None
            vector[self._length + 2] = extra is not None
        group = self._ranks.group  # closing the session takes it away
        dist.all_reduce(vector, group=group)
        head = [round(value) for value in vector[self._length :].tolist()]
        if head[2]:
            extra = torch.empty(self._extra) if extra is None else extra
            dist.broadcast(extra, group=group, group_src=0)
        ended = time.perf_counter()
        ages = self._over(head, Sum(vector[: self._length], head[0], extra))
        if self._on_round is not None:
            times = called - began, ended - called, vector.nbytes, copied_s
            self._on_round(Round(number, self._world, head[0], ages, head[1], *times))

    def _contribution(self) -> tuple[torch.Tensor, float]:
        """What this rank gives to the round, and what copying it took; the lock is held.

        After the gradient's vector come: contributors, samples dropped, whether rank 0 gives more,
        the ages' histogram, and what each rank tells of its clock and of whether it is through.
        """
        length, world, tally = self._length, self._world, Tally(self._drift)
        gradients = self._member.contribute(tally)
        self._progress.begin()
        weights = self._drift.weights([born for born, _, _ in gradients])
        vector = torch.empty(length + 3 + len(tally.ages) + 2 * world)
        own, head = vector[:length], vector[length:].zero_()
        if not gradients:
            own.zero_()
        for at, ((_, _, offered), weight) in enumerate(zip(gradients, weights, strict=True)):
            if at == 0:
                torch.mul(offered, weight, out=own)
            else:
                own.add_(offered, alpha=weight)
        head[0], head[1] = tally.contributors, tally.dropped
        head[3 : -2 * world] = torch.tensor(tally.ages)
        head[-2 * world + self._rank] = self._member.told_clock
        head[-world + self._rank] = self._member.done
        copied_s, self._copied_s = self._copied_s, 0.0
        return vector, copied_s

    def _over(self, head: list[int], result: Sum) -> list[int]:
        """A round is over, with these facts and this result; the ages in it."""
        world = self._world
        ages, clocks, done = head[3 : -2 * world], head[-2 * world : -world], head[-world:]
        number = self._progress.over
        if self._rank == 0:
            # Nobody waits for the round before any more; of the last one all have read its key.
            for old in range(number - 1, number + all(done)):
                for part in ("", "/ready"):
                    self._ranks.waiting.delete_key(f"{self._prefix}/{old}{part}")
        with self._changed:
            self._sums.append(result)
            self._progress.end(clocks, [rank for rank in range(world) if done[rank]])
            self._announce()
            self._changed.notify_all()
        return ages
