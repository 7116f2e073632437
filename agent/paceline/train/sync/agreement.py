"""Detects whether ranks leave the loop over the loader at different steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from paceline.train.sync.base import Ranks

_POLL_S = 0.005
# A rank whose loop raised waits for the other ranks until none of them has made progress for this
# many seconds, or for the time of ten steps if that is longer.
_NO_PROGRESS_S = 30.0


class LoopAgreement:
    """Agreement that all ranks leave the loop after the same step.

    Without the all-reduce, other ranks would train on for a while after one rank left, and then
    wait for that rank. A rank that leaves cannot know whether the others leave, too: an exception
    may end the loop on all ranks, but a ``break`` may end it on one rank only. So a rank that
    leaves waits until all ranks have left, or until another rank has started a later step.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._store = ranks, ranks.store
        # The number of times that all ranks have left the loop so far.
        self._times = 0
        # The current step, the time at which it began, and the duration of the step before it.
        self._step: int | None = None
        self._began = 0.0
        self._took_s = 0.0

    def begin(self, step: int) -> None:
        """Start a step; raise a PacelineError if another rank left its loop before that step."""
        now = time.monotonic()
        self._took_s = now - self._began if self._step == step - 1 else 0.0
        self._step, self._began = step, now
        self._store.set(self._at(self._ranks.rank), str(step))
        # The check comes after the step is announced: so either this rank sees that another rank
        # has left, or the rank that leaves sees that this rank has started the step.
        if not self._store.check([self._key("count")]):
            return
        left = self._left()
        # Name the rank that left at the earliest step: other ranks may have left because of it.
        first = min(left, key=lambda rank: left[rank])
        if left[first] < step:
            self._refuse(first, left[first], self._ranks.rank, step)

    def leave(self, step: int, raised: bool) -> None:
        """Leave the loop in a step, and wait until all ranks have left.

        If an exception ended the loop (`raised`), other ranks may wait for this rank in a
        collective of the script, so this rank waits for a shorter time.

        Raises:
            PacelineError: another rank continued, or no rank makes progress; the message names the
                ranks.
        """
        rank, world = self._ranks.rank, self._ranks.world
        if self._count(step) == world:
            self._store.compare_set(self._key("all"), "", "ok")
        for steps in self._poll_steps(step, raised):
            if self._store.check([self._key("all")]):
                break
            for other, reached in enumerate(steps):
                if reached is not None and reached > step:
                    self._refuse(rank, step, other, reached)
        word = self._store.get(self._key("all")).decode()
        if word != "ok":
            raise PacelineError(word)
        self._times += 1

    def end_epoch(self, step: int, raised: bool) -> None:
        """Announce that this rank has ended its last step of the epoch.

        If an exception ended the loop (`raised`), wait until all ranks have ended the step. Raise a
        PacelineError if no rank makes progress; the message has the ranks' steps.
        """
        self._store.set(self._at(self._ranks.rank), str(step + 1))
        if raised:
            for steps in self._poll_steps(step, raised):
                if all(reached is not None and reached > step for reached in steps):
                    break

    def where(self) -> str:
        """Describe the ranks' steps, and which ranks have left, for error messages."""
        with contextlib.suppress(RuntimeError):
            steps = [self._read(self._at(rank)) for rank in range(self._ranks.world)]
            left = [f"; rank {rank} left in step {step}" for rank, step in self._left().items()]
            return f"ranks were last seen in steps {steps}" + "".join(left)
        return "rank 0 has ended"

    def _poll_steps(self, step: int, raised: bool) -> Iterator[list[int | None]]:
        """Yield the ranks' steps repeatedly; raise if they make no progress for too long."""
        patience_s = self._ranks.timeout.total_seconds()
        if raised:
            patience_s = min(patience_s, max(_NO_PROGRESS_S, 10 * self._took_s))
        rank, seen, since = self._ranks.rank, "", time.monotonic()
        while time.monotonic() - since <= patience_s:
            steps = [self._read(self._at(other)) for other in range(self._ranks.world)]
            left = self._left()
            if str((steps, left)) != seen:
                seen, since = str((steps, left)), time.monotonic()
            yield steps
            time.sleep(_POLL_S)
        why = f"rank {rank} left its loop in step {step} and waited {patience_s:g} s for the others"
        self._store.compare_set(self._key("all"), "", why)
        raise PacelineError(f"{why}; {self.where()}")

    def _refuse(self, rank: int, left: int, other: int, step: int) -> None:
        why = (
            f"rank {rank} left its loop in step {left}, but rank {other} continued to step {step}: "
            "the loop raised an error, or the script leaves it at different steps"
        )
        self._store.compare_set(self._key("all"), "", why)
        raise PacelineError(why)

    def tell(self, step: int, why: str) -> None:
        """Announce that this rank leaves its loop in a step, so that ranks waiting for it fail."""
        # The store may have ended with rank 0.
        with contextlib.suppress(RuntimeError):
            self._count(step)
            word = f"rank {self._ranks.rank} left its loop in step {step}: {why}"
            self._store.compare_set(self._key("all"), "", word)

    def _count(self, step: int) -> int:
        self._store.set(self._key(str(self._ranks.rank)), str(step))
        return int(self._store.add(self._key("count"), 1))

    def _left(self) -> dict[int, int]:
        steps = {rank: self._read(self._key(str(rank))) for rank in range(self._ranks.world)}
        return {rank: step for rank, step in steps.items() if step is not None}

    def _read(self, key: str) -> int | None:
        return int(self._store.get(key)) if self._store.check([key]) else None

    def _at(self, rank: int) -> str:
        return f"left-loop/at/{rank}"

    def _key(self, name: str) -> str:
        return f"left-loop/{self._times}/{name}"
