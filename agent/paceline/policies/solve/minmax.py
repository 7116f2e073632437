"""Exact solution of the min–max integer program over batch sizes of BOA and LBB."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from paceline.policies.values import Floats, Ints

# Function from the workers' counts to the workers' times; both are [W].
Times = Callable[[Ints], Floats]

# Maximum number of bisections of the makespan; more exceed the precision of floats.
_MAKESPAN_BISECTIONS = 60


def minmax(times: Times, total: int, limits: Ints) -> Ints:
    """Return each worker's number of samples such that the slowest worker ends first, [W].

    The result n minimises the makespan max_j times_j(n_j), subject to Σ n_j = `total` and 0 ≤ n_j ≤
    limits_j for each worker j. `times` returns the workers' times for their numbers of samples; a
    worker's time must not decrease when its number of samples grows. It is then optimal to give
    each sample to the worker that ends first with it. Bisection on the makespan gives all but a few
    samples at once, in about W · log²(total) operations. Of equally good choices, the result is the
    choice in which the worker that ends first ends as late as possible; if there are still several,
    the lowest ranks get the samples.

    Raises:
        ValueError: the sum of the limits is below the total.
    """
    limits = np.minimum(np.asarray(limits, np.int64), total)
    if limits.sum() < total:
        raise ValueError(
            f"limits: {limits.tolist()} samples fit into the workers' memory, "
            f"fewer than the {total} samples of a step"
        )
    counts = _fill(times, total, limits)
    filled = counts.copy()
    # Times of the workers with 0, 1, 2, … more samples than in `filled`.
    ahead = [times(np.minimum(filled + more, limits)) for more in (0, 1)]
    heap = [
        (float(ahead[1][j]), float(ahead[0][j]), j)
        for j in np.flatnonzero(counts < limits).tolist()
    ]
    heapq.heapify(heap)
    for _ in range(total - int(counts.sum())):
        j = heap[0][2]
        counts[j] += 1
        if counts[j] < limits[j]:
            more = int(counts[j] - filled[j])
            if more + 1 == len(ahead):
                ahead.append(times(np.minimum(filled + more + 1, limits)))
            heapq.heapreplace(heap, (float(ahead[more + 1][j]), float(ahead[more][j]), j))
        else:
            heapq.heappop(heap)
    return _levelled(times, counts, limits)


def _levelled(times: Times, counts: Ints, limits: Ints) -> Ints:
    """Move samples to the worker that ends first, as long as the makespan does not grow.

    Return the new counts, [W]. `counts` has the counts before, [W]; for the other arguments see
    `minmax`.
    """
    if not len(counts):
        return counts
    makespan = float(times(counts).max())
    for _ in range(2 * len(counts)):
        now, fewer = times(counts), times(np.maximum(counts - 1, 0))
        first = int(now.argmin())
        fewer = np.where(counts > 0, fewer, -1.0)
        fewer[first] = -1.0
        donor = int(fewer.argmax())
        more = counts.copy()
        more[[first, donor]] += (1, -1)
        if counts[first] >= limits[first] or fewer[donor] <= now[first]:
            break
        if not now[first] < times(more)[first] <= makespan:
            break
        counts = more
    return counts


def _fill(times: Times, total: int, limits: Ints) -> Ints:
    """Find a makespan in which the workers finish nearly, but not more than, `total` samples.

    Return the number of samples that each worker finishes within it, [W]. The bisection ends when
    at most one sample per worker is missing.
    """
    low, high = np.zeros_like(limits), limits.copy()
    short, enough = 0.0, float(times(high).max(initial=0.0))
    for _ in range(_MAKESPAN_BISECTIONS):
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
    """Return the maximum number of samples that each worker finishes within `makespan`, [W].

    Numbers between `low` and `high`, [W], are tried; each worker finishes `low` samples in time.
    """
    while (open_ := low < high).any():
        middle = (low + high + 1) // 2
        fits = times(middle) <= makespan
        low = np.where(open_ & fits, middle, low)
        high = np.where(open_ & ~fits, middle - 1, high)
    return low
