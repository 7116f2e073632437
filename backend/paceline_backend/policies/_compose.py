"""Which samples share a step, such that every step divides well between the workers.

An epoch of K steps on W workers is K·W bins: bin (step, worker) gets a fixed number of samples and
should get the load that the worker can do in the step's time. Steps need not take equally long:
samples too large for an average step share steps of their own, one on each worker, smaller ones on
slower workers. All other steps have one time. Which steps come when, and which of the samples of
about one size meet, is random.
"""

from __future__ import annotations

import numpy as np

from paceline_backend.policies._balance import hand_over, level
from paceline_backend.policies._base import Floats, Ints, Models
from paceline_backend.policies._jit import compiled

_JITTER = 0.3  # of sizes' logarithms when ordinary samples are put in order
_ROUNDS = 12  # of exchanges between bins
_CLOSE = 2e-4  # of a step's time: bins nearer to their target are left alone
_FILLERS = 0.2  # the smallest part of the samples, with which the largest share their bins


def compose(
    effective: Floats,
    models: Models,
    global_batch: int,
    most: Ints,
    rng: np.random.Generator,
) -> Ints:
    """An order of the samples in which each `global_batch` of them divides well.

    Within a step, samples are in the order of the workers that they are meant for. What is left for
    a smaller last step stays last.

    Args:
        effective: f(λ) of each sample, [R].
        models: of the workers.
        global_batch: samples of a step.
        most: samples of a step that fit into each worker's memory, [W].
        rng: what is left to chance.

    Returns:
        Positions in `effective`, [R].
    """
    steps, rest = divmod(len(effective), global_batch)
    if steps == 0 or global_batch < 2:
        return rng.permutation(len(effective))
    a, c, b = models.a, models.c, models.b
    smallest = np.concatenate([[0.0], np.cumsum(np.sort(effective))])
    counts = step_counts(smallest, models, global_batch, most)
    last = step_counts(smallest, models, rest, most) if rest else np.zeros_like(counts)
    step_s = level(effective, a, c, b, False) * global_batch / len(effective)
    order = _descending(effective, step_s, models, rng)
    sizes = effective[order]
    bins, gap = _deal(sizes, a, c, b, counts, last, steps)
    _close(sizes, bins, gap, a, _CLOSE * step_s)
    turn = np.append(rng.permutation(steps), steps)
    laid_out: Ints = order[_laid_out(bins, counts, last, turn)]
    return laid_out


def _descending(effective: Floats, step_s: float, models: Models, rng: np.random.Generator) -> Ints:
    """Largest first, but ordinary ones only about so: else the same ones would always meet."""
    ordinary = effective < 0.5 * step_s / models.a.max()
    noise = np.exp(rng.uniform(-_JITTER, _JITTER, len(effective)))
    return np.argsort(-np.where(ordinary, effective * noise, effective), kind="stable")


def step_counts(smallest: Floats, models: Models, samples: int, most: Ints) -> Ints:
    """How many of a step's samples each worker gets, [W], the same in all steps.

    The least time that such counts allow is that of the worst group of workers: whichever samples
    they get, they are at least as large together as the smallest of all. Beginning with counts in
    proportion to speed, one sample at a time goes to another worker while that lowers this time.

    Args:
        smallest: Σ f(λ) of the k smallest of all samples, [R + 1].
        models: of the workers.
        samples: of a step.
        most: samples that each worker may get, [W].
    """
    part = samples / (len(smallest) - 1)
    marks = np.round(np.arange(samples + 1) / part).astype(np.int64)
    of_step = smallest[marks] * part  # [samples + 1]
    counts = _proportional(of_step[-1] / samples, models.a, models.c, models.b, samples, most)
    _improve(counts, of_step, models.a, models.c, models.b, most)
    return counts


@compiled
def _proportional(mean: float, a: Floats, c: Floats, b: Floats, samples: int, most: Ints) -> Ints:
    """Each of the samples, all of mean size, where it ends first."""
    counts = np.zeros(len(a), np.int64)
    each = a * mean + c
    done = each / 2 + b
    for j in range(len(a)):
        if most[j] == 0:
            done[j] = np.inf
    for _ in range(samples):
        j = int(np.argmin(done))
        counts[j] += 1
        done[j] += each[j]
        if counts[j] >= most[j]:
            done[j] = np.inf
    return counts


@compiled
def _bound(
    smallest: Floats, counts: Ints, a: Floats, c: Floats, b: Floats
) -> tuple[float, Ints, int]:
    """Least time with these counts; workers from the least load a sample on; how many of them bind.

    A worker's load a sample depends on the time; the one without overhead gives the order.
    """
    world = len(a)
    need = np.full(world, np.inf)
    for j in range(world):
        if counts[j]:
            need[j] = 1.0 / (a[j] * counts[j])
    order = np.argsort(need)
    speed, due, number, worst, binding = 0.0, 0.0, 0, 0.0, 0
    for k in range(world):
        j = order[k]
        if counts[j] == 0:
            break
        speed += 1.0 / a[j]
        due += (b[j] + c[j] * counts[j]) / a[j]
        number += counts[j]
        time_s = (smallest[number] + due) / speed
        if time_s > worst:
            worst, binding = time_s, k + 1
    return worst, order, binding


@compiled
def _improve(counts: Ints, smallest: Floats, a: Floats, c: Floats, b: Floats, most: Ints) -> None:
    world = len(a)
    best, order, binding = _bound(smallest, counts, a, c, b)
    stride = max(1, world // 32)  # of many workers some stand for the others
    for _ in range(64):
        if binding == (counts > 0).sum():
            break  # as fast as all together are
        giver, taker = -1, -1
        for k in range(0, binding, stride):
            p = order[k]
            for q in range(0, world, stride):
                if q != p and counts[q] < most[q]:
                    counts[p] -= 1
                    counts[q] += 1
                    time_s = _bound(smallest, counts, a, c, b)[0]
                    counts[p] += 1
                    counts[q] -= 1
                    if time_s < best * (1 - 1e-9):
                        best, giver, taker = time_s, p, q
        if giver < 0:
            break
        counts[giver] -= 1
        counts[taker] += 1
        best, order, binding = _bound(smallest, counts, a, c, b)


@compiled
def _push(heap: Ints, end: int, key: Floats, item: int) -> None:
    """Adds to a heap of `end` bins, the largest key first."""
    at = end
    while at > 0:
        parent = (at - 1) // 2
        if key[heap[parent]] >= key[item]:
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = item


@compiled
def _pop(heap: Ints, end: int, key: Floats) -> int:
    """Takes the first out of a heap of `end` bins."""
    result = heap[0]
    item = heap[end - 1]
    at, end = 0, end - 1
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
def _fullest(ends: Ints, heaps: Ints, gap: Floats, each: float) -> tuple[int, float]:
    """The bin with most room for its next sample, if its others are of size `each`: (places, room).

    Of bins with as many places the fullest is known: one heap for each number of places.
    """
    places, room = 0, -np.inf
    for free in range(1, len(ends)):
        if ends[free] and gap[heaps[free, 0]] - (free - 1) * each > room:
            places, room = free, gap[heaps[free, 0]] - (free - 1) * each
    return places, room


@compiled
def _open(
    step: int,
    time_s: float,
    counts: Ints,
    a: Floats,
    c: Floats,
    b: Floats,
    gap: Floats,
    heaps: Ints,
    ends: Ints,
) -> None:
    """Lets the bins of a step take samples."""
    for j in range(len(a)):
        if counts[j]:
            at = step * len(a) + j
            gap[at] = (time_s - b[j] - c[j] * counts[j]) / a[j]
            _push(heaps[counts[j]], ends[counts[j]], gap, at)
            ends[counts[j]] += 1


@compiled
def _speed(counts: Ints, a: Floats, c: Floats, b: Floats) -> tuple[float, float]:
    """Of the workers that get samples: Σ 1/a, and Σ of what each could do while it has overhead."""
    speed, due = 0.0, 0.0
    for j in range(len(a)):
        if counts[j]:
            speed += 1.0 / a[j]
            due += (b[j] + c[j] * counts[j]) / a[j]
    return speed, due


@compiled
def _alone(size: float, small: float, counts: Ints, a: Floats, c: Floats, b: Floats) -> float:
    """The least time of a step with this sample, if small ones take the other places."""
    time_s = np.inf
    for j in range(len(a)):
        if counts[j]:
            load = size + (counts[j] - 1) * small
            time_s = min(time_s, a[j] * load + c[j] * counts[j] + b[j])
    return time_s


@compiled
def _deal(
    sizes: Floats, a: Floats, c: Floats, b: Floats, counts: Ints, last: Ints, steps: int
) -> tuple[Ints, Floats]:
    """Largest first, each sample to the bin with most room, its other places accounted for.

    Args:
        sizes: in about descending order.
        a: see `Models`; and so `c`, `b`.
        counts: of each worker in a step.
        last: the same in the smaller last step.
        steps: not counting that.

    Returns:
        The bin, step · W + worker, of each sample, and the load that each bin then lacks.
    """
    world, samples = len(a), len(sizes)
    bins = np.empty(samples, np.int64)
    gap = np.zeros((steps + 1) * world)
    heaps = np.empty((max(counts.max(), last.max()) + 1, (steps + 1) * world), np.int64)
    ends = np.zeros(len(heaps), np.int64)
    fillers = max(1, int(samples * _FILLERS))
    small = sizes[samples - fillers :].mean()
    rest = sizes.sum()
    share = last.sum() / samples
    if share > 0:
        speed, due = _speed(last, a, c, b)
        _open(steps, (rest * share + due) / speed, last, a, c, b, gap, heaps, ends)
    speed, due = _speed(counts, a, c, b)
    uncommitted = rest * (1 - share) + due * steps
    opened = 0
    for i in range(samples):
        while opened < steps:
            time_s = uncommitted / (speed * (steps - opened))
            alone = _alone(sizes[i], small, counts, a, c, b)
            if alone <= time_s:
                for step in range(opened, steps):
                    _open(step, time_s, counts, a, c, b, gap, heaps, ends)
                opened = steps
            elif _fullest(ends, heaps, gap, small)[1] < sizes[i] * (1 - 1e-9):
                _open(opened, alone, counts, a, c, b, gap, heaps, ends)
                opened += 1
                uncommitted -= alone * speed
            else:
                break
        rest -= sizes[i]
        part = i / samples if opened == steps else 0.0
        each = part * rest / max(samples - i - 1, 1) + (1 - part) * small
        places = _fullest(ends, heaps, gap, each)[0]
        at = _pop(heaps[places], ends[places], gap)
        ends[places] -= 1
        bins[i] = at
        gap[at] -= sizes[i]
        if places > 1:
            _push(heaps[places - 1], ends[places - 1], gap, at)
            ends[places - 1] += 1
    return bins, gap


@compiled
def _close(sizes: Floats, bins: Ints, gap: Floats, a: Floats, enough_s: float) -> None:
    """Bins with too much exchange a sample with bins with too little, the worst with the worst."""
    world = len(a)
    first = np.full(len(gap), -1)
    following = np.full(len(bins), -1)
    for i in range(len(bins) - 1, -1, -1):
        following[i] = first[bins[i]]
        first[bins[i]] = i
    off = np.arange(len(gap))  # bins that are not near enough to their target
    for _ in range(_ROUNDS):
        off = off[np.abs(gap[off]) * a[off % world] > enough_s]
        off = off[np.argsort(gap[off])]
        changed = 0
        for k in range(len(off) // 2):
            p, q = off[k], off[len(off) - 1 - k]  # p has too much
            a_p, a_q = a[p % world], a[q % world]
            best = (gap[p] * a_p) ** 2 + (gap[q] * a_q) ** 2
            before, give, get = best, -1, -1
            i = first[p]
            while i >= 0:
                m = first[q]
                while m >= 0:
                    more = sizes[i] - sizes[m]
                    left = ((gap[p] + more) * a_p) ** 2 + ((gap[q] - more) * a_q) ** 2
                    if left < best:
                        best, give, get = left, i, m
                    m = following[m]
                i = following[i]
            if best < 0.99 * before:
                more = sizes[give] - sizes[get]
                gap[p] += more
                gap[q] -= more
                hand_over(first, following, give, p, q)
                hand_over(first, following, get, q, p)
                bins[give], bins[get] = q, p
                changed += 1
        if changed <= len(off) // 16:
            break


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
