"""`bsp`: equal counts in random order, an all-reduce after each step: plain PyTorch DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.policies._base import (
    Batches,
    Ints,
    KeepPlacement,
    Models,
    Policy,
    Preset,
    Problem,
)
from paceline_backend.policies.linear import WINDOW, LinearPredictor
from paceline_backend.policies.order import remaining_in_order


class EqualCounts:
    """Global batches in ``DistributedSampler``'s order; rank r gets positions r, r + W, … of each.

    After a switch in mid-epoch what remains keeps the epoch's order. Models are not looked at.
    """

    def compose(self, problem: Problem, models: Models) -> Ints:
        """See `Scheduler.compose`."""
        return remaining_in_order(
            len(problem.sizes), problem.seed, problem.epoch, problem.remaining
        )

    def schedule(self, problem: Problem, models: Models) -> Batches:
        """See `Scheduler.schedule`."""
        parts, start, world = [], 0, problem.world
        for count in problem.batch_sizes():
            batch = problem.order[start : start + count]
            parts.append([batch[rank::world] for rank in range(world)])
            start += count
        return Batches.of(parts, world)


def make(parameters: Mapping[str, Any]) -> Policy:
    """The policy. Its predictor only serves to show ETT."""
    return Policy(
        name="bsp",
        predictor=LinearPredictor(window=parameters["window"]),
        scheduler=EqualCounts(),
        shuffler=KeepPlacement(),
        balances=False,
    )


preset = Preset(
    name="bsp",
    summary="Equal batches in random order: plain data parallelism, as PyTorch's DDP does it.",
    source="PyTorch DistributedSampler and DistributedDataParallel; also Horovod, SSGD",
    make=make,
    parameters={"window": WINDOW},
)
