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

    groups: dict[str, dist.ProcessGroup]  # for this alone; nobody else may keep one, see `close`
    store: TCPStore  # for calls that return at once, from any thread
    blocking_store: TCPStore  # a second connection to it, for one thread's calls that block
    rank: int
    world: int
    timeout: timedelta
    name: str = ""  # of their process group; "": all ranks of the run
    members: Sequence[int] = ()  # the run's numbers of these ranks; (): all ranks of the run

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of these ranks."""
        return self.groups[self.name]

    def of_run(self, rank: int) -> int:
        """The run's number of one of these ranks."""
        return self.members[rank] if self.members else rank

    @cached_property
    def another_blocking_store(self) -> TCPStore:
        """A third connection, for another thread whose calls block."""
        made: TCPStore = self.blocking_store.clone()  # type: ignore[attr-defined]
        return made

    def among(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """This rank's group of several, in which ranks count from 0. All ranks call it at once.

        Args:
            groups: of ranks. Each rank is in one group.
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
        rank = mine.index(self.rank)
        return replace(self, name=name, rank=rank, world=len(mine), members=mine)

    def close(self) -> None:
        """Ends the process groups, each of which has threads and connections.

        A group that is still in use ends with its last reference. That reference must not be in a
        cycle: the garbage collection of a forked process, as of a loader, would end threads that
        the fork does not have.
        """
        while self.groups:
            _, group = self.groups.popitem()
            with suppress(ValueError):  # ended before: for others to fail, or by the script
                dist.destroy_process_group(group)


@dataclass(frozen=True)
class Round:
    """One finished round; see `wire.RoundRecord`."""

    number: int
    world: int
    contributors: int
    staleness: list[int]  # gradients that went in, by age in rounds; the last: that age or more
    dropped: int  # samples whose gradients were too old
    waited_s: float  # response time; see the glossary
    reduced_s: float
    bytes: int
    copied_s: float = 0.0


OnRound = Callable[[Round], None]  # may be called in another thread, never two at once


class Synchroniser(Protocol):
    """One segment's exchange on one rank: made when the segment begins, over when all have met.

    Methods are called in the thread that trains. They may take gradients out of ``.grad``, put
    others in, and step the optimiser. `stepping` is not called for steps that they make themselves.
    """

    goes_on: bool  # into the next segment if that has the same synchroniser; else all meet first
    weighs: bool  # .grad holds weight · M times the mean over the rank's batch; else that mean

    def stepping(self, step: Step, optimiser: torch.optim.Optimizer) -> None:
        """The optimiser is about to step. Called any number of times in the loop's body."""
        ...

    def body_done(self, step: Step, optimiser: torch.optim.Optimizer) -> None:
        """The loop's body has ended. Each body of a rank has a `Step` object of its own."""
        ...

    def end_step(self, step: Step) -> None:
        """This rank is through with a step, also if it had no batch in it, or several."""
        ...

    def meet(self, optimiser: torch.optim.Optimizer) -> None:
        """Waits until all ranks are here, after the same step. Afterwards replicas are equal.

        Gradients that the script accumulates over several steps stay in ``.grad``.

        Raises:
            PacelineError: a rank left or was silent for too long; the message names it.
        """
        ...

    def abort(self, reason: str) -> None:
        """This rank leaves in the middle of the segment. Ranks that wait for it fail."""
        ...


def no_gradient(parameters: list[nn.Parameter]) -> None:
    """Removes all gradients: optimisers leave such parameters as they are."""
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def kept(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Sets gradients aside, and puts them back afterwards."""
    before = [parameter.grad for parameter in parameters]
    no_gradient(parameters)
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
