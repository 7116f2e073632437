"""What a relaxed synchroniser is to the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import nn

_KEPT = 4  # groupings whose process groups are kept for when they come again

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from paceline.train.parts import Step


@dataclass(frozen=True)
class Ranks:
    """Who takes part, and how they reach each other."""

    groups: dict[str, dist.ProcessGroup]  # for nothing but this; nobody else keeps one, see `close`
    store: TCPStore  # for calls that return at once, from any thread
    blocking_store: TCPStore  # a second connection to it, for one thread's calls that block
    rank: int
    world: int
    timeout: timedelta
    name: str = ""  # of their group; "": of all ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """Theirs."""
        return self.groups[self.name]

    @cached_property
    def another_blocking_store(self) -> TCPStore:
        """A third connection, for another thread whose calls block."""
        made: TCPStore = self.blocking_store.clone()  # type: ignore[attr-defined]
        return made

    def among(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """This rank's group of several, with ranks counted from 0. All ranks call it at once.

        Args:
            groups: each rank is in one of them.
        """
        mine = next(group for group in groups if self.rank in group)
        if (name := str(groups)) not in self.groups:
            parts = [key for key in self.groups if key]
            if len(parts) == _KEPT:
                dist.destroy_process_group(self.groups.pop(parts[0]))
            for group in groups:
                made = dist.new_group(list(group), self.timeout, backend="gloo")
                if group is mine:
                    self.groups[name] = made
        return replace(self, name=name, rank=mine.index(self.rank), world=len(mine))

    def close(self) -> None:
        """Ends the groups, each of which has threads and connections, unless one is in use still.

        They end with their last reference, which therefore must not be in a cycle: the garbage
        collection of a forked process, such as a loader's, would end threads that are not there.
        """
        while self.groups:
            _, group = self.groups.popitem()
            with suppress(ValueError):  # ended before: for others to fail, or by the script
                dist.destroy_process_group(group)


@dataclass(frozen=True)
class Round:
    """What a round was; see `wire.RoundRecord`."""

    number: int
    world: int
    contributors: int
    staleness: list[int]  # gradients that went in, by how many rounds old; the last: or older
    dropped: int  # samples whose gradients were too old
    waited_s: float
    reduced_s: float
    bytes: int
    copied_s: float = 0.0


OnRound = Callable[[Round], None]  # may be called in another thread, never two at once


class Synchroniser(Protocol):
    """One segment's exchange on one rank; made when it begins, over when all have met.

    Methods are called in the thread that trains. They may take gradients out of ``.grad``, put
    others in, and step the optimiser: such steps are not told of.
    """

    goes_on: bool  # with the next segment, if that has the same one; else all meet at its end
    weighs: bool  # .grad holds the rank's weight · M times its batch's mean; else the mean itself

    def stepping(self, step: Step, optimiser: torch.optim.Optimizer) -> None:
        """The optimiser is about to step, in the loop's body: never, once or more often."""
        ...

    def body_done(self, step: Step, optimiser: torch.optim.Optimizer) -> None:
        """The loop's body is through with a step."""
        ...

    def meet(self, optimiser: torch.optim.Optimizer) -> None:
        """Waits until all ranks are here, after the same step; then replicas are equal.

        Gradients that the script accumulates over steps stay in ``.grad``.

        Raises:
            PacelineError: a rank left or was silent for too long; the message names it.
        """
        ...

    def abort(self, reason: str) -> None:
        """This rank leaves in the middle of the segment: others that wait for it fail."""
        ...


def no_gradient(parameters: list[nn.Parameter]) -> None:
    """What optimisers leave alone."""
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def kept(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Within it gradients may be changed: afterwards they are as before."""
    before = [parameter.grad for parameter in parameters]
    no_gradient(parameters)
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
