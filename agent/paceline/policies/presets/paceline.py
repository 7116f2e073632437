"""`paceline`: the project's own policy, which uses each sample's cost and each worker's speed.

In exact mode every global batch has the same samples as under plain DDP with the same seed; only
the division among the workers differs. In free mode the policy also composes the batches
(`solve.compose`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from paceline.core.cost import SUM, Cost
from paceline.policies.base import (
    Assignment,
    Criteria,
    Ints,
    KeepPlacement,
    Models,
    Policy,
    Preset,
    Problem,
)
from paceline.policies.parameters import Parameters
from paceline.policies.predict.linear import CostModel, LinearPredictor, WindowSteps
from paceline.policies.solve.balance import FEW_RANKS, grouped, partition
from paceline.policies.solve.compose import compose
from paceline.policies.solve.hedged import partition_hedged
from paceline.policies.solve.order import remaining_in_order
from paceline.policies.solve.padded import compose_padded
from paceline.policies.solve.workers import Workers, most_of


@dataclass(frozen=True)
class PacelineScheduler:
    """A scheduler that divides each global batch so that its slowest worker ends early.

    While speeds are unknown, workers get as many samples as under `bsp`, and the scheduler makes
    their loads as equal as possible. With `free`, the scheduler also chooses the samples of each
    global batch.
    """

    free: bool = False

    def compose(self, problem: Problem, models: Models) -> Ints:
        """See `Scheduler.compose`."""
        order = remaining_in_order(
            len(problem.sizes), problem.seed, problem.epoch, problem.remaining
        )
        if not self.free:
            return order
        samples = len(order)
        used = samples - samples % problem.global_batch if problem.drop_last else samples
        if not used:
            return order
        models = models.cautious
        effective = models.cost.sizes(problem.sizes[order[:used]])
        batch = problem.global_batch
        workers = Workers.of(models, most_of(problem.limits, batch, problem.world))
        composer = compose_padded if models.cost.padded else compose
        composed = composer(effective, workers, batch, problem.rng())
        return np.concatenate([order[:used][composed], order[used:]])

    def schedule(self, problem: Problem, models: Models) -> Assignment:
        """See `Scheduler.schedule`."""
        world, start, counts, samples = problem.world, 0, [], []
        for step, count in enumerate(problem.batch_sizes()):
            batch = problem.order[start : start + count]
            start += count
            equal = None if models.known else _equal(count, problem)
            sizes, limits = problem.sizes[batch], problem.limits
            if equal is None:
                ranks = partition_hedged(sizes, models.at(step), limits, laid_out=self.free)
            else:
                ranks = partition(sizes, models, equal, limits)
            by_rank, of_rank = grouped(ranks, world)
            counts.append(of_rank)
            samples.append(batch[by_rank])
        if not counts:
            return Assignment(np.empty((0, world), np.int64), np.empty(0, np.int64))
        return Assignment(np.array(counts, np.int64), np.concatenate(samples))


def _equal(count: int, problem: Problem) -> Ints | None:
    """Return the counts under `bsp`, [W]; None if they exceed a worker's memory limit."""
    counts = -((np.arange(problem.world) - count) // problem.world)
    if problem.limits is not None and (counts > problem.limits).any():
        return None
    return counts


class PacelineParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of `paceline`."""

    mode: Annotated[
        Literal["exact", "free"],
        Meta(
            description="exact: every global batch has the same samples as under plain DDP with"
            " the same seed. free: the samples of each global batch are chosen so that the ranks"
            " can be balanced well."
        ),
    ] = "exact"
    cost: CostModel = "auto"
    window: WindowSteps = 64


def make(parameters: PacelineParameters) -> Policy:
    """Make the policy."""
    free = parameters.mode == "free"
    return Policy(
        name="paceline",
        predictor=LinearPredictor(parameters.window, parameters.cost),
        scheduler=PacelineScheduler(free),
        shuffler=KeepPlacement(),
        recomposes=free,
        foretells=True,
        plain_batches=not free,
        streams=not free and parameters.cost != "padded",
        criteria=Criteria("fitted" if parameters.cost == "auto" else parameters.cost, speeds=True),
    )


def warm_up() -> None:
    """See `policies.warm_up`."""
    none = np.empty(0, np.int64)
    # Plan for few and for many ranks, because these use different kernels.
    for world in (2, FEW_RANKS + 1):
        models = Models(np.arange(1.0, world + 1), np.zeros(world), np.zeros(world))
        samples = np.arange(4 * world)
        for cost in (SUM, Cost(padded=True)):
            for free in (False, True):
                scheduler = PacelineScheduler(free)
                work = Problem(
                    np.arange(1.0, 4 * world + 1), samples, none, none, 0, 0, 2, 2 * world, world, 0
                )
                sure = replace(models, cost=cost)
                for of in (sure, replace(sure, rivals=((0.5, sure),))):
                    work = replace(work, order=scheduler.compose(work, of))
                    scheduler.schedule(work, of)


preset = Preset(
    name="paceline",
    summary="Divides each global batch so that all ranks finish at the same time, as nearly as "
    "whole samples allow.",
    source="Paceline",
    make=make,
    combines=True,
    parameters=PacelineParameters,
    variants=({"mode": "free"},),
)
