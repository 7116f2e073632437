"""Dealing samples to ranks in turn, like DistributedSampler, and cutting local batches."""

from __future__ import annotations

from bisect import bisect

import numpy as np
import numpy.typing as npt

from paceline.core.batch_limits.budget import counts_within

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Number of bisection steps in the search for the smallest limit of a micro-batch's total size. They
# suffice to make the total sizes equal to within 1 %.
_LIMIT_BISECTIONS = 6


def equal_counts(samples: int, limits: Ints) -> Ints:
    """Return each rank's number of samples if ranks get samples in turn until they are full.

    `limits` has the maximum number of samples of each rank; their sum is at least `samples`.
    """
    rounds = bisect(range(samples + 1), samples, key=lambda n: int(np.minimum(limits, n).sum())) - 1
    counts = np.minimum(limits, rounds)
    counts[np.flatnonzero(limits > rounds)[: samples - int(counts.sum())]] += 1
    return counts


def dealt(counts: Ints) -> Ints:
    """Deal a batch's samples to ranks in turn; return their positions in the batch, rank by rank.

    `counts` has each rank's number of samples. A rank that has reached its count is skipped. With
    equal counts, rank r of W ranks gets positions r, r + W, ….
    """
    turn = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.empty_like(turn)
    places[np.argsort(turn, kind="stable")] = np.arange(len(turn))
    return places


def cut(sizes: Floats, most: int, grid: int = 1) -> list[Ints]:
    """Cut a batch into the fewest micro-batches, whose counts differ by at most `grid`.

    Each micro-batch has samples of similar sizes, so that there is little padding. Return positions
    in the batch, micro-batch by micro-batch.

    Args:
        sizes: the sizes λ of the batch's samples, at least one.
        most: maximum number of samples of a micro-batch, ≥ 1.
        grid: each count is a multiple of `grid`, except for a remainder. A `grid` above `most` is
            ignored.
    """
    order = np.argsort(sizes, kind="stable")
    if grid > most:
        grid = 1
    blocks = -(-len(order) // grid)
    pieces = np.array_split(np.arange(blocks), -(-blocks // (most // grid)))
    return np.split(order, [grid * int(piece[0]) for piece in pieces[1:]])


def cut_within(sizes: Floats, most: float) -> list[Ints]:
    """Cut a batch into micro-batches, none of which has a total size above `most`.

    Each micro-batch has samples of similar sizes. The number of micro-batches is the smallest
    possible, and their total sizes are about equal. `sizes` has the sizes λ of the batch's samples,
    at least one. Return positions in the batch, micro-batch by micro-batch.

    Raises:
        ValueError: a sample is larger than `most`.
    """
    order = np.argsort(sizes, kind="stable")
    ascending = sizes[order]
    counts = counts_within(ascending, most)
    low, high = max(float(ascending.sum()) / len(counts), float(ascending[-1])), most
    for _ in range(_LIMIT_BISECTIONS):
        middle = (low + high) / 2
        fewer = counts_within(ascending, middle)
        if len(fewer) > len(counts):
            low = middle
        else:
            counts, high = fewer, middle
    return np.split(order, np.cumsum(counts)[:-1])
