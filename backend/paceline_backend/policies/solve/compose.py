"""Choice of the samples of each step, so that every step divides well between the workers.

The `paceline` preset calls `compose` in free mode, for unpadded costs, at each epoch's start and
when the ranks' speeds have changed.

An epoch of K steps on W workers is K·W bins: the local batch of one worker in one step. Bin (step,
worker) gets a fixed number of samples (`step_counts`) and should get the load that the worker can
do in the step's time. Samples that are too large for an average step share steps of their own, one
sample on each worker, smaller samples on slower workers. All other steps take the same time. The
order of the steps is random, and so is the choice among samples of similar size.

First each sample, largest first, is dealt to the bin with the most room. Then bins exchange samples
until each bin has its target load (`close`), and bins of equal counts are regrouped into steps
(`matched`, `evened`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline_backend.policies.jit import compiled
from paceline_backend.policies.solve.balance import grouped
from paceline_backend.policies.solve.padded import proportional
from paceline_backend.policies.solve.workers import Workers, descending, level
from paceline_backend.policies.values import Floats, Ints

Bools = npt.NDArray[np.bool_]

# Ordinary samples are sorted by the logarithm of their size plus uniform noise of at most this.
_JITTER = 0.3
# The bins of the largest samples are filled up with this fraction of the samples, the smallest.
_FILLERS = 0.2
# A step with a large sample is long enough for all workers whose time with the sample is at most
# this multiple of the fastest worker's time.
_ALIKE = 1.02

# Bins closer to their target than this fraction of a step's time are not changed.
_CLOSE = 2e-4
# Maximum number of passes over the bins in `close`.
_ROUNDS = 64
# Number of consecutive passes without a change after which the exchanges end.
_IN_VAIN = 4
# Number of pairs of samples that are tried before the exchanges end (0.1 s).
_LOOKS = 30_000_000
# With more bins than this, the exchanges end as soon as a pass changes few bins.
_FEW_BINS = 4096
# Number of passes of `evened`; with more than `_FEW_BINS` bins, there is one pass.
_EVENED = 6


def compose(
    effective: Floats, workers: Workers, global_batch: int, rng: np.random.Generator
) -> Ints:
    """Order the samples so that each `global_batch` of them divides well among the workers.

    The order has positions in `effective`, the f(λ) of each sample, [R]. Within a step, samples are
    sorted by the worker for which they are intended. The samples of a smaller last step come last.
    """
    steps, rest = divmod(len(effective), global_batch)
    if steps == 0 or global_batch < 2:
        return rng.permutation(len(effective))
    smallest = np.concatenate([[0.0], np.cumsum(np.sort(effective))])
    counts, bind = step_counts(smallest, workers, global_batch)
    last = step_counts(smallest, workers, rest)[0] if rest else np.zeros_like(counts)
    step_s = level(effective, workers) * global_batch / len(effective)
    order = _descending(effective, step_s, workers, rng)
    sizes = effective[order]
    # Workers that take longest even with the smallest samples get exactly the smallest samples.
    small = np.zeros(len(sizes), bool)
    few = int(steps * counts[bind].sum() + last[bind].sum())
    if few:
        small[descending(sizes)[-few:]] = True
    world = len(counts)
    bins = np.empty(len(sizes), np.int64)
    for chosen, among in ((~small, ~bind), (small, bind)):
        if among.any():
            part, some = sizes[chosen], workers.only(among)
            dealt = _dealt(part, some, counts[among], last[among], steps)
            close(part, dealt.of, dealt.gap, some.a, step_s)
            step, member = np.divmod(dealt.of, len(some.a))
            bins[chosen] = step * world + np.flatnonzero(among)[member]
    bins = evened(bins, sizes, workers, np.vstack([np.tile(counts, (steps, 1)), last]), step_s)
    turn = np.append(rng.permutation(steps), steps)
    laid_out: Ints = order[_laid_out(bins, counts, last, turn)]
    return laid_out


def _descending(
    effective: Floats, step_s: float, workers: Workers, rng: np.random.Generator
) -> Ints:
    """Return the samples' positions, largest first, with noise on ordinary sizes to vary epochs."""
    ordinary = effective < 0.5 * step_s / workers.a.max()
    noise = np.exp(rng.uniform(-_JITTER, _JITTER, len(effective)))
    return descending(np.where(ordinary, effective * noise, effective))


def step_counts(smallest: Floats, workers: Workers, samples: int) -> tuple[Ints, Bools]:
    """Return the number of a step's samples that each worker gets, the same in all steps, [W].

    The counts give a lower bound of the step's time: any group of workers gets at least the load of
    the smallest samples, and the worst group gives the bound. Beginning with counts in proportion
    to speed, one sample at a time is moved to another worker as long as this lowers the bound.

    `smallest[k]` is Σ f(λ) of the k smallest of all samples, [R + 1]. The second result is a mask
    of the workers in the worst group, [W]; it is empty if all workers are in that group.
    """
    part = samples / (len(smallest) - 1)
    marks = np.round(np.arange(samples + 1) / part).astype(np.int64)
    of_step = smallest[marks] * part  # [samples + 1]
    counts = proportional(float(of_step[-1]) / samples, workers, samples)
    order = descending(workers.a * counts)
    _improve(counts, of_step, workers, order)
    _, binding = _bound(of_step, counts, workers, order)
    bind = np.zeros(len(counts), bool)
    if binding < (counts > 0).sum():
        bind[order[:binding]] = True
    return counts, bind


@compiled
def _bound(smallest: Floats, counts: Ints, w: Workers, order: Ints) -> tuple[float, int]:
    """Return a lower bound of a step's time, and k: the first k workers in `order` give the bound.

    The function first sorts `order` in place by descending a·count, so that the workers that have
    time only for small samples come first.
    """
    # The order is usually sorted except for two workers.
    for k in range(1, len(order)):
        j, at = order[k], k
        need = w.a[j] * counts[j]
        while at > 0 and w.a[order[at - 1]] * counts[order[at - 1]] < need:
            order[at] = order[at - 1]
            at -= 1
        order[at] = j
    speed, due, number, worst, binding = 0.0, 0.0, 0, 0.0, 0
    for k in range(len(order)):
        j = order[k]
        if counts[j] == 0:
            break
        speed += 1.0 / w.a[j]
        due += (w.b[j] + w.c[j] * counts[j]) / w.a[j]
        number += counts[j]
        time_s = (smallest[number] + due) / speed
        if time_s > worst:
            worst, binding = time_s, k + 1
    return worst, binding


@compiled
def _improve(counts: Ints, smallest: Floats, w: Workers, order: Ints) -> None:
    world = len(order)
    best, binding = _bound(smallest, counts, w, order)
    # With many workers, try only some of them.
    stride = max(1, world // 32)
    tried = order.copy()
    for _ in range(64):
        if binding == world or counts[order[binding]] == 0:
            # All workers together give the bound, so no counts are better.
            break
        giver, taker = 0, 0
        for k in range(0, binding, stride):
            p = order[k]
            for q in range(0, world, stride):
                if q != p and counts[q] < w.most[q]:
                    counts[p] -= 1
                    counts[q] += 1
                    time_s, _ = _bound(smallest, counts, w, tried)
                    counts[p] += 1
                    counts[q] -= 1
                    if time_s < best * (1 - 1e-9):
                        best, giver, taker = time_s, p, q
        if giver == taker:
            break
        counts[giver] -= 1
        counts[taker] += 1
        best, binding = _bound(smallest, counts, w, order)


class _Bins(NamedTuple):
    """The bins while they are filled. Bin step · W + worker is a worker's local batch in one step.

    `counts` and `last` are the numbers of places in each worker's bin, in a usual step and in the
    smaller last step, whose bins come last. `of` is the bin of each sample, and `gap` the load that
    each bin lacks. ``heaps[k]`` holds the bins with k free places, the largest gap first; `ends`
    has the number of bins in each heap.
    """

    counts: Ints  # [W]
    last: Ints  # [W]
    of: Ints  # [R]
    gap: Floats  # [bins]
    heaps: Ints  # [places + 1, bins]
    ends: Ints  # [places + 1]


def _dealt(sizes: Floats, workers: Workers, counts: Ints, last: Ints, steps: int) -> _Bins:
    number, places = (steps + 1) * len(counts), int(max(counts.max(), last.max()))
    bins = _Bins(
        counts,
        last,
        np.empty(len(sizes), np.int64),
        np.zeros(number),
        np.empty((places + 1, number), np.int64),
        np.zeros(places + 1, np.int64),
    )
    fillers = max(1, int(len(sizes) * _FILLERS))
    _deal(sizes, float(sizes.sum()), float(sizes[-fillers:].mean()), workers, bins)
    return bins


@compiled
def _push(places: int, item: int, bins: _Bins) -> None:
    heap, key = bins.heaps[places], bins.gap
    at = bins.ends[places]
    bins.ends[places] += 1
    while at > 0:
        parent = (at - 1) // 2
        if key[heap[parent]] >= key[item]:
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = item


@compiled
def _pop(places: int, bins: _Bins) -> int:
    heap, key = bins.heaps[places], bins.gap
    bins.ends[places] -= 1
    end = bins.ends[places]
    result, item, at = heap[0], heap[end], 0
    while True:
        child = 2 * at + 1
        if child >= end:
            break
        if child + 1 < end and key[heap[child + 1]] > key[heap[child]]:
            child += 1
        if key[heap[child]] <= key[item]:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = item
    return int(result)


@compiled
def _fullest(bins: _Bins, each: float) -> tuple[int, float]:
    """Find the bin with the most room for its next sample; return its free places and its room.

    A bin keeps room of size `each` for each of its other free places. Bins with equally many free
    places are in one heap, so only the first bin of each heap is compared.
    """
    places, room = 0, -np.inf
    for free in range(1, len(bins.ends)):
        if bins.ends[free]:
            of_free = bins.gap[bins.heaps[free, 0]] - (free - 1) * each
            if of_free > room:
                places, room = free, of_free
    return places, room


@compiled
def _open(step: int, time_s: float, counts: Ints, w: Workers, bins: _Bins) -> None:
    for j in range(len(counts)):
        if counts[j]:
            at = step * len(counts) + j
            bins.gap[at] = (time_s - w.b[j] - w.c[j] * counts[j]) / w.a[j]
            _push(counts[j], at, bins)


@compiled
def _speed(counts: Ints, w: Workers) -> tuple[float, float]:
    """Return Σ 1/a of workers with samples, and the load they could do in the time of b and c·n."""
    speed, due = 0.0, 0.0
    for j in range(len(counts)):
        if counts[j]:
            speed += 1.0 / w.a[j]
            due += (w.b[j] + w.c[j] * counts[j]) / w.a[j]
    return speed, due


@compiled
def _deal(sizes: Floats, total: float, small: float, w: Workers, bins: _Bins) -> None:
    """Give each sample, largest first, to the bin with the most room for it: see `_fullest`.

    `sizes` are nearly descending; `total` is their sum, and `small` the mean of the smallest sizes.
    """
    counts, last = bins.counts, bins.last
    world, samples = len(counts), len(sizes)
    steps = len(bins.gap) // world - 1
    of_last, rest = 0, total
    for j in range(world):
        of_last += last[j]
    share = of_last / samples
    if of_last > 0:
        speed, due = _speed(last, w)
        for step in range(steps, steps + 1):
            _open(step, (rest * share + due) / speed, last, w, bins)
    speed, due = _speed(counts, w)
    uncommitted = rest * (1 - share) + due * steps
    opened = 0
    for i in range(samples):
        while opened < steps:
            time_s = uncommitted / (speed * (steps - opened))
            # Each worker's time with this sample and otherwise small samples.
            alone = w.a * (sizes[i] + (counts - 1) * small) + w.c * counts + w.b
            alone = alone[counts > 0]
            until = steps
            if alone.min() > time_s:
                if _fullest(bins, small)[1] >= sizes[i] * (1 - 1e-9):
                    break
                # Measured speeds have small errors. If they differ only a little, other workers'
                # bins need room for equally large samples, because each of these samples would
                # otherwise be in a step of its own.
                until, time_s = opened + 1, alone[alone <= _ALIKE * alone.min()].max()
            for step in range(opened, until):
                _open(step, time_s, counts, w, bins)
            uncommitted -= time_s * speed * (until - opened)
            opened = until
        rest -= sizes[i]
        part = i / samples if opened == steps else 0.0
        each = part * rest / max(samples - i - 1, 1) + (1 - part) * small
        places, _ = _fullest(bins, each)
        at = _pop(places, bins)
        bins.of[i] = at
        bins.gap[at] -= sizes[i]
        if places > 1:
            _push(places - 1, at, bins)


@compiled
def _laid_out(bins: Ints, counts: Ints, last: Ints, turn: Ints) -> Ints:
    world = len(counts)
    # Position of each bin's next sample.
    at = np.empty(len(turn) * world, np.int64)
    start = 0
    for place in range(len(turn)):
        for j in range(world):
            at[turn[place] * world + j] = start
            start += last[j] if turn[place] == len(turn) - 1 else counts[j]
    order = np.empty(len(bins), np.int64)
    for i in range(len(bins)):
        order[at[bins[i]]] = i
        at[bins[i]] += 1
    return order


def close(sizes: Floats, bins: Ints, gap: Floats, a: Floats, step_s: float) -> None:
    """Exchange samples between bins with too much load and bins with too little, worst first.

    `bins`, the bin step · W + worker of each sample, and `gap`, the load that each bin lacks, are
    changed in place. `a` is s per size unit, [W], and `step_s` the mean time of a step.
    """
    held, number = grouped(bins, len(gap))
    ends = np.cumsum(number)
    binned = _Binned(sizes[held], held, ends)
    a = np.tile(a, len(gap) // len(a))
    off = np.arange(len(gap))
    looks, in_vain = 0, 0
    for turn in range(_ROUNDS):
        # Continue with the bins that are not close to their target.
        off = off[np.abs(gap[off]) * a[off] > _CLOSE * step_s]
        off = off[np.argsort(gap[off], kind="stable")]
        looks += len(off) // 2 * int(number.max()) ** 2
        if looks > _LOOKS and turn:
            break
        changed = _exchanged(off, turn, binned, gap, a)
        in_vain = 0 if changed else in_vain + 1
        if in_vain == _IN_VAIN or (len(off) > _FEW_BINS and changed <= len(off) // 16):
            break
    bins[held] = np.repeat(np.arange(len(gap)), number)


class _Binned(NamedTuple):
    """Samples sorted by bin, with their sizes. `ends` is the end of each bin.

    A bin's samples are adjacent in memory: for a million samples, reading memory takes longest.
    """

    sizes: Floats  # [R]
    held: Ints  # [R]
    ends: Ints  # [bins]


@compiled
def _exchanged(off: Ints, turn: int, binned: _Binned, gap: Floats, a: Floats) -> int:
    """Pair the bins, differently in each `turn`, and exchange samples of pairs; return a count.

    The count is the number of exchanges.
    """
    sizes, held, ends = binned.sizes, binned.held, binned.ends
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
    """Regroup bins into steps: one step has each worker's fullest bin, the next the second, ….

    A worker's bins hold equally many samples, so any of them may share a step. This grouping
    minimises the total time of all steps.
    """
    load = np.bincount(bins, sizes, minlength=(steps + 1) * world).reshape(-1, world)
    # The smaller last step stays last.
    load[steps] = -1.0
    step = np.argsort(np.argsort(-load, axis=0, kind="stable"), axis=0)
    return np.asarray((step * world + np.arange(world)).ravel()[bins])


def evened(bins: Ints, sizes: Floats, workers: Workers, counts: Ints, step_s: float) -> Ints:
    """Match the bins, then repeatedly exchange samples between bins and match the bins again.

    This is repeated while the total time of the steps falls. If bins have few samples and sizes are
    whole numbers, no bin can have the mean time, but the bins of one step can still have equal
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
