"""Division of a global batch while several costs of a batch are still plausible.

Each plausible cost has its own best partition. Two further kinds of partition suit several costs at
once. The first has the counts that are best under one cost, and loads that are levelled under
another. The second is the batch sorted by size and cut into slices; the cuts are chosen such that
under no plausible cost the time is far above the best time under that cost. `partition_hedged`
returns the partition with the least expected relative time: the time under a cost ÷ the best time
under that cost.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.core.cost import features
from paceline.policies.jit import compiled
from paceline.policies.solve.balance import grouped, partition
from paceline.policies.solve.workers import descending, most_of
from paceline.policies.values import Floats, Ints, Models

Bools = npt.NDArray[np.bool_]

# Number of bisections in `_cut`.
_RATIO_BISECTIONS = 10


def partition_hedged(
    sizes: Floats, models: Models, limits: Ints | None = None, *, laid_out: bool = False
) -> Ints:
    """Assign each sample of a global batch to a rank, [n], with a cost that is not known for sure.

    `sizes` has the size λ of each of the n samples, [n]. `models.rivals` are the models under other
    plausible costs; without rivals, the result is the same as of `balance.partition`. `limits` and
    `laid_out` are as for `balance.partition`.
    """
    if not models.rivals or not len(sizes):
        return partition(sizes, models, None, limits, laid_out=laid_out)
    chances, given = zip(*models.weighed(), strict=True)
    tried = [partition(sizes, each, None, limits, laid_out=laid_out) for each in given]
    sums = [
        (each, np.bincount(ranks, minlength=each.world))
        for each, ranks in zip(given, tried, strict=True)
        if not each.cost.padded
    ]
    for each, counts in sums:
        tried += [
            partition(sizes, other, counts)
            for other, own in sums
            if other is not each and (own != counts).any()
        ]
    slowest_s = [[_slowest(sizes, each, ranks) for each in given] for ranks in tried]
    best_s = np.maximum(np.array(slowest_s).min(axis=0), 1e-300)
    order = descending(sizes)
    effective = np.array([each.cost.sizes(sizes[order]) for each in given], np.float64)
    rates = np.array([(each.a, each.c, each.b) for each in given]) / best_s[:, None, None]
    padded = np.array([each.cost.padded for each in given])
    most = most_of(limits, len(sizes), models.world)
    by_speed = np.argsort(models.a * effective[0].mean() + models.c, kind="stable")
    for turn in (by_speed, by_speed[::-1].copy()):
        counts = _cut(effective, rates, padded, most, turn)
        if counts.sum() == len(sizes):
            ranks = np.empty(len(sizes), np.int64)
            ranks[order] = np.repeat(turn, counts)
            tried.append(ranks)
            slowest_s.append([_slowest(sizes, each, ranks) for each in given])
    over = np.array(slowest_s) / best_s
    return tried[int((over @ np.array(chances)).argmin())]


def _slowest(sizes: Floats, models: Models, ranks: Ints) -> float:
    order, counts = grouped(ranks, models.world)
    return float(models.ett(features(sizes[order], counts)).max())


@compiled
def _cut(sizes: Floats, rates: Floats, padded: Bools, most: Ints, turn: Ints) -> Ints:
    """Cut the sorted batch into one slice per rank that suits all plausible costs.

    The cuts minimise the largest ratio, over all costs, of the batch's time under a cost to the
    best time under that cost.

    Return the number of samples of each rank, in the sequence of `turn`, [W]; their sum is below n
    if no cut is found.

    Args:
        sizes: cost f(λ) of each of the n samples under each plausible cost, descending, [costs, n].
        rates: a, c and b of each rank's model under each cost, ÷ the best time under that cost,
            [costs, 3, W].
        padded: mask of the costs that are padded, [costs].
        most: maximum number of samples of each rank, [W].
        turn: the ranks in the sequence in which they get their slices, [W].
    """
    low, high = 1.0, 2.0
    best = np.zeros(len(turn), np.int64)
    while high < 64.0:
        best = _filled(sizes, rates, padded, most, turn, high)
        if best.sum() == sizes.shape[1]:
            break
        low, high = high, 2 * high
    for _ in range(_RATIO_BISECTIONS):
        middle = (low + high) / 2
        counts = _filled(sizes, rates, padded, most, turn, middle)
        if counts.sum() == sizes.shape[1]:
            best, high = counts, middle
        else:
            low = middle
    return best


@compiled
def _filled(
    sizes: Floats, rates: Floats, padded: Bools, most: Ints, turn: Ints, until: float
) -> Ints:
    """Fill each rank's slice, in the sequence of `turn`, up to the time `until`.

    Return the number of samples in each slice, [W]. Under every cost, the rank must finish its
    slice by `until`, which is relative to the best time under that cost. For the other arguments
    see `_cut`.
    """
    counts = np.zeros(len(turn), np.int64)
    load = np.zeros(len(sizes))
    at = 0
    for k in range(len(turn)):
        j, first = turn[k], at
        load[:] = 0.0
        while at < sizes.shape[1] and counts[k] < most[j]:
            fits, number = True, counts[k] + 1
            for h in range(len(sizes)):
                new = sizes[h, first] * number if padded[h] else load[h] + sizes[h, at]
                done = rates[h, 0, j] * new + rates[h, 1, j] * number + rates[h, 2, j]
                if done > until:
                    fits = False
            if not fits:
                break
            for h in range(len(sizes)):
                load[h] += sizes[h, at]
            counts[k] += 1
            at += 1
    return counts
