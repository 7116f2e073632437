"""Counter of the steps of each epoch, with the same result on every rank."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.batch_limits.budget import Budget
from paceline.core.terms import Terms

Ints = npt.NDArray[np.int64]


def epoch_order(samples: int, seed: int, epoch: int) -> Ints:
    """Return the sample order of DistributedSampler(seed=seed) after set_epoch(epoch), [N]."""
    generator = torch.Generator().manual_seed(seed + epoch)
    order: Ints = torch.randperm(samples, generator=generator).numpy()
    return order


class EpochSteps:
    """Counter of each epoch's steps.

    Under a token budget, the number of steps depends on the order of the samples.
    """

    def __init__(self, terms: Terms, budget: Budget | None = None) -> None:
        self._terms = terms
        self.budget = budget
        self._known: dict[int, int] = {}
        # The newest epoch, and the number of samples of each of its steps.
        self._newest: tuple[int, Ints] | None = None

    def of(self, epoch: int) -> int:
        """Return the number of steps of a whole epoch."""
        if self.budget is None:
            return self._terms.steps_per_epoch
        if epoch not in self._known:
            self._known[epoch] = len(self._counts(self.budget, epoch))
        return self._known[epoch]

    def total(self, epochs: int) -> int:
        """Return the number of steps of the first `epochs` epochs together."""
        return sum(map(self.of, range(epochs)))

    def ends(self, epoch: int, used: Ints | None = None) -> Ints | None:
        """Return the number of samples from the epoch's start to the end of each of S steps, [S].

        The samples in `used` are left out. Return None without a token budget, where all steps have
        the same number of samples.
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
