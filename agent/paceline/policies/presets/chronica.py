"""`chronica`: each worker gets samples of each global batch according to its speed.

This module contains CHRONICA's data scheduler (Alg. 2), data shuffler (Alg. 3) and learning-rate
compensator (Alg. 4). The runtime prophet (Alg. 1) is in `predict.linear`.
docs/decisions/0006-chronica-levelled.md explains why some defaults differ from the paper.
``picks="paper"`` and ``ett="per-sample"`` follow the paper.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from paceline.policies.base import (
    Assignment,
    Criteria,
    Floats,
    Ints,
    Models,
    Policy,
    Preset,
    Problem,
)
from paceline.policies.parameters import Parameters
from paceline.policies.predict.estimators import Regressor, predictor_of
from paceline.policies.predict.linear import PerSamplePredictor, WindowSteps
from paceline.policies.solve.counts import bounds
from paceline.policies.solve.filling import (
    Filling,
    fill,
    largest_first,
    level_out,
    split,
)
from paceline.policies.solve.nodes import Room, homes_of, kept_on_nodes

# Number of calls of `level_out` for each step. A third call would shorten steps by less than 0.1 ‰.
_LEVEL_PASSES = 2


@dataclass(frozen=True)
class PaperScheduler:
    """CHRONICA's data scheduler as in the paper (Alg. 2).

    A step's first pick is a random sample, for the worker that holds it. Each later pick goes to
    the worker with the least expected time (ETT) so far. The worker gets the largest of its samples
    that fits into the gap between its ETT and the largest ETT, or its smallest sample if none fits.
    """

    def compose(self, problem: Problem, models: Models) -> Ints:
        """Return the samples in any order, because `schedule` does not use the order."""
        return problem.remaining

    def schedule(self, problem: Problem, models: Models) -> Assignment:
        """See `Scheduler.schedule`."""
        holdings = split(problem.remaining, problem.placement, problem.sizes, problem.world)
        rng = problem.rng()
        _, most = bounds(problem)
        plan = []
        for count in problem.batch_sizes():
            step = Filling(models, most, holdings, homes_of(problem))
            held = np.array([len(h) for h in holdings])
            rank = int(rng.choice(problem.world, p=held / held.sum()))
            able = rank if most[rank] else int(most.argmax())
            step.give(able, rank, int(rng.integers(held[rank])))
            least = step.open()
            longest = max(step.ett)
            given = 1
            while given < count:
                # On each node that still holds samples, all ranks are full: let samples change
                # their node.
                if not least:
                    step.nodes = None
                    least = step.open()
                rank = least[0][1]
                gap = (longest - step.ett[rank] - step.c[rank]) / step.a[rank]
                source = step.source(rank)
                if source is None:
                    heapq.heappop(least)
                    continue
                step.give(rank, source, holdings[source].fitting(gap))
                given += 1
                longest = max(longest, step.ett[rank])
                if step.full(rank):
                    heapq.heappop(least)
                else:
                    heapq.heapreplace(least, (step.ett[rank], rank))
            plan.append(step.assignments())
        return Assignment.of(plan, problem.world)


@dataclass(frozen=True)
class LevelledScheduler:
    """CHRONICA's data scheduler (Alg. 2) with random picks, and an exchange that levels times.

    At each pick, the worker that would end first with a typical sample of its own gets a random one
    of its samples. Then each worker exchanges one of its picks for another sample that it holds.
    The exchange brings the worker's expected time as near as possible to the time that all workers
    would take if the batch's load could be divided exactly. In an epoch's last step all samples
    must be used, so they are divided largest first.
    """

    def compose(self, problem: Problem, models: Models) -> Ints:
        """Return the samples in any order, because `schedule` does not use the order."""
        return problem.remaining

    def schedule(self, problem: Problem, models: Models) -> Assignment:
        """See `Scheduler.schedule`."""
        holdings = split(problem.remaining, problem.placement, problem.sizes, problem.world)
        rng = problem.rng()
        _, most = bounds(problem)
        plan = []
        for count in problem.batch_sizes():
            step = Filling(models, most, holdings, homes_of(problem))
            if count == sum(map(len, holdings)):
                largest_first(step)
            else:
                fill(step, rng.random(count).tolist())
                for _ in range(_LEVEL_PASSES):
                    level_out(step)
            plan.append(step.assignments())
        return Assignment.of(plan, problem.world)


@dataclass(frozen=True)
class ChronicaShuffler:
    """CHRONICA's data shuffler (Alg. 3): overloaded workers give up as few samples as possible.

    A worker whose total expected time (ETT) is above a level gives up samples until its ETT is at
    most the level. Each time, it gives up the largest sample without which its ETT is still at
    least the level, or its smallest sample if there is none. These samples go, largest first, to
    the worker whose ETT with the sample is least; with `paper`, to the worker whose ETT without the
    sample is least. Without `paper`, `solve.nodes` then exchanges samples so that fewer change
    their node. Where data lives on nodes, a sample goes only to a node that may get it and has
    enough free storage.

    With `paper`, the level is the mean of the workers' ETTs, which leaves a slow worker above the
    other workers for several epochs. Without `paper`, the level is the time at which all workers
    would end if loads could be moved freely between them.
    """

    paper: bool = False

    def shuffle(self, problem: Problem, models: Models) -> Ints:
        """See `Shuffler.shuffle`."""
        holdings = split(problem.remaining, problem.placement, problem.sizes, problem.world)
        steps = -(-len(problem.remaining) // problem.global_batch)
        load = np.array([h.load for h in holdings])
        count = np.array([len(h) for h in holdings])
        total = models.a * load + models.c * count + models.b * steps
        weight = np.ones(problem.world) if self.paper else 1.0 / models.a
        level = float(np.average(total, weights=weight))
        room = None if problem.storage is None else Room(problem)
        pool: list[tuple[float, int]] = []
        for rank, held in enumerate(holdings):
            a, c = float(models.a[rank]), float(models.c[rank])
            while held and (total[rank] > level or (room is not None and room.is_exceeded(rank))):
                sample, size = held.take(held.fitting((total[rank] - level - c) / a))
                total[rank] -= a * size + c
                pool.append((-size, sample))
                if room is not None:
                    room.give_up(sample, rank)
        placement = problem.placement.copy()
        for negative, sample in sorted(pool):
            cost = models.a * -negative + models.c
            after = total if self.paper else total + cost
            if room is not None:
                after = np.where(room.admitted(sample, int(placement[sample])), after, np.inf)
            rank = int(np.argmin(after))
            if room is not None:
                room.take(sample, int(placement[sample]), rank)
            total[rank] += cost[rank]
            placement[sample] = rank
        if problem.nodes is None or self.paper:
            return placement
        return kept_on_nodes(placement, problem, models)


def compensate(gradients: Floats, loads: Floats) -> Floats:
    """Return CHRONICA's compensated gradient of a global batch (Eq. 7), Σ_j g_j Λ_j / Σ_j Λ_j, [P].

    This function is for reference: the ranks' all-reduce computes the same under every policy.
    `gradients` has the gradient g_j of each worker j with respect to P parameters, [W, P]; it is a
    mean over the worker's size units. `loads` has each worker's load Λ_j, [W], or its number of
    samples if the loss is a mean over samples.

    Raises:
        ValueError: the loads are all zero.
    """
    total = loads.sum()
    if total <= 0:
        raise ValueError("loads: all zero; a step needs at least one sample of positive size")
    return np.asarray(loads @ gradients / total)


class ChronicaParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of `chronica`."""

    ett: Annotated[
        Literal["per-step", "per-sample"],
        Meta(
            description="Model of a rank's compute time. per-step: a·Λ + c·n + b for n samples of "
            "total size Λ. per-sample: a·λ + b for each sample of size λ, as in the paper; "
            "`regressor` is then not used."
        ),
    ] = "per-step"
    picks: Annotated[
        Literal["levelled", "paper"],
        Meta(
            description="How each rank's samples are chosen. levelled: at random, then exchanged "
            "until the ranks' times are nearly equal. paper: Algorithms 2 and 3 as printed."
        ),
    ] = "levelled"
    window: WindowSteps = 64
    regressor: Regressor = "tracking"


def make(parameters: ChronicaParameters) -> Policy:
    """Make the policy."""
    paper = parameters.picks == "paper"
    per_sample = parameters.ett == "per-sample"
    window = parameters.window
    learns = predictor_of(parameters.regressor, window, cost="sum")
    return Policy(
        name="chronica",
        predictor=PerSamplePredictor(window) if per_sample else learns,
        scheduler=PaperScheduler() if paper else LevelledScheduler(),
        shuffler=ChronicaShuffler(paper),
        homes=True,
        criteria=Criteria(cost="sum", speeds=True),
    )


preset = Preset(
    name="chronica",
    summary="Learns each rank's speed, and gives each rank a load in proportion to its speed.",
    source="CHRONICA: a data-imbalance-aware scheduler for distributed deep learning",
    make=make,
    combines=True,
    parameters=ChronicaParameters,
)
