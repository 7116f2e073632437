"""Samples dealt to ranks in turn, as DistributedSampler does it. For leader and policies."""

from __future__ import annotations

from bisect import bisect

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def equal_counts(samples: int, limits: Ints) -> Ints:
    """How many samples each rank gets, dealt in turn past those at their limit, [W].

    Args:
        samples: of the batch.
        limits: the most of each rank, [W]; together at least `samples`.
    """
    rounds = bisect(range(samples + 1), samples, key=lambda n: int(np.minimum(limits, n).sum())) - 1
    counts = np.minimum(limits, rounds)
    counts[np.flatnonzero(limits > rounds)[: samples - int(counts.sum())]] += 1
    return counts


def dealt(counts: Ints) -> Ints:
    """The places in a batch of the first rank's samples, of the second's, …, [counts.sum()].

    Samples go to ranks in turn, past those that have their count: with equal counts rank r gets
    places r, r + W, ….
    """
    turn = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.empty_like(turn)
    places[np.argsort(turn, kind="stable")] = np.arange(len(turn))
    return places
