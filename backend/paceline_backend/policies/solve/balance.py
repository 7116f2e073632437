"""Divides one global batch among the workers so that its slowest worker ends as early as possible.

The model is T_j = a_j·Σf(λ) + c_j·n + b_j, and 0 for a worker without samples. (Padded batches are
in `padded`.) First each sample goes to the worker with the largest gap. Then the slowest worker
exchanges samples with the others until no exchange helps. For few samples, branch and bound
continues the search.
"""

from __future__ import annotations

import numpy as np

from paceline_backend.policies.jit import compiled
from paceline_backend.policies.solve.descent import DescentState, descend, pairs
from paceline_backend.policies.solve.padded import partition_padded
from paceline_backend.policies.solve.search import search
from paceline_backend.policies.solve.workers import Workers, descending, least, level, most_of
from paceline_backend.policies.values import Floats, Ints, Models

# The relative distance to the bound at which the search ends, with more than `FEW_RANKS` ranks and
# with at most `FEW_RANKS` ranks.
_CLOSE = 1e-3
_CLOSER = 1e-5
# The number of bisections in the search for the best cut.
_HALVINGS = 6
# Up to this many ranks, every exchange with the slowest rank is tried.
FEW_RANKS = 64
# Up to this many samples, branch and bound runs.
_FEW_SAMPLES = 20
# The number of exchanges that are tried for one batch (2 ms); fewer with many ranks.
_EFFORT = 1_000_000


def partition(
    sizes: Floats,
    models: Models,
    counts: Ints | None = None,
    limits: Ints | None = None,
    *,
    laid_out: bool = False,
) -> Ints:
    """Return the rank of each sample of a global batch, [n], with the least max_j T_j found.

    To level loads in proportion to `counts`, pass models with ``a = 1 / counts``.

    Args:
        sizes: λ of the samples, [n].
        models: of the workers; `models.cost` defines the cost of a batch from its sizes.
        counts: the number of samples of each worker, [W]; their sum is n. None: any numbers.
        limits: most samples that fit into each worker's memory, [W]; ignored if the batch does not
            fit.
        laid_out: the samples are composed for ranks 0, 1, …: begin with the best cut of them.

    Raises:
        ValueError: the counts' sum is not n.
    """
    samples, world = len(sizes), models.world
    if counts is not None and int(np.sum(counts)) != samples:
        raise ValueError(f"counts: their sum is {int(np.sum(counts))}; there are {samples} sizes")
    workers = Workers.of(models, most_of(limits if counts is None else counts, samples, world))
    effective = np.array(models.cost.sizes(sizes), np.float64)
    if samples == 0:
        return np.empty(0, np.int64)
    if models.cost.padded:
        return partition_padded(effective, workers, laid_out=laid_out)
    goal = level(effective, workers)
    cut, fits = np.empty(0, np.int64), False
    if laid_out and counts is None:
        cut, fits = _cut(effective, workers, goal)
    if fits and samples > _FEW_SAMPLES:
        return _improved(effective, workers, goal, cut)
    order = descending(effective)
    ranks = np.empty(samples, np.int64)
    ranks[order] = _improved(effective[order], workers, goal, cut[order] if fits else None)
    return ranks


def _improved(sizes: Floats, workers: Workers, goal: float, start: Ints | None) -> Ints:
    """Improve `start`, [n]. Without it, or with few samples, sizes must be descending."""
    world = len(workers.a)
    few = world <= FEW_RANKS
    alone = float((workers.a * sizes.max() + workers.c + workers.b)[workers.most > 0].min())
    goal = max(goal, alone)
    bound = max(least(sizes, workers), alone) if few else goal
    ranks = _largest_gap(sizes, workers, goal) if start is None else start
    enough = bound * (1 + (_CLOSER if few else _CLOSE))
    state = DescentState.of(sizes, ranks, workers)
    if not few:
        pairs(sizes, workers, state, enough)
    descend(sizes, workers, state, enough, _EFFORT // (1 + world // FEW_RANKS))
    if len(sizes) <= _FEW_SAMPLES and state.time_s.max() > bound * (1 + 1e-12):
        rest = np.append(np.cumsum(sizes[::-1])[::-1], 0.0)
        search(sizes, rest, workers, bound, float(state.time_s.max()), ranks)
    return ranks


@compiled
def _cut(sizes: Floats, w: Workers, low: float) -> tuple[Ints, bool]:
    """Return the best cut of the samples into runs for ranks 0, 1, …; False if no cut fits.

    Every cut takes at least `low`. Composed samples have cuts near `low`, so the search begins
    there.
    """
    ranks, best, fits = np.empty(len(sizes), np.int64), np.empty(len(sizes), np.int64), False
    step = _CLOSE / 16 * low
    high, halvings = low + step, 0
    while halvings < _HALVINGS and 0 < step < 64 * low:
        time_s = (low + high) / 2 if fits else high
        i = 0
        for j in range(len(w.a)):
            done, end = w.b[j], min(i + w.most[j], len(sizes))
            while i < end:
                done += w.a[j] * sizes[i] + w.c[j]
                if done > time_s:
                    break
                ranks[i] = j
                i += 1
        if fits:
            halvings += 1
        if i == len(sizes):
            ranks, best, fits, high = best, ranks, True, time_s
        elif fits:
            low = time_s
        else:
            low, step = high, 2 * step
            high = low + step
    return best, fits


@compiled
def grouped(ranks: Ints, world: int) -> tuple[Ints, Ints]:
    """Return positions sorted by rank, ascending within a rank, [n], and each rank's count, [W]."""
    counts = np.zeros(world, np.int64)
    for i in range(len(ranks)):
        counts[ranks[i]] += 1
    at = np.empty(world, np.int64)
    total = 0
    for j in range(world):
        at[j] = total
        total += counts[j]
    order = np.empty(len(ranks), np.int64)
    for i in range(len(ranks)):
        order[at[ranks[i]]] = i
        at[ranks[i]] += 1
    return order, counts


def _largest_gap(sizes: Floats, workers: Workers, goal: float) -> Ints:
    """Give each sample, largest first, to the rank with the most room below `goal`.

    Where counts are given, a rank keeps room for average samples in its other places.
    """
    a, c, b, most = workers
    mean = float(sizes.mean())
    if int(most.sum()) == len(sizes):
        gap = (goal - b - c * most) / a - mean * (most - 1)
        return _gaps(sizes - mean, gap, np.zeros(len(a)), most)
    return _gaps(sizes, (goal - b - c) / a, c / a, most)


def _gaps(sizes: Floats, gap: Floats, each: Floats, most: Ints) -> Ints:
    heap = np.argsort(-gap, kind="stable")
    heap = heap[most[heap] > 0]
    return _largest_first(sizes, gap, each, most.copy(), heap)


@compiled
def _largest_first(sizes: Floats, gap: Floats, each: Floats, left: Ints, heap: Ints) -> Ints:
    end = len(heap)
    ranks = np.empty(len(sizes), np.int64)
    for i in range(len(sizes)):
        j = heap[0]
        ranks[i] = j
        gap[j] -= sizes[i] + each[j]
        left[j] -= 1
        if left[j] == 0:
            end -= 1
            heap[0] = heap[end]
        item, at = heap[0], 0
        while True:
            child = 2 * at + 1
            if child >= end:
                break
            if child + 1 < end and gap[heap[child + 1]] > gap[heap[child]]:
                child += 1
            if gap[heap[child]] <= gap[item]:
                break
            heap[at] = heap[child]
            at = child
        heap[at] = item
    return ranks
