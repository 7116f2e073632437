"""What a relaxed synchroniser is to the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from paceline.plan import Step


@dataclass(frozen=True)
class Ranks:
    """Who takes part, and how they reach each other."""

    group: dist.ProcessGroup  # of all ranks, for nothing but this
    asking: TCPStore  # for short questions, from any thread;
    waiting: TCPStore  # for what blocks, which would hold up the others
    rank: int
    world: int
    timeout: timedelta


class Synchroniser(Protocol):
    """One segment's exchange on one rank; made when it begins, over when all have met.

    Methods are called in the thread that trains, around each step of the optimiser. It may take
    gradients out of ``.grad``, put others in, and step the optimiser once more.
    """

    goes_on: bool  # with the next segment, if that has the same one; else all ranks meet before it
    weighs: bool  # .grad holds the rank's part of the global batch's mean; else its own batch's

    def stepping(self, plan: Step, optimiser: torch.optim.Optimizer) -> None:
        """The optimiser is about to step."""
        ...

    def stepped(self, plan: Step, optimiser: torch.optim.Optimizer) -> None:
        """It has."""
        ...

    def through(self) -> None:
        """The segment's last step is done: nobody shall wait for this rank. Does not wait."""
        ...

    def meet(self, optimiser: torch.optim.Optimizer) -> None:
        """The segment is over: waits for all ranks; then replicas are equal.

        Raises:
            PacelineError: a rank left or was silent for too long; the message names it.
        """
        ...

    def abort(self, reason: str) -> None:
        """This rank leaves in the middle of the segment."""
        ...


def no_gradient(parameters: list[nn.Parameter]) -> None:
    """What optimisers leave alone."""
    for parameter in parameters:
        parameter.grad = None
