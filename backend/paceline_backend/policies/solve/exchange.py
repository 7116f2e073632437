"""Exchanges samples between bins until each bin has its target load; `compose` calls it last.

A bin is the local batch of one worker in one step. The number of samples of each bin does not
change.
"""

from __future__ import annotations

import numpy as np

from paceline_backend.policies.jit import compiled
from paceline_backend.policies.solve.balance import grouped
from paceline_backend.policies.solve.workers import Workers, descending
from paceline_backend.policies.values import Floats, Ints

# Bins closer to their target than this fraction of a step's time are left alone.
_CLOSE = 2e-4
# The most rounds of exchanges.
_ROUNDS = 64
# The exchanges end after this many rounds without a change.
_IN_VAIN = 4
# The exchanges end after this many pairs of samples were tried (0.1 s).
_LOOKS = 30_000_000
# With more bins, the exchanges end when few bins change.
_FEW_BINS = 4096
# The number of passes of `evened`; with more than `_FEW_BINS` bins, one pass.
_EVENED = 6


def close(sizes: Floats, bins: Ints, gap: Floats, a: Floats, step_s: float) -> None:
    """Exchange a sample between bins with too much load and bins with too little, worst first.

    `bins`, the bin step · W + worker of each sample, and `gap`, the load that each bin lacks, are
    changed in place. `a` is s per size unit, [W], and `step_s` the mean time of a step.
    """
    held, number = grouped(bins, len(gap))
    ends = np.cumsum(number)
    # A bin's samples are adjacent in memory: for a million samples, reading memory takes longest.
    of_held = sizes[held]
    a = np.tile(a, len(gap) // len(a))
    off = np.arange(len(gap))
    looks, in_vain = 0, 0
    for turn in range(_ROUNDS):
        # Keep the bins that are not close to their target.
        off = off[np.abs(gap[off]) * a[off] > _CLOSE * step_s]
        off = off[np.argsort(gap[off], kind="stable")]
        looks += len(off) // 2 * int(number.max()) ** 2
        if looks > _LOOKS and turn:
            break
        changed = _exchanged(off, turn, of_held, held, ends, gap, a)
        in_vain = 0 if changed else in_vain + 1
        if in_vain == _IN_VAIN or (len(off) > _FEW_BINS and changed <= len(off) // 16):
            break
    bins[held] = np.repeat(np.arange(len(gap)), number)


@compiled
def _exchanged(
    off: Ints, turn: int, sizes: Floats, held: Ints, ends: Ints, gap: Floats, a: Floats
) -> int:
    """Exchange samples within pairs of bins, other pairs each turn; return the number."""
    changed, pairs = 0, len(off) // 2
    for k in range(pairs):
        # Bin p has too much load.
        p, q = off[k], off[len(off) - 1 - (k + turn) % pairs]
        before = (gap[p] * a[p]) ** 2 + (gap[q] * a[q]) ** 2
        best, give, get = before, 0, 0
        for i in range(ends[p - 1] if p else 0, ends[p]):
            for m in range(ends[q - 1] if q else 0, ends[q]):
                more = sizes[i] - sizes[m]
                left = ((gap[p] + more) * a[p]) ** 2 + ((gap[q] - more) * a[q]) ** 2
                if left < best:
                    best, give, get = left, i, m
        if best < 0.99 * before:
            more = sizes[give] - sizes[get]
            gap[p] += more
            gap[q] -= more
            sizes[give], sizes[get] = sizes[get], sizes[give]
            held[give], held[get] = held[get], held[give]
            changed += 1
    return changed


def matched(bins: Ints, sizes: Floats, steps: int, world: int) -> Ints:
    """Regroup bins into steps: the fullest bins of all workers share a step, and so on.

    A worker's bins hold equally many samples, so any of them may share a step. This grouping
    minimises the total time of all steps.
    """
    load = np.bincount(bins, sizes, minlength=(steps + 1) * world).reshape(-1, world)
    # The smaller last step stays last.
    load[steps] = -1.0
    step = np.argsort(np.argsort(-load, axis=0, kind="stable"), axis=0)
    return np.asarray((step * world + np.arange(world)).ravel()[bins])


def evened(bins: Ints, sizes: Floats, workers: Workers, counts: Ints, step_s: float) -> Ints:
    """Return matched bins after further exchanges.

    Exchanges continue while the total time of the steps falls. If bins have few samples and sizes
    are whole numbers, no bin can have the mean time. The bins of one step can still have equal
    times. `counts` are the samples of each bin, [steps + 1, W]; `step_s` is the mean time of a
    step.
    """
    steps, world = len(counts) - 1, counts.shape[1]

    def times(of: Ints) -> Floats:
        load = np.bincount(of, sizes, minlength=counts.size).reshape(counts.shape)
        time_s = workers.a * load + workers.c * counts + workers.b
        return np.asarray(np.where(counts > 0, time_s, np.nan))

    bins = matched(bins, sizes, steps, world)
    time_s = times(bins)
    for _ in range(_EVENED if counts.size <= _FEW_BINS else 1):
        other = bins.copy()
        close(sizes, other, _targets(time_s, workers.a), workers.a, step_s)
        other = matched(other, sizes, steps, world)
        then_s = times(other)
        if _total(then_s) >= _total(time_s):
            break
        bins, time_s = other, then_s
    return bins


def _total(time_s: Floats) -> float:
    return float(np.nan_to_num(time_s).max(axis=1).sum())


def _targets(time_s: Floats, a: Floats) -> Floats:
    """Return the load that each bin lacks to take the median time of its step's bins, [bins].

    The loads to add and to remove differ. The difference goes into few steps: if load is left over,
    the bins of some steps get the time of their step's slowest bin; if load is missing, they get
    the time of the fastest bin.
    """
    # `np.sort` puts NaN last.
    there = np.sort(time_s, axis=1)
    number = np.maximum((~np.isnan(time_s)).sum(axis=1), 1)
    row = np.arange(len(time_s))
    gap = np.nan_to_num((there[row, (number - 1) // 2][:, None] - time_s) / a)
    left = -float(gap.sum())
    extreme = there[row, number - 1] if left > 0 else there[:, 0]
    other = np.nan_to_num((extreme[:, None] - time_s) / a)
    order = descending(np.maximum(-gap if left > 0 else gap, 0.0).sum(axis=1))
    after = left - np.cumsum((other - gap).sum(axis=1)[order])
    some = order[: np.searchsorted(after <= 0, True) + 1 if left > 0 else (after <= 0).sum()]
    gap[some] = other[some]
    return np.asarray(gap.ravel())
