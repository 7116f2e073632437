"""Filling of one global batch from the samples that each worker holds (CHRONICA, Alg. 2).

`fill` gives random samples to the worker that would finish first, and `level_out` exchanges some of
them. `largest_first` fills an epoch's last step.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from math import inf

import numpy as np

from paceline.policies.values import Floats, Ints, Models

# Exchanges count as equal if their errors differ by less than this fraction of a batch's load.
_SLACK = 1e-9


class Holdings:
    """The samples that a worker holds, sorted by ascending size, then by index.

    `samples` are the ascending indices of the K held samples, [K], and `sizes` the sizes of all
    samples of the data set, [N].
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
        """Remove the sample at position `at`; return its index and its size."""
        size = self.sizes.pop(at)
        self.load -= size
        return self.samples.pop(at), size

    def put(self, sample: int, size: float) -> None:
        """Add a sample, given by its index, and its size."""
        at = bisect_right(self.sizes, size)
        while at and self.sizes[at - 1] == size and self.samples[at - 1] > sample:
            at -= 1
        self.sizes.insert(at, size)
        self.samples.insert(at, sample)
        self.load += size

    def fitting(self, size: float) -> int:
        """Return the position of the largest sample that is not larger than `size`.

        If all samples are larger, return the position of the smallest one.
        """
        return max(bisect_right(self.sizes, size) - 1, 0)

    def nearest(self, size: float) -> int:
        """Return the position of the sample whose size is nearest to `size`.

        If a smaller and a larger sample are equally near, return the position of the smaller one.
        """
        at = bisect_left(self.sizes, size)
        if at == len(self.sizes):
            return at - 1
        if at and size - self.sizes[at - 1] <= self.sizes[at] - size:
            return at - 1
        return at


def split(remaining: Ints, placement: Ints, sizes: Floats, world: int) -> list[Holdings]:
    """Return the holdings of each worker, [W].

    `placement` has the worker that holds each sample, and `sizes` the samples' sizes, [N] each.
    """
    holder = placement[remaining]
    held = remaining[np.argsort(holder, kind="stable")]
    ends = np.cumsum(np.bincount(holder, minlength=world))
    return [Holdings(mine, sizes) for mine in np.split(held, ends[:-1])]


class Filling:
    """One global batch while it is filled with samples that the workers hold.

    `most` is the maximum number of samples of each worker, [W]. The data is in lists, because
    access to single NumPy values is slow.
    """

    def __init__(
        self,
        models: Models,
        most: Ints,
        holdings: list[Holdings],
        nodes: list[int] | None = None,
    ) -> None:
        # Index of each rank's node, [W]; None: samples may move between nodes.
        self.nodes = nodes
        self.most: list[int] = most.tolist()
        self.a: list[float] = models.a.tolist()
        self.c: list[float] = models.c.tolist()
        self.ett: list[float] = models.b.tolist()
        # Pairs of sample and size in each rank's batch.
        self.batches: list[list[tuple[int, float]]] = [[] for _ in self.a]
        self.holdings = holdings
        # Each worker's time for all samples that it still holds, [W]; None: not computed yet.
        self._left: Floats | None = None

    def source(self, rank: int) -> int | None:
        """Return the worker from whose holdings `rank` gets its next sample, or None.

        The result is the rank itself if it holds samples, otherwise the worker with most work left.
        If samples stay on their nodes (`nodes`), the result is a worker of the same node, or None
        if no worker of that node holds a sample. The paper does not define what a worker that holds
        no sample does. Here it gets a sample of another worker, and the sample counts as moved.
        """
        if self.holdings[rank]:
            return rank
        if self._left is None:
            self._left = np.array([self._left_of(rank) for rank in range(len(self.holdings))])
        if self.nodes is None:
            return int(self._left.argmax())
        on_node = np.where(np.array(self.nodes) == self.nodes[rank], self._left, -inf)
        return int(on_node.argmax()) if on_node.max() > -inf else None

    def open(self) -> list[tuple[float, int]]:
        """Return a heap of pairs (expected time, worker) of all workers that are not full."""
        least = [(ett, rank) for rank, ett in enumerate(self.ett) if not self.full(rank)]
        heapq.heapify(least)
        return least

    def give(self, rank: int, source: int, at: int) -> None:
        """Give `rank` the sample at position `at` of the holdings of `source`."""
        self.add(rank, *self.holdings[source].take(at))
        if self._left is not None:
            self._left[source] = self._left_of(source)

    def _left_of(self, rank: int) -> float:
        held = self.holdings[rank]
        return self.a[rank] * held.load + self.c[rank] * len(held) if held else -inf

    def add(self, rank: int, sample: int, size: float) -> None:
        """Add a sample, which was removed from the holdings, to the batch of `rank`."""
        self.batches[rank].append((sample, size))
        self.ett[rank] += self.a[rank] * size + self.c[rank]

    def full(self, rank: int) -> bool:
        """Return True if no more samples fit into the rank's memory."""
        return len(self.batches[rank]) >= self.most[rank]

    def assignments(self) -> list[Ints]:
        """Return the samples in each rank's batch, [W]."""
        return [np.array([sample for sample, _ in batch], np.int64) for batch in self.batches]


def fill(step: Filling, draws: list[float]) -> None:
    """Give one sample per element of `draws` to the worker that would then finish first.

    An element, from 0 to 1, is the relative position of the sample among those that the worker
    holds.
    """

    def done(rank: int) -> float:
        held = step.holdings[rank]
        typical = held.load / len(held) if held else 0.0
        return step.ett[rank] + step.a[rank] * typical + step.c[rank]

    def all_open() -> list[tuple[float, int]]:
        first = [(done(rank), rank) for rank in range(len(step.a)) if not step.full(rank)]
        heapq.heapify(first)
        return first

    first = all_open()
    for draw in draws:
        while (source := step.source(first[0][1])) is None:
            heapq.heappop(first)
            # On each node that still holds samples, all ranks are full: let samples change their
            # node.
            if not first:
                step.nodes = None
                first = all_open()
        rank = first[0][1]
        step.give(rank, source, int(draw * len(step.holdings[source])))
        if step.full(rank):
            heapq.heappop(first)
            if not first:
                step.nodes = None
                first = all_open()
        else:
            heapq.heapreplace(first, (done(rank), rank))


def level_out(step: Filling) -> None:
    """Let each worker exchange one sample of its batch for another sample that it holds.

    Each worker makes the exchange that brings its time nearest to a common time: the time at
    which all workers would end if the batch's load could be divided exactly.
    """
    active = [rank for rank, batch in enumerate(step.batches) if batch]
    speed = [1.0 / step.a[rank] for rank in active]
    ett = [step.ett[rank] for rank in active]
    level = sum(e * s for e, s in zip(ett, speed, strict=True)) / sum(speed)
    for rank in active:
        held, batch = step.holdings[rank], step.batches[rank]
        if not held:
            continue
        missing = (level - step.ett[rank]) / step.a[rank]
        nearest = [held.nearest(size + missing) for _, size in batch]
        error = [
            abs(size + missing - held.sizes[at])
            for at, (_, size) in zip(nearest, batch, strict=True)
        ]
        # Of almost equal exchanges, take the first: rounding must not decide.
        slack = _SLACK * abs(level) / step.a[rank]
        least = min(error) + slack
        best = next(k for k, each in enumerate(error) if each <= least)
        if error[best] < abs(missing) - slack:
            sample, size = batch.pop(best)
            step.ett[rank] -= step.a[rank] * size + step.c[rank]
            step.add(rank, *held.take(nearest[best]))
            held.put(sample, size)


def largest_first(step: Filling) -> None:
    """Give all held samples, largest first, each to the worker that would finish first."""
    rest = sorted(
        (-size, sample, holder)
        for holder, held in enumerate(step.holdings)
        for size, sample in zip(held.sizes, held.samples, strict=True)
    )
    nodes = None if step.nodes is None else np.array(step.nodes)
    a, c, ett = np.array(step.a), np.array(step.c), np.array(step.ett)
    for rank in range(len(a)):
        if step.full(rank):
            ett[rank] = inf
    for size, sample, holder in rest:
        done = ett + a * -size + c
        if nodes is not None and np.isfinite(done[nodes == nodes[holder]]).any():
            done[nodes != nodes[holder]] = inf
        rank = int(np.argmin(done))
        step.add(rank, sample, -size)
        ett[rank] = inf if step.full(rank) else step.ett[rank]
