"""What ranks reduce in a round of a partial all-reduce: one vector of gradients and facts.

The facts travel with the gradients, so that all ranks learn the same from the same sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.member import Tally

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
        if not gradients:
            own.zero_()
        for at, (gradient, weight) in enumerate(gradients):
            if at == 0:
                torch.mul(gradient, weight, out=own)
            else:
                own.add_(gradient, alpha=weight)
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
