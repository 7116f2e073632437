"""Lower bounds of all planners: the fluid limit, and a bound for indivisible samples."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Empty class of workers.
_NONE = (np.inf, 0)
# Number of types of steps from which values of w and m are taken.
_TYPES = 2


def fluid_s(load: float, steps: int, a_s: Floats, overhead_s: float) -> float:
    """Return the time of a perfectly divisible load: Σλ / Σ(1/a) + steps · b."""
    return float(load / np.sum(1 / a_s) + steps * overhead_s)


def indivisible_s(sizes: Floats, steps: int, a_s: Floats, overhead_s: float) -> float:
    """Return a lower bound on an epoch's time, for any assignment of samples to steps and workers.

    The bound is Lagrangian. A sample of size λ has the price π(λ) = w · min(λ, m), so an epoch
    takes at least Σ π(λ_i) + steps · min over steps of (T − Σπ of the step's samples). For that
    minimum only the counts of samples matter: a group G of workers with N_G of the step's B samples
    needs T ≥ Λ_G / Σ_G(1/a), hence
    T − Σπ ≥ N_G · min_λ(λ / Σ_G(1/a) − π(λ)) − (B − N_G) · max π. Within a class of equal workers,
    the minimum is at counts that differ by at most one. Each choice of w and m gives a valid bound;
    the largest of several is returned. w = 1/Σ(1/a) with m = ∞ gives the fluid limit.

    A type of step is the number of samples that the fast class gets.

    Args:
        sizes: λ of all samples, which fill `steps` global batches exactly, [N].
        steps: number of steps of the epoch.
        a_s: seconds per size unit of each worker, at most two distinct values, [W].
        overhead_s: b, seconds per step, of every worker.

    Raises:
        ValueError: there are more than two kinds of workers.
    """
    batch = len(sizes) // steps
    fast, slow, *others = [*((float(a), int((a_s == a).sum())) for a in np.unique(a_s)), _NONE]
    if others not in ([], [_NONE]):
        raise ValueError(f"a_s: more than two values, {np.unique(a_s)}")
    groups = [g for g in product(range(fast[1] + 1), range(slow[1] + 1)) if g != (0, 0)]
    speed = np.array([f / fast[0] + s / slow[0] for f, s in groups])
    # Samples of the fast class, [types].
    given = np.arange(batch + 1) if slow[1] else np.array([batch])
    number = np.stack(
        [_top(given, f, fast[1]) + _top(batch - given, s, slow[1]) for f, s in groups], axis=1
    )  # [types, groups]
    ordered = np.sort(sizes)
    total = np.concatenate([[0.0], np.cumsum(ordered)])
    # Take values of w and m from the types of steps that would be fastest with average samples.
    level = (number / speed).max(axis=1)
    tried = np.argsort(level, kind="stable")[:_TYPES]
    best = fluid_s(float(total[-1]), steps, a_s, 0.0)
    for kind, g in product(tried, range(len(groups))):
        cut = min(int(number[kind, g]) * steps, len(sizes)) - 1
        if cut < 0:
            continue
        w, m = 1 / speed[g], ordered[cut]
        worth = w * (total[cut + 1] + (len(sizes) - cut - 1) * m)
        # The λ at which min_λ is attained.
        least = np.where(1 / speed >= w, ordered[0], m)
        each = least / speed - w * np.minimum(least, m)
        step = (number * each - (batch - number) * w * m).max(axis=1).min()
        best = max(best, float(worth + steps * step))
    return best + steps * overhead_s


def _top(samples: Ints, workers: int, of: int) -> Ints:
    """Return the number of samples that the fullest workers have, [types].

    `of` workers share `samples` evenly. The result is for the `workers` of them with most samples.
    """
    if of == 0:
        return np.zeros_like(samples)
    each, more = np.divmod(samples, of)
    return np.asarray(workers * each + np.minimum(more, workers))
