"""Samples dealt to ranks in turn, like DistributedSampler, and batches cut into micro-batches."""

from __future__ import annotations

from bisect import bisect

import numpy as np
import numpy.typing as npt

from paceline.core.amounts.budget import counts_within

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_HALVINGS = 6  # of what micro-batches may hold: then their sums are equal to within a percent


def equal_counts(samples: int, limits: Ints) -> Ints:
    """How many samples each rank gets if they are dealt in turn, [W]; full ranks are passed over.

    Args:
        samples: of the batch.
        limits: most samples of each rank, [W]; their sum is at least `samples`.
    """
    rounds = bisect(range(samples + 1), samples, key=lambda n: int(np.minimum(limits, n).sum())) - 1
    counts = np.minimum(limits, rounds)
    counts[np.flatnonzero(limits > rounds)[: samples - int(counts.sum())]] += 1
    return counts


def dealt(counts: Ints) -> Ints:
    """Positions in a batch, rank by rank, if samples are dealt to ranks in turn, [counts.sum()].

    A rank that has its count is passed over. With equal counts rank r gets positions r, r + W, ….
    """
    turn = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.empty_like(turn)
    places[np.argsort(turn, kind="stable")] = np.arange(len(turn))
    return places


def cut(sizes: Floats, most: int, grid: int = 1) -> list[Ints]:
    """The fewest micro-batches that a batch can be cut into; their counts differ by `grid` at most.

    Each has samples of similar sizes, so that little is padded.

    Args:
        sizes: λ of the batch's samples, [n], n ≥ 1.
        most: samples of a micro-batch, ≥ 1.
        grid: counts are multiples of it, but for what it does not divide. Ignored above `most`.

    Returns:
        places in the batch, micro-batch by micro-batch.
    """
    order = np.argsort(sizes, kind="stable")
    if grid > most:
        grid = 1
    blocks = -(-len(order) // grid)
    pieces = np.array_split(np.arange(blocks), -(-blocks // (most // grid)))
    return np.split(order, [grid * int(piece[0]) for piece in pieces[1:]])


def cut_within(sizes: Floats, most: float) -> list[Ints]:
    """Micro-batches of a batch, none of which has more than `most` in the unit of the sizes.

    Each has samples of similar sizes. There are as few as that allows, of about equal sums.

    Args:
        sizes: λ of the batch's samples, [n], n ≥ 1; none is more than `most`.
        most: the sum of a micro-batch's sizes.

    Returns:
        places in the batch, micro-batch by micro-batch.

    Raises:
        ValueError: a sample is larger.
    """
    order = np.argsort(sizes, kind="stable")
    ascending = sizes[order]
    counts = counts_within(ascending, most)
    low, high = max(float(ascending.sum()) / len(counts), float(ascending[-1])), most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fewer = counts_within(ascending, middle)
        if len(fewer) > len(counts):
            low = middle
        else:
            counts, high = fewer, middle
    return np.split(order, np.cumsum(counts)[:-1])
