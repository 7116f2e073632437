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
