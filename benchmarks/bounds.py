"""What no planner can beat: the fluid limit, and a bound that knows samples cannot be divided."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NONE = (np.inf, 0)  # an empty class of workers
_TYPES = 2  # how many types of steps suggest values of w and m


def fluid_s(load: float, steps: int, a_s: Floats, overhead_s: float) -> float:
    """Time of a perfectly divisible load: Σλ / Σ(1/a) + steps · b."""
    return float(load / np.sum(1 / a_s) + steps * overhead_s)


def indivisible_s(sizes: Floats, steps: int, a_s: Floats, overhead_s: float) -> float:
    """A lower bound on an epoch's time, whichever samples meet in a step and whoever gets them.

    The bound is Lagrangian. A sample of size λ is worth π(λ) = w · min(λ, m), so an epoch takes at
    least Σ π(λ_i) + steps · min over steps of (T − Σπ of the step's samples). For that minimum only
    the counts of samples matter: a group G of workers with N_G of the step's B samples needs
    T ≥ Λ_G / Σ_G(1/a), hence T − Σπ ≥ N_G · min_λ(λ / Σ_G(1/a) − π(λ)) − (B − N_G) · max π.
    Within a class of equal workers, the minimum is at counts that differ by at most one. Each
    choice of w and m gives a valid bound; the largest of several is returned. w = 1/Σ(1/a) with
    m = ∞ gives the fluid limit.

    A type of step is the number of samples that the fast class gets.

    Args:
        sizes: λ of all samples, which fill `steps` global batches exactly, [N].
        steps: steps of the epoch.
        a_s: s per size unit of each worker, at most two values, [W].
        overhead_s: b, s per step, of every worker.

    Raises:
        ValueError: there are more than two kinds of workers.
    """
    batch = len(sizes) // steps
    fast, slow, *others = [*((float(a), int((a_s == a).sum())) for a in np.unique(a_s)), _NONE]
    if others not in ([], [_NONE]):
        raise ValueError(f"a_s: more than two values, {np.unique(a_s)}")
    groups = [g for g in product(range(fast[1] + 1), range(slow[1] + 1)) if g != (0, 0)]
    speed = np.array([f / fast[0] + s / slow[0] for f, s in groups])
    given = np.arange(batch + 1) if slow[1] else np.array([batch])  # of the fast class, [types]
    number = np.stack(
        [_top(given, f, fast[1]) + _top(batch - given, s, slow[1]) for f, s in groups], axis=1
    )  # [types, groups]
    ordered = np.sort(sizes)
    total = np.concatenate([[0.0], np.cumsum(ordered)])
    # The types of steps that would be fastest with average samples suggest values of w and m.
    level = (number / speed).max(axis=1)
    tried = np.argsort(level, kind="stable")[:_TYPES]
    best = fluid_s(float(total[-1]), steps, a_s, 0.0)
    for kind, g in product(tried, range(len(groups))):
        cut = min(int(number[kind, g]) * steps, len(sizes)) - 1
        if cut < 0:
            continue
        w, m = 1 / speed[g], ordered[cut]
        worth = w * (total[cut + 1] + (len(sizes) - cut - 1) * m)
        least = np.where(1 / speed >= w, ordered[0], m)  # the λ of min_λ
        each = least / speed - w * np.minimum(least, m)
        step = (number * each - (batch - number) * w * m).max(axis=1).min()
        best = max(best, float(worth + steps * step))
    return best + steps * overhead_s


def _top(samples: Ints, workers: int, of: int) -> Ints:
    """Samples of the `workers` with most samples, where `of` workers share evenly, [types]."""
    if of == 0:
        return np.zeros_like(samples)
    each, more = np.divmod(samples, of)
    return np.asarray(workers * each + np.minimum(more, workers))


def padded_step_s(sizes: Floats, a_s: Floats, overhead_s: float) -> float:
    """The least time of a step in which each worker pads its samples to its longest one.

    Take the workers in the order of their longest samples. The one that has the longest may as well
    take the next longest, too: its own time stays as it is, and no other worker's becomes longer.
    So some best division cuts the sorted samples into one run for each worker. A time is enough if
    runs as long as it allows reach the end, for some order of the workers: that is found worker by
    worker for all sets of workers, of which there are 2^W. The least of the times n · λ · a that is
    enough is found by bisection.

    Args:
        sizes: λ of the step's samples, [n].
        a_s: s per size unit of each worker, [W].
        overhead_s: b, s per step, of every worker.
    """
    ordered = np.sort(sizes)[::-1]
    counts = np.arange(1, len(ordered) + 1)
    times = np.unique(np.multiply.outer(np.multiply.outer(counts, ordered), np.unique(a_s)))
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if _reaches(float(times[middle]), ordered, a_s) == len(ordered):
            high = middle
        else:
            low = middle + 1
    return float(times[low]) + overhead_s


def _reaches(time_s: float, ordered: Floats, a_s: Floats) -> int:
    """How many of the samples, longest first, workers can take in a time."""
    reached = np.zeros(1 << len(a_s), np.int64)  # by each set of workers, as bits
    for some in range(1, len(reached)):
        for worker, a in enumerate(a_s):
            if not some >> worker & 1:
                continue
            at = int(reached[some ^ (1 << worker)])
            if at < len(ordered):
                at += int(time_s / (a * ordered[at]) * (1 + 1e-12))
            reached[some] = max(reached[some], min(at, len(ordered)))
    return int(reached[-1])


def padded_s(sizes: Floats, steps: int, a_s: Floats, overhead_s: float) -> float:
    """A lower bound on an epoch's time of padded batches, whichever samples meet.

    The mean of a step's times a · n · max λ, weighted with 1/a, is at most the time of the slowest
    worker. So an epoch takes at least Σ n · max λ / Σ(1/a), over all its batches. That sum is least
    where batches are runs of the sorted samples. The best runs are found by dynamic programming.

    Args:
        sizes: λ of all samples, [N].
        steps: steps of the epoch.
        a_s: s per size unit of each worker, [W].
        overhead_s: b, s per step, of every worker.
    """
    ordered = np.sort(sizes)
    ends = np.arange(len(ordered) + 1)
    most = np.concatenate([[0.0], ordered])  # of a run that ends there
    run = np.where(ends[:, None] >= ends, (ends[:, None] - ends) * most[:, None], np.inf)
    least = run[:, 0]  # of the first samples, in the batches so far, [N + 1]
    for _ in range(min(steps * len(a_s), len(ordered)) - 1):
        least = (run + least).min(axis=1)
    return fluid_s(float(least[-1]), steps, a_s, overhead_s)
