"""`bsp`: plain PyTorch DDP, with equal counts of samples in random order."""

from __future__ import annotations

import numpy as np

from paceline.core.dealing import dealt, equal_counts
from paceline.policies.base import (
    Assignment,
    Ints,
    KeepPlacement,
    Models,
    Policy,
    Preset,
    Problem,
)
from paceline.policies.parameters import Parameters
from paceline.policies.predict.linear import LinearPredictor, WindowSteps
from paceline.policies.solve.counts import bounds
from paceline.policies.solve.order import remaining_in_order


class EqualCounts:
    """A scheduler of equal counts, with global batches in ``DistributedSampler``'s order.

    Of each global batch, rank r of W ranks gets samples r, r + W, r + 2W, …. A rank at its memory
    limit gets no more samples, and the other ranks continue in turn. After a switch within an
    epoch, the remaining samples keep the epoch's order.
    """

    def compose(self, problem: Problem, models: Models) -> Ints:
        """See `Scheduler.compose`."""
        return remaining_in_order(
            len(problem.sizes), problem.seed, problem.epoch, problem.remaining
        )

    def schedule(self, problem: Problem, models: Models) -> Assignment:
        """See `Scheduler.schedule`."""
        _, most = bounds(problem)
        counts, samples, start = [], [], 0
        for size in problem.batch_sizes():
            if problem.limits is None:
                most = np.full(problem.world, size)
            counts.append(equal_counts(size, most))
            samples.append(problem.order[start : start + size][dealt(counts[-1])])
            start += size
        return Assignment.joined(counts, samples, problem.world)


class BspParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of `bsp`."""

    window: WindowSteps = 64


def make(parameters: BspParameters) -> Policy:
    """Make the policy, whose predictor is only used for the displayed ETT."""
    return Policy(
        name="bsp",
        predictor=LinearPredictor(window=parameters.window),
        scheduler=EqualCounts(),
        shuffler=KeepPlacement(),
        plain_batches=True,
        balances=False,
        streams=True,
    )


preset = Preset(
    name="bsp",
    summary="Equal batches in random order: plain data parallelism, as PyTorch's DDP does it.",
    source="PyTorch DistributedSampler and DistributedDataParallel; also Horovod, SSGD",
    make=make,
    combines=True,
    parameters=BspParameters,
)
