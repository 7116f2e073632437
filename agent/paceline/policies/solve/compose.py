"""Choice of the samples of each step, so that every step divides well between the workers.

The `paceline` preset calls `compose` in free mode, for unpadded costs, at each epoch's start and
when the ranks' speeds have changed.

An epoch of K steps on W workers has K·W bins. A bin, the local batch of one worker in one step,
gets a fixed number of samples (`step_counts`) and should get the load that the worker can compute
in the step's time. Samples that are too large for an average step are put into separate steps, one
sample on each worker, smaller samples on slower workers. All other steps take the same time. The
order of the steps is random, and so is the choice among samples of similar size.

First each sample, largest first, is given to the bin with the most room (`_fullest`). Then bins
exchange samples until each bin has its target load (`close`), and bins of equal counts are
regrouped into steps (`matched`, `evened`).

In this module, `sizes` has the cost f(λ) of each of the R samples, and `bins` the number of each
sample's bin, step · W + worker, [R] each. `a` is seconds per unit of cost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.policies.jit import compiled
from paceline.policies.solve.balance import grouped
from paceline.policies.solve.padded import proportional
from paceline.policies.solve.workers import Workers, descending, level
from paceline.policies.values import Floats, Ints

Bools = npt.NDArray[np.bool_]

# Before ordinary samples are sorted by size, uniform noise between - `_JITTER` and `_JITTER` is
# added to the logarithm of their size, so that epochs differ.
_JITTER = 0.3
# A bin with a very large sample is expected to be filled up with small samples. Their expected cost
# is the mean over the smallest samples: this fraction of all samples.
_FILLERS = 0.2
# Workers count as equally fast with a very large sample if their times for it are at most this
# multiple of the fastest worker's.
_ALIKE_TIMES = 1.02

# `close` leaves a bin unchanged if its time differs from its target by at most this fraction of a
# step's time.
_BIN_TOLERANCE = 2e-4
# Maximum number of passes over the bins in `close`.
_BIN_PASSES = 64
# Number of consecutive passes without an exchange after which `close` ends.
_IN_VAIN = 4
# `close` ends after trying about this number of pairs of samples, which takes 0.1 s.
_MOST_PAIRS = 30_000_000
# With more bins than this, `close` ends as soon as a pass makes exchanges between few bins only.
_FEW_BINS = 4096
# Maximum number of passes of `evened`; with more than `_FEW_BINS` bins, there is one pass.
_EVENED = 6


def compose(
    effective: Floats, workers: Workers, global_batch: int, rng: np.random.Generator
) -> Ints:
    """Order an epoch's samples so that each global batch divides well among the workers.

    `effective` has the cost f(λ) of each of the R samples, [R], where λ is the sample's size. The
    result has the positions of the samples in `effective`, [R]; each `global_batch` successive
    samples are one step. Within a step, samples are sorted by the worker for which they are
    intended.
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
    """Return the samples' positions, largest first, [R], with noise on all but very large samples.

    A sample is very large if the slowest worker needs at least half of a step's time, `step_s`, for
    it.
    """
    ordinary = effective < 0.5 * step_s / workers.a.max()
    noise = np.exp(rng.uniform(-_JITTER, _JITTER, len(effective)))
    return descending(np.where(ordinary, effective * noise, effective))


def step_counts(smallest: Floats, workers: Workers, samples: int) -> tuple[Ints, Bools]:
    """Choose the number of samples that each worker gets in a step of `samples` samples, [W].

    The numbers are the same in all steps, and give a lower bound of a step's time: a group of
    workers that gets m samples has at least the load of the m smallest samples, and the group that
    needs the longest time for this load gives the bound. The search begins with counts in
    proportion to the workers' speeds. Then it moves one sample at a time to another worker as long
    as the bound becomes lower.

    `smallest[k]` is the sum of the costs f(λ) of the k smallest of the epoch's R samples, [R + 1].
    The second result is a mask of the workers in the group that gives the bound, [W]; all values
    are False if all workers with samples are in that group.
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
    """Return a lower bound of a step's time, and k, the size of the group that gives the bound.

    The group is the first k workers in `order`. `smallest[m]` is the sum of the costs f(λ) of a
    step's m smallest samples. `counts` is each worker's number of samples, [W]. The function first
    sorts `order`, the workers, [W], in place by descending a·count.
    """
    # An insertion sort, because usually only two workers are out of order.
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
    stride = max(1, world // 32)
    tried = order.copy()
    for _ in range(64):
        if binding == world or counts[order[binding]] == 0:
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
    """The bins while samples are put into them.

    `counts` is each worker's number of samples in a usual step, and `last` in the smaller last
    step, whose bins have the highest numbers. `of` is the bin of each sample. `gap` is the load
    that each bin still lacks to reach its target. ``heaps[k]`` is a heap of the bins that lack k
    samples, with the largest gap first. `ends` is the number of bins in each heap.
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
    """Find the bin with the most room for its next sample.

    Return the number of samples that this bin lacks, and its room. A bin's room is its gap, minus a
    load of `each` for every further sample that it lacks.
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
    """Return the summed speed of the workers with samples, and the load that fixed costs displace.

    The speed is Σ 1/a. The displaced load is what the workers could do in the time of b and c·n,
    where n is the worker's number of samples in `counts`, [W].
    """
    speed, due = 0.0, 0.0
    for j in range(len(counts)):
        if counts[j]:
            speed += 1.0 / w.a[j]
            due += (w.b[j] + w.c[j] * counts[j]) / w.a[j]
    return speed, due


@compiled
def _deal(sizes: Floats, total: float, small: float, w: Workers, bins: _Bins) -> None:
    """Give each sample, largest first, to the bin with the most room, as `_fullest` defines it.

    `sizes` is nearly descending; `total` is its sum, and `small` the mean of its smallest values:
    see `_FILLERS`.
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
                # Measured speeds have small errors. If workers' speeds differ only a little, the
                # step must be long enough that several workers can take a sample of this size.
                until, time_s = opened + 1, alone[alone <= _ALIKE_TIMES * alone.min()].max()
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
    """Exchange samples between bins with too much load and bins with too little load.

    The bins that are furthest from their target come first. `bins` and `gap` are changed in place.
    `gap` is the load that each bin lacks to reach its target, [bins], negative if the bin has too
    much. `step_s` is the mean time of a step.
    """
    held, number = grouped(bins, len(gap))
    ends = np.cumsum(number)
    binned = _Binned(sizes[held], held, ends)
    a = np.tile(a, len(gap) // len(a))
    off = np.arange(len(gap))
    tried, in_vain = 0, 0
    for turn in range(_BIN_PASSES):
        off = off[np.abs(gap[off]) * a[off] > _BIN_TOLERANCE * step_s]
        off = off[np.argsort(gap[off], kind="stable")]
        tried += len(off) // 2 * int(number.max()) ** 2
        if tried > _MOST_PAIRS and turn:
            break
        changed = _exchanged(off, turn, binned, gap, a)
        in_vain = 0 if changed else in_vain + 1
        if in_vain == _IN_VAIN or (len(off) > _FEW_BINS and changed <= len(off) // 16):
            break
    bins[held] = np.repeat(np.arange(len(gap)), number)


class _Binned(NamedTuple):
    """Samples sorted by bin.

    `held` is the position of each sample in the caller's arrays. ``ends[k]`` is the index in
    `sizes` and `held` at which bin k ends. A bin's samples are adjacent, because with a million
    samples most of the time goes into reading memory.
    """

    sizes: Floats  # [R]
    held: Ints  # [R]
    ends: Ints  # [bins]


@compiled
def _exchanged(off: Ints, turn: int, binned: _Binned, gap: Floats, a: Floats) -> int:
    """Pair the bins in `off`, and let each pair exchange one sample if this reduces their gaps.

    Return the number of exchanges. `off` has the bins in ascending sequence of their gaps. Bins are
    paired differently for each value of `turn`. `binned` and `gap`, the load that each bin lacks,
    [bins], are changed in place. `a` has one value per bin, [bins].
    """
    sizes, held, ends = binned.sizes, binned.held, binned.ends
    changed, pairs = 0, len(off) // 2
    for k in range(pairs):
        # Bin p has too much load.
        p, q = off[k], off[len(off) - 1 - (k + turn) % pairs]
        of_p, of_q = gap[p] * a[p], gap[q] * a[q]
        before = of_p * of_p + of_q * of_q
        best, give, get = before, 0, 0
        for i in range(ends[p - 1] if p else 0, ends[p]):
            for m in range(ends[q - 1] if q else 0, ends[q]):
                more = sizes[i] - sizes[m]
                of_p, of_q = (gap[p] + more) * a[p], (gap[q] - more) * a[q]
                left = of_p * of_p + of_q * of_q
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
    """Regroup bins into steps by load.

    The first step gets each worker's bin with the largest load, the second step each worker's bin
    with the second largest load, and so on. Return each sample's new bin, [R]. A worker's bins hold
    equally many samples, except in the last step, which does not change. So any bins of different
    workers can form a step, and this grouping minimises the total time of all steps. `steps` is the
    number of steps without the last one.
    """
    load = np.bincount(bins, sizes, minlength=(steps + 1) * world).reshape(-1, world)
    # The smaller last step stays last.
    load[steps] = -1.0
    step = np.argsort(np.argsort(-load, axis=0, kind="stable"), axis=0)
    return np.asarray((step * world + np.arange(world)).ravel()[bins])


def evened(bins: Ints, sizes: Floats, workers: Workers, counts: Ints, step_s: float) -> Ints:
    """Call `matched`, then repeatedly exchange samples between bins and call `matched` again.

    This is repeated while the total time of the steps falls. Return each sample's bin, [R]. If bins
    have few samples and sizes are whole numbers, often no bin can have exactly the mean time, but
    the bins of one step can still have equal times. `counts` is the number of samples of each bin,
    [steps + 1, W]. `step_s` is the mean time of a step.
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
    """Return the load that each bin lacks to reach its target time, [bins].

    The target time is usually the median time of the bins of the same step. But exchanges do not
    change the total load, so the loads that bins lack must sum to zero. Therefore some steps have
    another target: if the sum is negative, the time of the step's slowest bin; if the sum is
    positive, the time of its fastest bin. `time_s` is the time of each bin, [steps + 1, W], NaN for
    bins without samples.
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
