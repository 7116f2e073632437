"""Ranks that leave the loop over the loader early: all after the same step, or it is an error."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.synchronisers._base import Ranks

_LOOK_S = 0.005


class Leaving:
    """Tells a loop that all ranks leave after one step from a rank that raised, or leaves alone.

    Without the all-reduce others would train on for a while, and then wait for it. When a loop is
    closed nothing tells an exception from a ``break``: so whoever leaves waits until all have, or
    one goes on.

    Args:
        ranks: that take part.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._store = ranks, ranks.asking
        self._times = 0  # that all have left

    def begin(self, step: int) -> None:
        """This rank goes on to a step.

        Raises:
            PacelineError: another has left its loop before that; the message says who.
        """
        self._store.set(self._at(self._ranks.rank), str(step))
        # In this order: either this rank sees that one has left, or that one sees where this is.
        if not self._store.check([self._key("count")]):
            return
        left = self._left()
        first = min(left, key=lambda rank: left[rank])  # others may have left because it did
        if left[first] < step:
            self._refuse(first, left[first], self._ranks.rank, step)

    def leave(self, step: int) -> None:
        """This rank has left its loop in a step: waits until all have.

        Raises:
            PacelineError: another went on, or is silent for too long; the message says who.
        """
        rank, world = self._ranks.rank, self._ranks.world
        if self._told(step) == world:
            self._store.compare_set(self._key("all"), "", "ok")
        timeout_s = self._ranks.timeout.total_seconds()
        deadline = time.monotonic() + timeout_s
        while not self._store.check([self._key("all")]):
            for other in range(world):
                there = self._read(self._at(other))
                if there is not None and there > step:
                    self._refuse(rank, step, other, there)
            if time.monotonic() > deadline:
                missing = sorted(set(range(world)) - self._left().keys())
                raise PacelineError(
                    f"rank {rank} left its loop in step {step} and waited {timeout_s:g} s for "
                    f"ranks {missing}"
                )
            time.sleep(_LOOK_S)
        word = self._store.get(self._key("all")).decode()
        if word != "ok":
            raise PacelineError(word)
        self._times += 1

    def where(self) -> str:
        """In which steps the ranks are, and which have left: where to look when a rank is gone."""
        with contextlib.suppress(RuntimeError):
            steps = [self._read(self._at(rank)) for rank in range(self._ranks.world)]
            left = [f"; rank {rank} left in step {step}" for rank, step in self._left().items()]
            return f"ranks were last seen in steps {steps}" + "".join(left)
        return "rank 0 has ended"

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
