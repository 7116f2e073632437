"""Batches from counts, for presets whose allocator chooses each worker's number of samples.

`policy` makes the policy of such a preset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from paceline.core.cost import Cost
from paceline.core.dealing import dealt
from paceline.policies.parameters import Parameters
from paceline.policies.parts import Allocation, Allocator, Criteria, KeepPlacement, Policy
from paceline.policies.predict.linear import LinearPredictor, WindowSteps
from paceline.policies.solve.balance import partition
from paceline.policies.solve.order import remaining_in_order
from paceline.policies.values import Floats, Ints, Models, Problem
from paceline.wire import Assignment


class CountsParameters(Parameters, frozen=True, kw_only=True):
    """Parameters that every preset with an allocator of counts has.

    ``kw_only`` puts these parameters after the parameters of the preset itself.
    """

    which: Annotated[
        Literal["order", "levelled"],
        Meta(
            description="How each rank's samples are chosen from the global batch. order: in the "
            "epoch's order. levelled: so that the total size of a rank's samples is in proportion "
            "to their number."
        ),
    ] = "order"
    window: WindowSteps = 64


# `Preset.variants` of every preset whose allocator chooses counts.
LEVELLED = ({"which": "levelled"},)

# Key in the JSON Schema of a parameter that only has an effect if `one_size` is true.
ONE_SIZE = "oneSize"

# For padded batches, `typical_s` represents the data set by at most this many of its sizes.
_DRAWN = 4096


def spread(shares: Floats, total: float, low: Ints, high: Ints) -> Floats:
    """Divide `total` among the workers in proportion to `shares`, within bounds, [W].

    Return the amount that each worker gets: at least `low` and at most `high`, [W] each. `total`
    must be between the sums of these bounds. A worker that would get too much or too little gets
    its bound, and the rest is divided among the other workers. If all shares are zero, they count
    as equal.
    """
    target = np.zeros(len(shares))
    free = np.ones(len(shares), bool)
    while free.any():
        rest = total - target[~free].sum()
        part = shares[free] if shares[free].sum() > 0 else np.ones(int(free.sum()))
        wanted = rest * part / part.sum()
        target[free] = np.clip(wanted, low[free], high[free])
        excess = wanted - target[free]
        # Fix all workers above their upper bound or all workers below their lower bound, whichever
        # exceed their bounds by the larger sum. This moves the other workers further in the same
        # direction, so no fixed worker must be freed later.
        wrong = excess > 0 if excess.sum() >= 0 else excess < 0
        if not wrong.any():
            break
        free[np.flatnonzero(free)[wrong]] = False
    return target


def rounded(target: Floats) -> Ints:
    """Round the workers' numbers of samples to whole numbers with the same sum, [W].

    The numbers with the largest remainders are rounded up. Of equal remainders, those of the lowest
    ranks come first. `target` are the numbers, ≥ 0, [W]; their sum is whole, up to floating-point
    errors.
    """
    down = np.floor(target + 1e-9).astype(np.int64)
    rest = round(float(target.sum())) - int(down.sum())
    largest = np.argsort(-np.round(target - down, 9), kind="stable")
    down[largest[:rest]] += 1
    return down


def scaled(counts: Ints, size: int) -> Ints:
    """Scale each worker's count of a whole global batch down to a step of `size` samples, [W].

    No count grows.
    """
    return rounded(counts * (size / counts.sum()))


def equal(problem: Problem) -> Ints:
    """Return equal numbers of samples for all workers, as far as memory limits allow, [W]."""
    low, high = bounds(problem)
    return rounded(spread(np.ones(problem.world), problem.global_batch, low, high))


def bounds(problem: Problem, least: int = 0, most: Ints | None = None) -> tuple[Ints, Ints]:
    """Return each worker's minimum and maximum number of samples in a global batch, [W] each.

    `least` is the wanted minimum of every worker, and `most` the wanted maximum of each worker,
    [W]; None: no maximum except for the memory limits. If the maxima sum to less than a global
    batch, `most` is ignored; if the minima sum to more than a global batch, `least` is ignored. If
    the memory of all workers together does not hold a global batch, the maxima are in proportion to
    the workers' memory.
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


def one_size(problem: Problem) -> bool:
    """Return True if all samples of the data set have one size.

    A rank's measured times then show its speed, and presets that follow the ranks' times use them,
    as in their papers. If sizes differ, the times of few steps mostly show which samples a rank
    got, and these presets use `typical_s` instead.
    """
    return bool(problem.sizes.min() == problem.sizes.max())


def typical_s(models: Models, counts: Ints, sizes: Floats) -> Floats:
    """Return the time that each worker is expected to take for samples drawn at random, [W] s.

    `counts` is the number of samples of each worker, [W]; without samples, the time is 0. `sizes`
    has the size λ of each sample of the data set, [N]. The models must be known.
    """
    effective = np.asarray(models.cost.sizes(sizes), np.float64)
    load = counts * float(effective.mean())
    if models.cost.padded:
        drawn = np.sort(effective[:: -(-len(effective) // _DRAWN)])
        below = np.arange(len(drawn) + 1) / len(drawn)
        different, place = np.unique(counts, return_inverse=True)
        # Let n samples be drawn from N sizes in ascending order. The longest sample has the k-th
        # size with probability (k / N)^n − ((k − 1) / N)^n.
        longest = np.array([np.diff(below ** float(n)) @ drawn for n in different])
        load = counts * longest[place]
    return np.where(counts > 0, models.a * load + models.c * counts + models.b, 0.0)


class Counted(msgspec.Struct):
    """Base class of allocators' states: the counts that the allocator chose."""

    counts: list[int]  # [W]


M = TypeVar("M", bound=Counted)


def recall(problem: Problem, kind: type[M]) -> M | None:
    """Return the allocator's state after the last segment, as an instance of `kind`.

    Return None if there is no valid state, or if the number of ranks or the global batch has
    changed since.
    """
    try:
        memory = msgspec.convert(problem.memory, kind)
    except msgspec.ValidationError:
        return None
    fits = len(memory.counts) == problem.world and sum(memory.counts) == problem.global_batch
    return memory if fits else None


def allocation(memory: Counted) -> Allocation:
    """Return an allocation that has an allocator's state, and the counts from this state."""
    return Allocation(np.array(memory.counts), msgspec.to_builtins(memory))


@dataclass(frozen=True)
class CountedScheduler:
    """A scheduler that divides global batches in DistributedSampler's order by counts.

    With `levelled`, each rank gets samples such that the ranks' loads are in proportion to their
    counts. Without `levelled`, samples are given to the ranks in turn until each rank has its
    count, as under `bsp`.
    """

    levelled: bool = False

    def compose(self, problem: Problem, models: Models) -> Ints:
        """See `Scheduler.compose`."""
        return remaining_in_order(
            len(problem.sizes), problem.seed, problem.epoch, problem.remaining
        )

    def schedule(self, problem: Problem, models: Models) -> Assignment:
        """See `Scheduler.schedule`.

        Raises:
            ValueError: the counts' sum is not the global batch.
        """
        whole = equal(problem) if problem.counts is None else problem.counts
        if whole.sum() != problem.global_batch:
            raise ValueError(
                f"counts: their sum is {whole.sum()}; the batch has {problem.global_batch} samples"
            )
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
        return Assignment.joined(counts, samples, problem.world)


def levelled(sizes: Floats, counts: Ints, cost: Cost) -> Ints:
    """Divide a batch so that the ranks' loads are as nearly as possible proportional to `counts`.

    Return the positions of the batch's samples, sorted by rank, [n]. `sizes` has the size λ of each
    sample, [n]; `counts` is the number of samples that each rank gets, [W].
    """
    nothing = np.zeros(len(counts))
    owner = partition(sizes, Models(1 / np.maximum(counts, 1), nothing, nothing, cost=cost), counts)
    return np.argsort(owner, kind="stable")


def scheduler(parameters: CountsParameters) -> CountedScheduler:
    """Make the scheduler for a preset's parameters."""
    return CountedScheduler(levelled=parameters.which == "levelled")


def criteria(
    parameters: CountsParameters, steps: int = 0, capacity: tuple[float, ...] | None = None
) -> Criteria:
    """Return the `Criteria` of a preset with an allocator of counts; see `policy`."""
    return Criteria(
        cost="fitted" if parameters.which == "levelled" else None,
        speeds=capacity is None,
        capacity=capacity or (),
        goes_by_devices=capacity == (),
        counts=True,
        steps=steps,
    )


def policy(
    name: str,
    allocator: Allocator,
    parameters: CountsParameters,
    *,
    steps: int = 0,
    capacity: tuple[float, ...] | None = None,
) -> Policy:
    """Make the policy of a preset whose allocator chooses each worker's number of samples.

    `steps` is as in `Criteria`. `capacity` are the ranks' speeds that an operator gave, [W]; empty:
    counts follow the nominal speeds of the ranks' devices; None: counts follow measured speeds.
    """
    return Policy(
        name=name,
        predictor=LinearPredictor(window=parameters.window, cost="auto"),
        scheduler=scheduler(parameters),
        shuffler=KeepPlacement(),
        plain_batches=True,
        allocator=allocator,
        criteria=criteria(parameters, steps, capacity),
    )
