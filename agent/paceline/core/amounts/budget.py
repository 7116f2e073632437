"""Steps of so many tokens, frames or seconds instead of so many samples: a budget of sizes.

A step takes samples, in the epoch's order, until the sum of their sizes would pass the budget. What
a step takes depends on no step before it. So the rest of an epoch has the same steps wherever
training goes on, whatever the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_FIRST = 64  # samples among which the end of the first step is sought


@dataclass(frozen=True)
class Budget:
    """What a step may hold, in the unit of the sizes.

    Args:
        tokens: of a step over all ranks, at most.
        sizes: λ of each sample, [N]; none is more than `tokens`.
    """

    tokens: float
    sizes: Floats

    def counts(self, samples: Ints, steps: int | None = None) -> Ints:
        """How many samples each step has that takes them in this order, [S].

        Args:
            samples: in the order in which steps take them, [R].
            steps: at most; None: until all are taken.
        """
        return counts_within(self.sizes[samples], self.tokens, steps)


def counts_within(sizes: Floats, budget: float, steps: int | None = None) -> Ints:
    """How many samples each step has, [S]; the sum of their sizes is at most the budget.

    Args:
        sizes: in the order in which steps take the samples, [R]; none is more than the budget.
        budget: of a step, in the unit of the sizes.
        steps: at most; None: until all samples are taken.

    Raises:
        ValueError: a sample is larger than the budget.
    """
    counts: list[int] = []
    start, window = 0, _FIRST
    while start < len(sizes) and (steps is None or len(counts) < steps):
        while True:
            # Each sum begins with its own step: a sum over the epoch would round otherwise.
            sums = np.cumsum(sizes[start : start + window])
            count = int(np.searchsorted(sums, budget, "right"))
            if count < len(sums) or start + len(sums) == len(sizes):
                break
            window *= 2
        if not count:
            raise ValueError(f"a sample of size {sizes[start]:g} is more than the budget, {budget:g}")
        counts.append(count)
        start += count
        window = count + count // 2 + 8
    return np.array(counts, np.int64)


def budget_of(given: Any) -> float:
    """What `Session(token_budget=…)` was given.

    Raises:
        TypeError, ValueError: it is no number above 0.
    """
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise TypeError(f"token_budget is {given!r}: it must be a number, in the unit of the sizes")
    if not 0 < given < math.inf:
        raise ValueError(f"token_budget is {given}: it must be above 0, and finite")
    return float(given)


def refuse_larger(sizes: Floats, budget: float) -> None:
    """Refuses a sample that no step can hold.

    Args:
        sizes: λ of each sample, [N].
        budget: of a step, in the unit of the sizes.

    Raises:
        ValueError: there is one; the message names the first.
    """
    larger = np.flatnonzero(sizes > budget)
    if len(larger):
        first = int(larger[0])
        raise ValueError(
            f"sizes[{first}] is {sizes[first]:g} ({len(larger)} such of {len(sizes)}), more than "
            f"token_budget={budget:g}, so no step can hold that sample: raise token_budget to "
            f"{sizes.max():g} or more, or cut or leave out samples that are longer"
        )
