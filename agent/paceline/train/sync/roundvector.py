"""What ranks reduce in a round of a partial all-reduce: one vector of gradients and facts.

The facts travel with the gradients, so that all ranks learn the same from the same sum. If
gradients are reduced on the ranks' devices, they follow the facts in a sum of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.core.member import Tally
from paceline.train.sync.gradients import event_of, keep, stream_of

_COUNTS = 3  # contributors, dropped samples, ranks that give more than a gradient


@dataclass(frozen=True)
class Facts:
    """What a round tells all ranks."""

    contributors: int
    dropped: int  # samples whose gradients were too old
    extra: bool  # rank 0 broadcasts a vector after the round
    ages: list[int]  # see `Tally.ages`
    clocks: list[int]  # steps that each rank is through with, [W]
    through: list[int]  # ranks that have no more steps


class RoundVector:
    """The layout of the vector: gradients, counts, ages, then two numbers of each rank.

    Args:
        length: of a gradient's vector.
        bins: ages that a round tells apart.
        world: ranks that take part.
    """

    def __init__(self, length: int, bins: int, world: int) -> None:
        self._length, self._world = length, world
        self._size = length + _COUNTS + bins + 2 * world

    def pack(
        self,
        gradients: Sequence[tuple[torch.Tensor, float]],
        tally: Tally,
        *,
        extra: bool,
        rank: int,
        clock: int,
        through: bool,
    ) -> torch.Tensor:
        """One rank's vector.

        Args:
            gradients: what it gives, with their weights.
            tally: what it gives and drops, in numbers.
            extra: it is rank 0, and broadcasts a vector after the round.
            rank: which rank it is.
            clock: steps that it is through with.
            through: it has no more steps.
        """
        world, vector = self._world, torch.empty(self._size)
        own, facts = vector[: self._length], vector[self._length :].zero_()
        _add_up(gradients, own)
        facts[0], facts[1], facts[2] = tally.contributors, tally.dropped, extra
        facts[_COUNTS : -2 * world] = torch.tensor(tally.ages)
        facts[-2 * world + rank] = clock
        facts[-world + rank] = through
        return vector

    def unpack(self, vector: torch.Tensor) -> tuple[torch.Tensor, Facts]:
        """The sum of the gradients, and the facts, in the sum of all ranks' vectors."""
        world = self._world
        facts = [round(value) for value in vector[self._length :].tolist()]
        contributors, dropped, extra = facts[:_COUNTS]
        ages, clocks = facts[_COUNTS : -2 * world], facts[-2 * world : -world]
        through = [rank for rank, done in enumerate(facts[-world:]) if done]
        facts_of_all = Facts(contributors, dropped, bool(extra), ages, clocks, through)
        return vector[: self._length], facts_of_all


class DeviceSums:
    """Sums of gradients over the ranks' devices, in a stream beside the training. For one thread.

    Gradients that it gets are computed, and a sum that it gives is complete. So neither stream
    waits for the other, and a sum that waits for another rank does not hold up the training.

    Args:
        device: of this rank.
        length: of a gradient.
    """

    def __init__(self, device: torch.device, length: int) -> None:
        self._device, self._length = device, length
        self._module, self._stream = torch.get_device_module(device), stream_of(device)
        # The all-reduce of the latest step must be over: NCCL does not promise that two process
        # groups of one device get on at once.
        self._module.synchronize(device)

    def pack(self, gradients: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
        """One rank's weighted gradients, added up; zeros if it has none."""
        with self._module.stream(self._stream):
            own = torch.empty(self._length, device=self._device)
            _add_up(gradients, own)
            for gradient, _ in gradients:
                keep(gradient)
        return own

    def reduce(self, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Makes what `pack` gave the sum over all ranks of a group. Waits for it."""
        done = event_of(self._device)
        with self._module.stream(self._stream):
            dist.all_reduce(own, group=group)
            done.record(self._stream)
        done.synchronize()

    def to_host(self, total: torch.Tensor) -> torch.Tensor:
        """A sum on the host."""
        with self._module.stream(self._stream):
            return total.cpu()


def _add_up(gradients: Sequence[tuple[torch.Tensor, float]], out: torch.Tensor) -> None:
    """Puts the weighted sum of gradients into a tensor."""
    if not gradients:
        out.zero_()
    for at, (gradient, weight) in enumerate(gradients):
        if at == 0:
            torch.mul(gradient, weight, out=out)
        else:
            out.add_(gradient, alpha=weight)
