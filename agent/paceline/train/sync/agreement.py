"""Ranks that leave the loop over the loader early: all after the same step, or it is an error."""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from paceline.train.sync.base import Ranks

_LOOK_S = 0.005
_STILL_S = 30.0  # after an exception: so long, or ten steps, nobody has come any further


def raises() -> bool:
    """Whether an exception ends the loop over the loader, which is closed as by a ``break``.

    Then it is under way, and its newest traceback is of where the loop's frame stands. False where
    that cannot be told: the loop is in a generator.
    """
    frame: FrameType | None = sys._getframe()
    for generators in (False, True):  # out of the loader, and of what is around it
        while frame is not None and _is_generators(frame) == generators:
            frame = frame.f_back
    return frame is not None and any(
        isinstance(one, TracebackType) and one.tb_lasti == frame.f_lasti
        for one in gc.get_referrers(frame)
    )


def _is_generators(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


class Leaving:
    """Tells a loop that all ranks leave after one step from a rank that raised, or leaves alone.

    Without the all-reduce others would train on for a while, and then wait for it. All may leave by
    an exception, and one alone by a ``break``: so whoever leaves waits until all have, or one goes
    on.

    Args:
        ranks: that take part.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._store = ranks, ranks.asking
        self._times = 0  # that all have left
        self._step: int | None = None  # the one in hand,
        self._began = 0.0  # when it did,
        self._took_s = 0.0  # and what the one before took

    def begin(self, step: int) -> None:
        """This rank goes on to a step.

        Raises:
            PacelineError: another has left its loop before that; the message says who.
        """
        now = time.monotonic()
        self._took_s = now - self._began if self._step == step - 1 else 0.0
        self._step, self._began = step, now
        self._store.set(self._at(self._ranks.rank), str(step))
        # In this order: either this rank sees that one has left, or that one sees where this is.
        if not self._store.check([self._key("count")]):
            return
        left = self._left()
        first = min(left, key=lambda rank: left[rank])  # others may have left because it did
        if left[first] < step:
            self._refuse(first, left[first], self._ranks.rank, step)

    def leave(self, step: int, raised: bool) -> None:
        """This rank has left its loop in a step: waits until all have.

        Args:
            step: which one.
            raised: by an exception. Others may be in a collective of the script's own, where they
                wait for this rank: so it waits for less long.

        Raises:
            PacelineError: another went on, or all are silent for too long; the message says who.
        """
        rank, world = self._ranks.rank, self._ranks.world
        if self._told(step) == world:
            self._store.compare_set(self._key("all"), "", "ok")
        for steps in self._looking(step, raised):
            if self._store.check([self._key("all")]):
                break
            for other, there in enumerate(steps):
                if there is not None and there > step:
                    self._refuse(rank, step, other, there)
        word = self._store.get(self._key("all")).decode()
        if word != "ok":
            raise PacelineError(word)
        self._times += 1

    def through(self, step: int, raised: bool) -> None:
        """This rank is at the end of an epoch's last step; if it raised, it waits until all are.

        Args:
            step: which one.
            raised: see `leave`.

        Raises:
            PacelineError: others are silent for too long; the message says who.
        """
        self._store.set(self._at(self._ranks.rank), str(step + 1))
        if raised:
            for steps in self._looking(step, raised):
                if all(there is not None and there > step for there in steps):
                    break

    def where(self) -> str:
        """In which steps the ranks are, and which have left: where to look when a rank is gone."""
        with contextlib.suppress(RuntimeError):
            steps = [self._read(self._at(rank)) for rank in range(self._ranks.world)]
            left = [f"; rank {rank} left in step {step}" for rank, step in self._left().items()]
            return f"ranks were last seen in steps {steps}" + "".join(left)
        return "rank 0 has ended"

    def _looking(self, step: int, raised: bool) -> Iterator[list[int | None]]:
        """In which steps ranks are, again and again, while any comes further, or leaves."""
        patience_s = self._ranks.timeout.total_seconds()
        if raised:
            patience_s = min(patience_s, max(_STILL_S, 10 * self._took_s))
        rank, seen, since = self._ranks.rank, "", time.monotonic()
        while time.monotonic() - since <= patience_s:
            steps = [self._read(self._at(other)) for other in range(self._ranks.world)]
            left = self._left()
            if str((steps, left)) != seen:
                seen, since = str((steps, left)), time.monotonic()
            yield steps
            time.sleep(_LOOK_S)
        why = f"rank {rank} left its loop in step {step} and waited {patience_s:g} s for the others"
        self._store.compare_set(self._key("all"), "", why)
        raise PacelineError(f"{why}; {self.where()}")

    def _refuse(self, rank: int, left: int, other: int, step: int) -> None:
        why = (
            f"rank {rank} left its loop in step {left}, but rank {other} went on to step {step}: "
            "it raised, or the script leaves at different steps"
        )
        self._store.compare_set(self._key("all"), "", why)
        raise PacelineError(why)

    def tell(self, step: int, why: str) -> None:
        """This rank ends in a step: whoever goes on, or waits for it, fails. Does not wait."""
        with contextlib.suppress(RuntimeError):  # the leader, whose store it is, has gone first
            self._told(step)
            word = f"rank {self._ranks.rank} left its loop in step {step}: {why}"
            self._store.compare_set(self._key("all"), "", word)

    def _told(self, step: int) -> int:
        self._store.set(self._key(str(self._ranks.rank)), str(step))
        return int(self._store.add(self._key("count"), 1))

    def _left(self) -> dict[int, int]:
        """The steps in which ranks have left."""
        steps = {rank: self._read(self._key(str(rank))) for rank in range(self._ranks.world)}
        return {rank: step for rank, step in steps.items() if step is not None}

    def _read(self, key: str) -> int | None:
        return int(self._store.get(key)) if self._store.check([key]) else None

    def _at(self, rank: int) -> str:
        return f"left-loop/at/{rank}"

    def _key(self, name: str) -> str:
        return f"left-loop/{self._times}/{name}"
