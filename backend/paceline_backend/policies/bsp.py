"""`bsp`: equal counts in random order, an all-reduce after each step: plain PyTorch DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.policies._base import (
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

    def schedule(self, problem: Problem, models: Models) -> list[list[Ints]]:
        """See `Scheduler.schedule`."""
        order = remaining_in_order(
            len(problem.sizes), problem.seed, problem.epoch, problem.remaining
        )
        plan, start = [], 0
        for count in problem.batch_sizes():
            batch = order[start : start + count]
            plan.append([batch[rank :: problem.world].copy() for rank in range(problem.world)])
            start += count
        return plan


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
