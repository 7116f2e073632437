"""From counts to batches: for allocators, which say how many samples each worker gets, not which.

Every preset with an allocator is `policy()` of it: one scheduler makes batches of any counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from paceline.core.cost import Cost
from paceline.core.dealing import dealt
from paceline_backend.policies.base import (
    Allocation,
    Allocator,
    Batches,
    Floats,
    Ints,
    KeepPlacement,
    Models,
    Policy,
    Problem,
)
from paceline_backend.policies.predict.linear import WINDOW, LinearPredictor
from paceline_backend.policies.solve.balance import partition
from paceline_backend.policies.solve.order import remaining_in_order

# What every preset of counts takes, beside its own.
PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "which": {
        "type": "string",
        "enum": ["order", "levelled"],
        "default": "order",
        "description": "Which samples of a global batch each rank gets: in the epoch's order, or "
        "such that loads come out in proportion to the counts.",
    },
    "window": WINDOW,
}

# What a capacity or another list with a number for each rank is.
PER_RANK: Mapping[str, Any] = {
    "type": "array",
    "perRank": True,
    "items": {"type": "number", "exclusiveMinimum": 0, "maximum": 1e24},
    "default": [],
}


def spread(shares: Floats, total: float, low: Ints, high: Ints) -> Floats:
    """Divides a total in proportion to shares, as far as bounds let it, [W].

    Who would get too much, or too little, gets its bound; the others share the rest.

    Args:
        shares: ≥ 0; all zero counts as all equal, [W].
        total: Σ low ≤ total ≤ Σ high.
        low: [W].
        high: [W].
    """
    target = np.zeros(len(shares))
    free = np.ones(len(shares), bool)
    while free.any():
        rest = total - target[~free].sum()
        part = shares[free] if shares[free].sum() > 0 else np.ones(int(free.sum()))
        wanted = rest * part / part.sum()
        target[free] = np.clip(wanted, low[free], high[free])
        excess = wanted - target[free]
        # Those that must be held down, or those that must be held up: whichever weighs more, since
        # holding these moves the others further the same way.
        wrong = excess > 0 if excess.sum() >= 0 else excess < 0
        if not wrong.any():
            break
        free[np.flatnonzero(free)[wrong]] = False
    return target


def rounded(target: Floats) -> Ints:
    """Whole numbers of the same sum, by largest remainder; of equal remainders the lowest ranks'.

    Args:
        target: ≥ 0, their sum a whole number but for rounding, [W].
    """
    down = np.floor(target + 1e-9).astype(np.int64)
    rest = round(float(target.sum())) - int(down.sum())
    largest = np.argsort(-np.round(target - down, 9), kind="stable")
    down[largest[:rest]] += 1
    return down


def scaled(counts: Ints, size: int) -> Ints:
    """Counts of a whole global batch for one of another size, at most that, [W].

    None is above what it was.
    """
    return rounded(counts * (size / counts.sum()))


def equal(problem: Problem) -> Ints:
    """As many samples for each worker, within its limit, [W]."""
    low, high = bounds(problem)
    return rounded(spread(np.ones(problem.world), problem.global_batch, low, high))


def bounds(problem: Problem, least: int = 0, most: Ints | None = None) -> tuple[Ints, Ints]:
    """The least and the most samples of each worker, such that a global batch is possible, [W].

    Bounds that leave no choice of counts give way: first `most`, then `least`. Where not even the
    workers' memory together holds a global batch, they share it in proportion to their memory.

    Args:
        problem: its `limits` are kept.
        least: samples of each worker.
        most: samples of each worker, [W]; None: as many as fit.
    """
    batch, world = problem.global_batch, problem.world
    high = np.full(world, batch) if problem.limits is None else np.minimum(problem.limits, batch)
    if high.sum() < batch:
        high = np.ceil(high * (batch / high.sum())) if high.any() else np.full(world, batch)
        high = high.astype(np.int64)
    if most is not None and np.minimum(high, most).sum() >= batch:
        high = np.minimum(high, most)
    low = np.minimum(least, high)
    return low if low.sum() <= batch else np.zeros_like(high), high


class Counted(msgspec.Struct):
    """An allocator's memory: at least the counts that it chose."""

    counts: list[int]  # [W]


M = TypeVar("M", bound=Counted)


def recall(problem: Problem, kind: type[M]) -> M | None:
    """The memory of the last segment; None at the beginning.

    Also where it is of another form (another release planned) or of another world.
    """
    try:
        memory = msgspec.convert(problem.memory, kind)
    except msgspec.ValidationError:
        return None
    fits = len(memory.counts) == problem.world and sum(memory.counts) == problem.global_batch
    return memory if fits else None


def allocation(memory: Counted) -> Allocation:
    """The counts of a memory, with it."""
    return Allocation(np.array(memory.counts), msgspec.to_builtins(memory))


@dataclass(frozen=True)
class CountedScheduler:
    """The epoch's global batches, in DistributedSampler's order, divided by counts.

    Args:
        levelled: which samples go where is chosen such that loads come out in proportion to counts.
            Otherwise they are dealt to ranks in turn until each has its count: with equal counts as
            under `bsp`.
    """

    levelled: bool = False

    def compose(self, problem: Problem, models: Models) -> Ints:
        """See `Scheduler.compose`."""
        return remaining_in_order(
            len(problem.sizes), problem.seed, problem.epoch, problem.remaining
        )

    def schedule(self, problem: Problem, models: Models) -> Batches:
        """See `Scheduler.schedule`.

        Raises:
            ValueError: the counts' sum is not the global batch.
        """
        whole = equal(problem) if problem.counts is None else problem.counts
        if whole.sum() != problem.global_batch:
            raise ValueError(f"counts: {whole.sum()} in all; the batch has {problem.global_batch}")
        counts, samples, start = [], [], 0
        for size in problem.batch_sizes():
            counts.append(scaled(whole, size))
            batch = problem.order[start : start + size]
            if self.levelled:
                places = levelled(problem.sizes[batch], counts[-1], models.cost)
            else:
                places = dealt(counts[-1])
            samples.append(batch[places])
            start += size
        return Batches.joined(counts, samples, problem.world)


def levelled(sizes: Floats, counts: Ints, cost: Cost) -> Ints:
    """Places of the first rank's samples in a batch, of the second's, …, [n].

    Such that loads come out in proportion to counts.

    Args:
        sizes: of the samples, [n].
        counts: of each rank, [W].
        cost: how sizes add up to a load.
    """
    nothing = np.zeros(len(counts))
    owner = partition(sizes, Models(1 / np.maximum(counts, 1), nothing, nothing, cost=cost), counts)
    return np.argsort(owner, kind="stable")


def scheduler(parameters: Mapping[str, Any]) -> CountedScheduler:
    """The scheduler, with the values of `PARAMETERS`."""
    return CountedScheduler(levelled=parameters["which"] == "levelled")


def policy(name: str, allocator: Allocator, parameters: Mapping[str, Any]) -> Policy:
    """The policy of an allocator, with the values of `PARAMETERS`.

    Its predictor serves to show ETT, to level what batches really cost, and allocators that ask it.
    """
    return Policy(
        name=name,
        predictor=LinearPredictor(window=parameters["window"], cost="auto"),
        scheduler=scheduler(parameters),
        shuffler=KeepPlacement(),
        plain_batches=True,
        allocator=allocator,
    )
