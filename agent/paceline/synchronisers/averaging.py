"""Local steps, and now and then the mean of all replicas: local SGD, one-shot averaging."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from paceline.plan import Step
from paceline.synchronisers._base import Ranks, no_gradient
from paceline.synchronisers.gradients import averaged


class Averaging:
    """Each rank steps by itself; every so many steps parameters become their mean over ranks.

    The mean is weighted by what each rank trained with since the last one.

    Args:
        ranks: that take part.
        parameters: that are trained, in the same order on all ranks.
        every: steps between two means (H of local SGD); None: only when ranks meet.
    """

    goes_on, weighs = True, False

    def __init__(self, ranks: Ranks, parameters: list[nn.Parameter], every: int | None) -> None:
        self._ranks, self._parameters, self._every = ranks, parameters, every
        self._work = 0.0  # since the last mean: Σ of the steps' weights,
        self._steps = 0  # and how many, the same on all ranks

    def stepping(self, plan: Step, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.stepping`."""
        if plan.samples:
            self._work += plan.weight
        else:
            no_gradient(self._parameters)

    def stepped(self, plan: Step, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.stepped`."""
        self._steps += 1
        if self._every is not None and (plan.step + 1) % self._every == 0:
            self._mean()

    def through(self) -> None:
        """See `Synchroniser.through`."""

    def meet(self, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.meet`. The optimiser's state becomes the same, too."""
        if self._steps:
            self._mean()
        alike(optimiser, self._parameters, self._ranks)

    def abort(self, reason: str) -> None:
        """See `Synchroniser.abort`. The others fail in their next collective."""

    def _mean(self) -> None:
        averaged([p.data for p in self._parameters], self._work, self._ranks.group)
        self._work, self._steps = 0.0, 0


def alike(optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter], ranks: Ranks) -> None:
    """Makes the optimiser's state the same on all ranks: means, or one rank's where they differ.

    Else replicas that are equal now would part again at the next step.
    """
    mine = [
        {k: tuple(v.shape) for k, v in optimiser.state.get(p, {}).items() if torch.is_tensor(v)}
        for p in parameters
    ]
    all_ranks: list[list[dict[str, tuple[int, ...]]]] = [[] for _ in range(ranks.world)]
    dist.all_gather_object(all_ranks, mine, group=ranks.group)
    fullest = max(range(ranks.world), key=lambda rank: sum(map(len, all_ranks[rank])))
    if any(of_rank != all_ranks[0] for of_rank in all_ranks):  # some rank has not stepped yet
        box = [optimiser.state_dict() if ranks.rank == fullest else None]
        dist.broadcast_object_list(box, src=fullest, group=ranks.group)
        assert box[0] is not None
        optimiser.load_state_dict(box[0])
        return
    state = [
        value
        for p in parameters
        for value in optimiser.state.get(p, {}).values()
        if torch.is_tensor(value) and value.is_floating_point()
    ]
    if state:
        averaged(state, 1.0, ranks.group)
