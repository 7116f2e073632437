"""The vector that ranks reduce in a round of a partial all-reduce: gradients and facts.

The facts travel with the gradients, so that all ranks learn the same from the same sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.member import RoundCounts

# Contributors, dropped samples, and ranks that give a further vector.
_COUNTS = 3


@dataclass(frozen=True)
class RoundFacts:
    """Facts that all ranks learn from a round.

    `dropped` counts samples whose gradients were too old. `extra`: rank 0 broadcasts a vector after
    the round. `ages`: see `RoundCounts.ages`. `clocks`: steps that each rank has done, [W].
    `through`: ranks that have no further steps.
    """

    contributors: int
    dropped: int
    extra: bool
    ages: list[int]
    clocks: list[int]
    through: list[int]


class RoundVector:
    """Layout of the vector: gradients, counts, ages, then two numbers of each rank.

    `length` is that of a gradient's vector, `bins` the number of ages that a round distinguishes.
    """

    def __init__(self, length: int, bins: int, world: int) -> None:
        self._length, self._world = length, world
        self._size = length + _COUNTS + bins + 2 * world

    def pack(
        self,
        gradients: Sequence[tuple[torch.Tensor, float]],
        tally: RoundCounts,
        *,
        extra: bool,
        rank: int,
        clock: int,
        through: bool,
    ) -> torch.Tensor:
        """Build one rank's vector from its weighted gradients and facts; see `RoundFacts`."""
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

    def unpack(self, vector: torch.Tensor) -> tuple[torch.Tensor, RoundFacts]:
        """Split the sum of all ranks' vectors into the sum of the gradients and the facts."""
        world = self._world
        facts = [round(value) for value in vector[self._length :].tolist()]
        contributors, dropped, extra = facts[:_COUNTS]
        ages, clocks = facts[_COUNTS : -2 * world], facts[-2 * world : -world]
        through = [rank for rank, done in enumerate(facts[-world:]) if done]
        facts_of_all = RoundFacts(contributors, dropped, bool(extra), ages, clocks, through)
        return vector[: self._length], facts_of_all
