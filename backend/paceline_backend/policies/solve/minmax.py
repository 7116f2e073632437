"""The min–max integer program over batch sizes that BOA and LBB solve, exactly."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from paceline_backend.policies.base import Floats, Ints

Times = Callable[[Ints], Floats]  # counts [W] → each worker's time, [W]

_HALVINGS = 60  # of the makespan: beyond that floats do not tell two apart


def minmax(times: Times, total: int, limits: Ints) -> Ints:
    """Counts n that minimise max_j times_j(n_j), with Σ n = total and 0 ≤ n_j ≤ limits_j, [W].

    Exact: giving one sample after the other to whom it would make least late is optimal for times
    that do not decrease. All samples but a few are given at once, by bisection on the makespan, so
    that it takes some W · log²(total) steps. Of equally good choices the lowest ranks'.

    Args:
        times: each worker's time for so many samples, not decreasing in them.
        total: samples, ≥ 0.
        limits: most samples of each worker, [W].

    Raises:
        ValueError: the limits' sum is below the total.
    """
    limits = np.minimum(np.asarray(limits, np.int64), total)
    if limits.sum() < total:
        raise ValueError(
            f"limits: {limits.tolist()} samples fit into the workers' memory, "
            f"fewer than the {total} of a step"
        )
    counts = _fill(times, total, limits)
    filled = counts.copy()
    ahead = [times(np.minimum(filled + 1, limits))]  # with 1, 2, … samples more, all workers' times
    heap = [(float(ahead[0][j]), j) for j in np.flatnonzero(counts < limits).tolist()]
    heapq.heapify(heap)
    for _ in range(total - int(counts.sum())):
        j = heap[0][1]
        counts[j] += 1
        if counts[j] < limits[j]:
            more = int(counts[j] - filled[j])
            if more == len(ahead):
                ahead.append(times(np.minimum(filled + more + 1, limits)))
            heapq.heapreplace(heap, (float(ahead[more][j]), j))
        else:
            heapq.heappop(heap)
    return counts


def _fill(times: Times, total: int, limits: Ints) -> Ints:
    """What the workers can do within a makespan in which they cannot do all; nearly all of it."""
    low, high = np.zeros_like(limits), limits.copy()
    short, enough = 0.0, float(times(high).max(initial=0.0))
    for _ in range(_HALVINGS):
        makespan = (short + enough) / 2
        if total - low.sum() <= len(limits) or not short < makespan < enough:
            break
        done = _within(times, makespan, low, high)
        if done.sum() > total:
            high, enough = done, makespan
        else:
            low, short = done, makespan
    return low


def _within(times: Times, makespan: float, low: Ints, high: Ints) -> Ints:
    """The most samples, between low and high, that each worker does within a makespan."""
    while (open_ := low < high).any():
        middle = (low + high + 1) // 2
        fits = times(middle) <= makespan
        low = np.where(open_ & fits, middle, low)
        high = np.where(open_ & ~fits, middle - 1, high)
    return low
