"""Samples change places between bins, until each bin has the load that it should.

A bin is one worker's part of one step; how many samples each has stays as it is.
"""

from __future__ import annotations

import numpy as np

from paceline_backend.policies.base import Floats, Ints
from paceline_backend.policies.jit import compiled
from paceline_backend.policies.solve.balance import grouped
from paceline_backend.policies.solve.workers import Workers, descending

_CLOSE = 2e-4  # of a step's time: bins nearer to their target are left alone
_ROUNDS = 64  # of exchanges at most
_IN_VAIN = 4  # rounds that changed nothing end it
_LOOKS = 30_000_000  # pairs of samples to look at, which takes 0.1 s, end it, too
_FEW_BINS = 4096  # with more of them, rounds in which few change end it; see also:
_EVENED = 6  # passes that make bins which meet alike; with more than the few bins, one


def close(sizes: Floats, bins: Ints, gap: Floats, a: Floats, step_s: float) -> None:
    """Bins with too much exchange a sample with bins with too little, at first worst with worst.

    Args:
        sizes: of the samples.
        bins: of each, step · W + worker; changed in place.
        gap: the load that each bin lacks, [bins]; changed in place.
        a: of the workers, s per size unit, [W].
        step_s: that a step takes in the mean.
    """
    held, number = grouped(bins, len(gap))
    ends = np.cumsum(number)
    # A bin's samples side by side: for a million of them, reading is what takes long.
    of_held = sizes[held]
    a = np.tile(a, len(gap) // len(a))
    off = np.arange(len(gap))
    looks, in_vain = 0, 0
    for turn in range(_ROUNDS):
        off = off[np.abs(gap[off]) * a[off] > _CLOSE * step_s]  # not near enough to their target
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
    """Has the first of the bins exchange with the last, and so on; how many did.

    In the next turn each meets another one.
    """
    changed, pairs = 0, len(off) // 2
    for k in range(pairs):
        p, q = off[k], off[len(off) - 1 - (k + turn) % pairs]  # p has too much
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
    """Bins of such steps that each worker's fullest meet, then the next ones, ….

    A worker's bins hold as many samples in all steps, so any of them may meet; like this the steps'
    slowest take least in total.
    """
    load = np.bincount(bins, sizes, minlength=(steps + 1) * world).reshape(-1, world)
    load[steps] = -1.0  # the smaller last step stays last
    step = np.argsort(np.argsort(-load, axis=0, kind="stable"), axis=0)
    return np.asarray((step * world + np.arange(world)).ravel()[bins])


def evened(bins: Ints, sizes: Floats, workers: Workers, counts: Ints, step_s: float) -> Ints:
    """The bins, matched, after further exchanges as long as these make steps take less in total.

    Where few samples make a bin, and sizes are whole numbers, no bin takes what all should in the
    mean; but those that meet can take the same.

    Args:
        bins: of the samples.
        sizes: of the samples.
        workers: that share a step.
        counts: samples of each bin, [steps + 1, W].
        step_s: that a step takes in the mean.
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
    """What steps take, each as long as its slowest bin; NaN: a bin without samples."""
    return float(np.nan_to_num(time_s).max(axis=1).sum())


def _targets(time_s: Floats, a: Floats) -> Floats:
    """The load that each bin lacks to take what about half of those that it meets do, [bins].

    What does not come out even should be in few steps. If there is more than room for, some steps
    have all bins take what their slowest does; if there is less, what their fastest does, as long
    as room is left.
    """
    there = np.sort(time_s, axis=1)  # NaN last
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
