"""How many steps each epoch has, as every rank can count by itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.amounts.budget import Budget
from paceline.core.terms import Terms

Ints = npt.NDArray[np.int64]


def epoch_order(samples: int, seed: int, epoch: int) -> Ints:
    """The samples in the order of DistributedSampler(seed=seed) after set_epoch(epoch), [N]."""
    generator = torch.Generator().manual_seed(seed + epoch)
    order: Ints = torch.randperm(samples, generator=generator).numpy()
    return order


class EpochSteps:
    """The steps of each epoch. With a token budget the epoch's order decides how many there are.

    Args:
        terms: of the run.
        budget: of a step; None: steps have a global batch of samples.
    """

    def __init__(self, terms: Terms, budget: Budget | None = None) -> None:
        self._terms = terms
        self.budget = budget
        self._known: dict[int, int] = {}
        self._newest: tuple[int, Ints] | None = None  # epoch, and its steps' counts

    def of(self, epoch: int) -> int:
        """The number of steps of a whole epoch."""
        if self.budget is None:
            return self._terms.steps_per_epoch
        if epoch not in self._known:
            self._known[epoch] = len(self._counts(self.budget, epoch))
        return self._known[epoch]

    def total(self, epochs: int) -> int:
        """The number of steps of the first `epochs` epochs together."""
        return sum(map(self.of, range(epochs)))

    def ends(self, epoch: int, used: Ints | None = None) -> Ints | None:
        """How many samples each step and those before it have together, [S].

        None: that is as many for each step, as there is no token budget.

        Args:
            epoch: of the steps.
            used: samples that the epoch has used already; they do not count.
        """
        if self.budget is None:
            return None
        return np.cumsum(self._counts(self.budget, epoch, used))

    def _counts(self, budget: Budget, epoch: int, used: Ints | None = None) -> Ints:
        if used is None and self._newest is not None and self._newest[0] == epoch:
            return self._newest[1]
        order = epoch_order(self._terms.samples, self._terms.seed, epoch)
        if used is not None:
            left = np.ones(len(order), bool)
            left[used] = False
            return budget.counts(order[left[order]])
        self._newest = epoch, budget.counts(order)
        return self._newest[1]
