"""Interface between relaxed synchronisation and the training loop."""

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

# `Ranks.among` keeps the process groups for reuse. If ranks are divided in more ways than this, it
# destroys the oldest groups.
_KEPT_DIVISIONS = 4

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from paceline.train.plan_shard import LocalStep


@dataclass(frozen=True)
class Ranks:
    """Participants of a synchronisation, with their process groups and connections to the store.

    No other object may keep a reference to the process groups; `close` says why. `store` is for
    calls that return at once, from any thread. `blocking_store` is a second connection to the same
    store, for the blocking calls of one thread. `name` is the key of the participants' process
    group in `groups`; "" means all ranks of the run. `members` has the numbers of these ranks in
    the run; () means all ranks of the run.
    """

    groups: dict[str, dist.ProcessGroup]
    store: TCPStore
    blocking_store: TCPStore
    rank: int
    world: int
    timeout: timedelta
    name: str = ""
    members: Sequence[int] = ()

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the process group of these ranks."""
        return self.groups[self.name]

    def of_run(self, rank: int) -> int:
        """Convert the number of one of these ranks to its number in the run."""
        return self.members[rank] if self.members else rank

    @cached_property
    def another_blocking_store(self) -> TCPStore:
        """Return a third connection, for another thread's blocking calls."""
        made: TCPStore = self.blocking_store.clone()  # type: ignore[attr-defined]
        return made

    def among(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """Return a `Ranks` of this rank's group, which numbers its ranks from 0. Collective."""
        mine = next(group for group in groups if self.rank in group)
        if (name := str(groups)) not in self.groups:
            parts = [key for key in self.groups if key]
            if len(parts) == _KEPT_DIVISIONS:
                dist.destroy_process_group(self.groups.pop(parts[0]))
            for group in groups:
                made = dist.new_group(list(group), self.timeout, backend="gloo")
                if group is mine:
                    self.groups[name] = made
        rank = mine.index(self.rank)
        return replace(self, name=name, rank=rank, world=len(mine), members=mine)

    def close(self) -> None:
        """End the process groups, each of which has threads and connections.

        A group ends with its last reference. This reference must not be in a reference cycle:
        garbage collection in a forked process, such as a DataLoader worker, would try to end
        threads that the fork does not have.
        """
        while self.groups:
            _, group = self.groups.popitem()
            # `abort` may have destroyed the group already, so that other ranks fail. The script may
            # also have destroyed it.
            with suppress(ValueError):
                dist.destroy_process_group(group)


@dataclass(frozen=True)
class Round:
    """A finished round; see `wire.RoundRecord`.

    `staleness` counts the applied gradients by age in rounds; its last entry includes older ones.
    `dropped` is the number of samples whose gradients were too old. `waited_s` is how long it
    took to call the round, while ranks computed; see "response time" in docs/glossary.md.
    """

    number: int
    world: int
    contributors: int
    staleness: list[int]
    dropped: int
    waited_s: float
    reduced_s: float
    bytes: int
    copied_s: float = 0.0


# Called with each finished round, perhaps in another thread. Calls never overlap.
OnRound = Callable[[Round], None]


@dataclass(frozen=True)
class Channel:
    """Process groups, store and keys with which ranks exchange vectors in one segment.

    All keys in the store start with `prefix`, which is new for each segment.
    """

    ranks: Ranks
    prefix: str
    on_round: OnRound | None = None

    def reported_once(self) -> Channel:
        """Return a channel whose rounds only rank 0 reports: `on_round` is None on other ranks."""
        return self if self.ranks.rank == 0 else replace(self, on_round=None)


@dataclass(frozen=True)
class Replica:
    """A rank's replica of the model. `parameters` have the same order on all ranks."""

    parameters: list[nn.Parameter]
    optimiser: torch.optim.Optimizer


class GradientSync(Protocol):
    """Synchronisation of one segment on one rank. Its use ends with `synchronise` or `abort`.

    Methods are called in the thread that trains. Methods may remove gradients from ``.grad``, put
    other gradients there, and step the optimiser. `stepping` is not called for the steps that
    methods themselves make.

    If `goes_on` is True and the next segment has the same synchronisation, this object continues in
    that segment; otherwise all ranks synchronise first. If `weighs` is False, the gradient in
    ``.grad`` is the mean over the rank's batch. If it is True, the mean is multiplied by the
    batch's weight and by the number of ranks.
    """

    goes_on: bool
    weighs: bool

    def stepping(self, step: LocalStep, optimiser: torch.optim.Optimizer) -> None:
        """Prepare a step of the optimiser. The loop's body may step any number of times."""
        ...

    def body_done(self, step: LocalStep, optimiser: torch.optim.Optimizer) -> None:
        """Handle the end of an iteration of the loop. Each iteration has its own `LocalStep`."""
        ...

    def end_step(self, step: LocalStep) -> None:
        """End a step of the plan, in which this rank had no batch, one batch or several."""
        ...

    def synchronise(self, optimiser: torch.optim.Optimizer) -> None:
        """Synchronise all ranks after the same step: wait for all, and make replicas equal.

        Gradients that the script accumulates over several steps stay in ``.grad``.

        Raises:
            PacelineError: a rank left or was silent for too long; the message names it.
        """
        ...

    def abort(self, reason: str) -> None:
        """Leave in the middle of the segment, so that ranks that wait for this rank fail."""
        ...


def no_gradient(parameters: list[nn.Parameter]) -> None:
    """Remove all gradients, so that optimisers leave these parameters unchanged."""
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def kept(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Set gradients aside, and restore them on exit."""
    before = [parameter.grad for parameter in parameters]
    no_gradient(parameters)
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
