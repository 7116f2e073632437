"""Which samples share a step, such that every step divides well between the workers.

An epoch of K steps on W workers is K·W bins: bin (step, worker) gets a fixed number of samples and
should get the load that the worker can do in the step's time. Steps need not take equally long:
samples too large for an average step share steps of their own, one on each worker, smaller ones on
slower workers. All other steps have one time. Which steps come when, and which of the samples of
about one size meet, is random.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline_backend.policies._balance import grouped
from paceline_backend.policies._base import Floats, Ints
from paceline_backend.policies._jit import compiled
from paceline_backend.policies._padded import proportional
from paceline_backend.policies._workers import Workers, descending, level

Bools = npt.NDArray[np.bool_]

_JITTER = 0.3  # of sizes' logarithms when ordinary samples are put in order
_ROUNDS = 64  # of exchanges between bins at most
_IN_VAIN = 4  # rounds that changed nothing: no more then
_LOOKS = 30_000_000  # pairs of samples to look at: no more rounds then, 0.1 s
_FEW_BINS = 4096  # with more it is not worth while when few of them change,
_EVENED = 6  # nor to make bins which meet alike in so many passes, but in one
_CLOSE = 2e-4  # of a step's time: bins nearer to their target are left alone
_FILLERS = 0.2  # the smallest part of the samples, with which the largest share their bins


def compose(
    effective: Floats, workers: Workers, global_batch: int, rng: np.random.Generator
) -> Ints:
    """An order of the samples in which each `global_batch` of them divides well.

    Within a step, samples are in the order of the workers that they are meant for. What is left for
    a smaller last step stays last.

    Args:
        effective: f(λ) of each sample, [R].
        workers: that share them.
        global_batch: samples of a step.
        rng: what is left to chance.

    Returns:
        Positions in `effective`, [R].
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
    # Workers that even the smallest samples keep longer than the others get just these.
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
            _close(part, dealt.of, dealt.gap, some.a, _CLOSE * step_s)
            step, member = np.divmod(dealt.of, len(some.a))
            bins[chosen] = step * world + np.flatnonzero(among)[member]
    bins = _evened(bins, sizes, workers, np.vstack([np.tile(counts, (steps, 1)), last]), step_s)
    turn = np.append(rng.permutation(steps), steps)
    laid_out: Ints = order[_laid_out(bins, counts, last, turn)]
    return laid_out


def _descending(
    effective: Floats, step_s: float, workers: Workers, rng: np.random.Generator
) -> Ints:
    """Largest first, but ordinary ones only about so: else the same ones would always meet."""
    ordinary = effective < 0.5 * step_s / workers.a.max()
    noise = np.exp(rng.uniform(-_JITTER, _JITTER, len(effective)))
    return descending(np.where(ordinary, effective * noise, effective))


def step_counts(smallest: Floats, workers: Workers, samples: int) -> tuple[Ints, Bools]:
    """How many of a step's samples each worker gets, [W], the same in all steps; and who binds.

    The least time that such counts allow is that of the worst group of workers: whichever samples
    they get, they are at least as large together as the smallest of all. Beginning with counts in
    proportion to speed, one sample at a time goes to another worker while that lowers this time.

    Args:
        smallest: Σ f(λ) of the k smallest of all samples, [R + 1].
        workers: that share them.
        samples: of a step.

    Returns:
        The counts, and which workers are in the worst group unless that is all of them, [W].
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
    """Least time with these counts, and how many of the workers in `order` bind.

    `order` is put in order of the load a sample that the time allows. That depends on the time; the
    one without overhead decides.
    """
    for k in range(1, len(order)):  # usually in order but for two
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
    stride = max(1, world // 32)  # of many workers some stand for the others
    tried = order.copy()
    for _ in range(64):
        if binding == world or counts[order[binding]] == 0:
            break  # as fast as all together are
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
    """The bins, step · W + worker, in the making; those of the smaller last step come last."""

    of: Ints  # [R] the bin of each sample
    gap: Floats  # [bins] the load that each lacks
    heaps: Ints  # [places + 1, bins] bins with so many places free, the largest gap first
    ends: Ints  # [places + 1] how many there are


def _dealt(sizes: Floats, workers: Workers, counts: Ints, last: Ints, steps: int) -> _Bins:
    """See `_deal`."""
    number, places = (steps + 1) * len(counts), int(max(counts.max(), last.max()))
    bins = _Bins(
        np.empty(len(sizes), np.int64),
        np.zeros(number),
        np.empty((places + 1, number), np.int64),
        np.zeros(places + 1, np.int64),
    )
    fillers = max(1, int(len(sizes) * _FILLERS))
    _deal(sizes, float(sizes.sum()), float(sizes[-fillers:].mean()), workers, counts, last, bins)
    return bins


@compiled
def _push(places: int, item: int, bins: _Bins) -> None:
    """Adds a bin to those with so many places free."""
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
    """Takes the one with the largest gap out of them."""
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
    """The bin with most room for its next sample, if its others are of size `each`: (places, room).

    Of bins with as many places the fullest is known: one heap for each number of places.
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
    """Lets the bins of a step take samples."""
    for j in range(len(counts)):
        if counts[j]:
            at = step * len(counts) + j
            bins.gap[at] = (time_s - w.b[j] - w.c[j] * counts[j]) / w.a[j]
            _push(counts[j], at, bins)


@compiled
def _speed(counts: Ints, w: Workers) -> tuple[float, float]:
    """Of the workers that get samples: Σ 1/a, and Σ of what each could do while it has overhead."""
    speed, due = 0.0, 0.0
    for j in range(len(counts)):
        if counts[j]:
            speed += 1.0 / w.a[j]
            due += (w.b[j] + w.c[j] * counts[j]) / w.a[j]
    return speed, due


@compiled
def _deal(
    sizes: Floats, total: float, small: float, w: Workers, counts: Ints, last: Ints, bins: _Bins
) -> None:
    """Largest first, each sample to the bin with most room, its other places accounted for.

    Args:
        sizes: in about descending order.
        total: their sum.
        small: the mean of the smallest.
        w: the workers.
        counts: of each worker in a step.
        last: the same in the smaller last step.
        bins: to be filled.
    """
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
            alone = np.inf  # the least time of a step with it, if small ones take the other places
            for j in range(world):
                if counts[j]:
                    load = sizes[i] + (counts[j] - 1) * small
                    alone = min(alone, w.a[j] * load + w.c[j] * counts[j] + w.b[j])
            until = steps
            if alone > time_s:
                if _fullest(bins, small)[1] >= sizes[i] * (1 - 1e-9):
                    break
                until, time_s = opened + 1, alone
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


def _close(sizes: Floats, bins: Ints, gap: Floats, a: Floats, enough_s: float) -> None:
    """Bins with too much exchange a sample with bins with too little, the worst with the worst."""
    held, number = grouped(bins, len(gap))
    ends = np.cumsum(number)
    of_held = sizes[
        held
    ]  # a bin's samples side by side: for 1e6 of them, reading is what takes long
    a = np.tile(a, len(gap) // len(a))
    off = np.arange(len(gap))
    looks, in_vain = 0, 0
    for turn in range(_ROUNDS):
        off = off[np.abs(gap[off]) * a[off] > enough_s]  # not near enough to their target
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


def _matched(bins: Ints, sizes: Floats, steps: int, world: int) -> Ints:
    """Bins of such steps that each worker's fullest meet, then the next ones, ….

    A worker's bins hold as many samples in all steps, so any of them may meet; like this the steps'
    slowest take least in total.
    """
    load = np.bincount(bins, sizes, minlength=(steps + 1) * world).reshape(-1, world)
    load[steps] = -1.0  # the smaller last step stays last
    step = np.argsort(np.argsort(-load, axis=0, kind="stable"), axis=0)
    return np.asarray((step * world + np.arange(world)).ravel()[bins])


def _evened(bins: Ints, sizes: Floats, workers: Workers, counts: Ints, step_s: float) -> Ints:
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

    bins = _matched(bins, sizes, steps, world)
    time_s = times(bins)
    for _ in range(_EVENED if counts.size <= _FEW_BINS else 1):
        other = bins.copy()
        _close(sizes, other, _targets(time_s, workers.a), workers.a, _CLOSE * step_s)
        other = _matched(other, sizes, steps, world)
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


@compiled
def _laid_out(bins: Ints, counts: Ints, last: Ints, turn: Ints) -> Ints:
    """Samples step by step in a given turn, in each worker by worker."""
    world = len(counts)
    at = np.empty(len(turn) * world, np.int64)  # where a bin's next sample goes
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
