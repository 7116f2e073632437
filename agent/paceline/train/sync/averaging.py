"""Each rank steps alone, and now and then replicas become their mean: local SGD, one-shot means."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.means import is_due
from paceline.train.parts import Step
from paceline.train.sync.base import OnRound, Ranks, Round, no_gradient
from paceline.train.sync.gradients import averaged


class Averaging:
    """Each rank steps alone. Every few steps all ranks' parameters become their mean.

    In the mean, a rank weighs as much as the work that it has done since the previous mean.

    Args:
        ranks: that take part.
        parameters: that are trained, in the same order on all ranks.
        every: steps between two means (H of local SGD); None: only when ranks meet.
        on_round: called with each mean.
    """

    goes_on, weighs = True, False

    def __init__(
        self,
        ranks: Ranks,
        parameters: list[nn.Parameter],
        every: int | None,
        on_round: OnRound | None = None,
    ) -> None:
        self._ranks, self._parameters, self._every = ranks, parameters, every
        self._on_round = on_round
        self._work = 0.0  # Σ of the steps' weights since the previous mean
        self._samples = 0  # of earlier steps, whose gradients are still in .grad
        self._stepped = -1  # the latest step in which the optimiser stepped
        self._means = 0  # how many there were

    def stepping(self, step: Step, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.stepping`."""
        self._stepped = step.step
        if not (self._samples or step.samples):
            no_gradient(self._parameters)

    def body_done(self, step: Step, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.body_done`."""
        self._samples = 0 if self._stepped == step.step else self._samples + step.samples
        self._work += step.weight
        if is_due(step.step, self._every):
            self._mean()

    def meet(self, optimiser: torch.optim.Optimizer) -> None:
        """See `Synchroniser.meet`. Afterwards the optimisers' states are equal, too."""
        self._mean()
        alike(optimiser, self._parameters, self._ranks)

    def abort(self, reason: str) -> None:
        """See `Synchroniser.abort`."""
        dist.destroy_process_group(self._ranks.group)  # so the others' collectives fail

    def _mean(self) -> None:
        began = time.perf_counter()
        given = float(self._work > 0)
        (givers,) = averaged(
            [p.data for p in self._parameters], self._work, self._ranks.group, [given]
        )
        self._work = 0.0
        number, self._means = self._means, self._means + 1
        if self._on_round is not None:
            size = sum(p.numel() * p.element_size() for p in self._parameters)
            took_s = time.perf_counter() - began
            self._on_round(
                Round(
                    number, self._ranks.world, round(givers), [round(givers)], 0, 0.0, took_s, size
                )
            )


def alike(optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter], ranks: Ranks) -> None:
    """Makes the optimiser's state equal on all ranks, so that equal replicas stay equal.

    A tensor becomes its mean over ranks. A single number, for example a count of steps, becomes the
    largest of all ranks. Where ranks have states of different shape, all get the fullest one.
    """
    states = [optimiser.state.get(p, {}) for p in parameters]
    shapes = [{k: tuple(v.shape) for k, v in s.items() if torch.is_tensor(v)} for s in states]
    numbers = [
        {k: float(v) for k, v in s.items() if _is_number(v, p)}
        for p, s in zip(parameters, states, strict=True)
    ]
    gathered: list[tuple[list[dict[str, tuple[int, ...]]], list[dict[str, float]]]]
    gathered = [([], []) for _ in range(ranks.world)]
    dist.all_gather_object(gathered, (shapes, numbers), group=ranks.group)
    fullest = max(range(ranks.world), key=lambda rank: sum(map(len, gathered[rank][0])))
    if any(of_rank != gathered[0][0] for of_rank, _ in gathered):  # some rank has not stepped yet
        box = [optimiser.state_dict() if ranks.rank == fullest else None]
        dist.broadcast_object_list(box, src=fullest, group=ranks.group)
        assert box[0] is not None
        optimiser.load_state_dict(box[0])
        return
    for k, state in enumerate(states):
        for name in numbers[k]:
            largest = max(of_rank[k][name] for _, of_rank in gathered)
            if torch.is_tensor(state[name]):
                state[name].fill_(largest)
            else:
                state[name] = type(state[name])(largest)
    vectors = [
        value
        for k, state in enumerate(states)
        for name, value in state.items()
        if name not in numbers[k] and torch.is_tensor(value) and value.is_floating_point()
    ]
    if vectors:
        averaged(vectors, 1.0, ranks.group)


def _is_number(value: object, parameter: nn.Parameter) -> bool:
    if torch.is_tensor(value):
        return value.dim() == 0 and value.shape != parameter.shape
    return isinstance(value, int | float)
