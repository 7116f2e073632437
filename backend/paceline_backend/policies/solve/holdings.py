"""Keeps the samples that a worker holds, sorted by size, for CHRONICA's scheduler and shuffler."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from paceline_backend.policies.values import Floats, Ints


class Holdings:
    """Samples in ascending order of size, then of index; a pick is a binary search.

    `samples` are ascending indices, [K], and `sizes` those of the whole data set, [N].
    """

    def __init__(self, samples: Ints, sizes: Floats) -> None:
        mine = sizes[samples]
        order = np.argsort(mine, kind="stable")
        self.samples: list[int] = samples[order].tolist()
        self.sizes: list[float] = mine[order].tolist()
        self.load = float(mine.sum())

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, at: int) -> tuple[int, float]:
        """Remove the sample at a position; return its index and size."""
        size = self.sizes.pop(at)
        self.load -= size
        return self.samples.pop(at), size

    def put(self, sample: int, size: float) -> None:
        """Add a sample."""
        at = bisect_right(self.sizes, size)
        while at and self.sizes[at - 1] == size and self.samples[at - 1] > sample:
            at -= 1
        self.sizes.insert(at, size)
        self.samples.insert(at, sample)
        self.load += size

    def fitting(self, size: float) -> int:
        """Return the position of the largest sample of at most this size, else of the smallest."""
        return max(bisect_right(self.sizes, size) - 1, 0)

    def nearest(self, size: float) -> int:
        """Return the position of the sample nearest in size; of two equally near, the smaller."""
        at = bisect_left(self.sizes, size)
        if at == len(self.sizes):
            return at - 1
        if at and size - self.sizes[at - 1] <= self.sizes[at] - size:
            return at - 1
        return at


def split(remaining: Ints, placement: Ints, sizes: Floats, world: int) -> list[Holdings]:
    """Return the holdings of each worker."""
    holder = placement[remaining]
    # This is one pass for any number of workers.
    held = remaining[np.argsort(holder, kind="stable")]
    ends = np.cumsum(np.bincount(holder, minlength=world))
    return [Holdings(mine, sizes) for mine in np.split(held, ends[:-1])]
