"""Who of the workers computes which samples of one global batch, such that the slowest ends first.

Samples add up (`Cost.padded` is `_padded`'s business): T_j = a_j·Σf(λ) + c_j·n + b_j, and 0 for a
worker without samples. Largest gap first, then exchanges between the slowest worker and the others
until none helps, then, for a few samples, a search of what is left to try.
"""

from __future__ import annotations

import numpy as np

from paceline_backend.policies._base import Floats, Ints, Models
from paceline_backend.policies._jit import compiled
from paceline_backend.policies._padded import partition_padded

_CLOSE = 1e-3  # of a bound on the best: nearer is not tried for, with more than `_FEW_RANKS`
_CLOSER = 1e-5  # and with fewer
_HALVINGS = 6
_FEW_RANKS = 64  # up to so many every exchange with the slowest is looked at
_FEW_SAMPLES = 20  # up to so many the search runs
_EFFORT = 1_000_000  # exchanges that are looked at for one batch: 2 ms; less with many ranks
_NODES = 30_000  # of the search: 2 ms


def partition(
    sizes: Floats,
    models: Models,
    counts: Ints | None = None,
    limits: Ints | None = None,
    *,
    laid_out: bool = False,
) -> Ints:
    """The rank of each sample of a global batch, [n]; max_j T_j is as small as was found.

    To level loads in proportion to `counts`, give models with ``a = 1 / counts``.

    Args:
        sizes: λ of the samples, [n].
        models: of the workers; its `cost` says how sizes add up.
        counts: how many samples each worker gets, [W]; their sum is n. None: as is best.
        limits: the most samples that fit into each worker's memory, [W]; kept while the batch fits
            into all of them together.
        laid_out: begin with the best cut of the samples as they come: first those of rank 0, ….

    Raises:
        ValueError: the counts' sum is not n.
    """
    samples, world = len(sizes), models.world
    if counts is not None and int(np.sum(counts)) != samples:
        raise ValueError(f"counts: their sum is {int(np.sum(counts))}; give {samples}, one a size")
    most = most_of(counts if counts is not None else limits, samples, world)
    if models.cost.padded:
        return partition_padded(models.cost.sizes(sizes), models, most, counts is not None)
    effective = models.cost.sizes(sizes)
    order = np.argsort(-effective, kind="stable")
    descending = effective[order]
    ranks = np.empty(samples, np.int64)
    start = np.empty(0, np.int64)
    if laid_out and counts is None:
        start = _cut(effective, models.a, models.c, models.b, most)[order]
    ranks[order] = _partition(
        descending, models.a, models.c, models.b, most, counts is not None, start
    )
    return ranks


@compiled
def _cut(sizes: Floats, a: Floats, c: Floats, b: Floats, most: Ints) -> Ints:
    """The ranks of samples that go to rank 0, 1, … as they come; the best such cut; empty: none."""
    low = level(sizes, a, c, b, False)
    step, best, found = _CLOSE / 16 * low, np.empty(0, np.int64), False
    high = low + step
    while low > 0 and not found and step < 64 * low:  # composed samples are cut well: begin near
        best, found = _cut_at(sizes, a, c, b, most, high)
        if not found:
            low, step = high, 2 * step
            high = low + step
    if not found:
        return np.empty(0, np.int64)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        ranks, fits = _cut_at(sizes, a, c, b, most, middle)
        if fits:
            best, high = ranks, middle
        else:
            low = middle
    return best


@compiled
def _cut_at(
    sizes: Floats, a: Floats, c: Floats, b: Floats, most: Ints, time_s: float
) -> tuple[Ints, bool]:
    ranks = np.empty(len(sizes), np.int64)
    i = 0
    for j in range(len(a)):
        done, count = b[j], 0
        while i < len(sizes) and count < most[j]:
            done += a[j] * sizes[i] + c[j]
            if done > time_s:
                break
            ranks[i] = j
            i += 1
            count += 1
    return ranks, i == len(sizes)


@compiled
def grouped(ranks: Ints, world: int) -> tuple[Ints, Ints]:
    """Positions rank by rank, in each ascending, [n]; and how many each has, [W]."""
    counts = np.zeros(world, np.int64)
    for rank in ranks:
        counts[rank] += 1
    at = np.cumsum(counts) - counts
    order = np.empty(len(ranks), np.int64)
    for i in range(len(ranks)):
        order[at[ranks[i]]] = i
        at[ranks[i]] += 1
    return order, counts


def most_of(limits: Ints | None, samples: int, world: int) -> Ints:
    """The most samples that each worker may get, [W]; without effect where they are too few."""
    if limits is None or int(np.sum(limits)) < samples:
        return np.full(world, samples, np.int64)
    return np.asarray(limits, np.int64)


@compiled
def level(sizes: Floats, a: Floats, c: Floats, b: Floats, least: bool) -> float:
    """The time at which all would end if samples could be divided at will, memory no matter.

    Workers whose b alone takes longer take no part.

    Args:
        sizes: f(λ), [n].
        a: see `Models`; and so `c`, `b`.
        least: a proven bound on what any partition takes; otherwise all samples count as average
            ones, which is the same unless samples have costs that differ by worker (c/a).
    """
    samples = len(sizes)
    if samples == 0:
        return 0.0
    rate = 1.0 / np.maximum(a * sizes.mean() + c, 1e-300)
    work = float(samples)
    if least and (c > 0).any():  # each sample where it is cheapest, at these prices of time
        work = 0.0
        for i in range(samples):
            work += (rate * (a * sizes[i] + c)).min()
    speed, due, time_s = 0.0, 0.0, np.inf
    for j in np.argsort(b):
        if b[j] >= time_s:
            break
        speed += rate[j]
        due += rate[j] * b[j]
        time_s = (work + due) / speed
    return time_s


@compiled
def _partition(
    sizes: Floats, a: Floats, c: Floats, b: Floats, most: Ints, exact: bool, hint: Ints
) -> Ints:
    """`partition` of samples in descending order of size; `hint`: ranks to begin with, or empty."""
    samples, world = len(sizes), len(a)
    if samples == 0:
        return np.empty(0, np.int64)
    alone = np.inf
    for j in range(world):
        if most[j] > 0:
            alone = min(alone, a[j] * sizes[0] + c[j] + b[j])
    few = world <= _FEW_RANKS
    goal = max(level(sizes, a, c, b, False), alone)
    bound = max(level(sizes, a, c, b, True), alone) if few else goal
    ranks = hint.copy() if len(hint) else _largest_gap(sizes, a, c, b, most, exact, goal)
    enough = bound * (1 + (_CLOSER if few else _CLOSE))
    if not few:
        _pairs(sizes, ranks, a, c, b, most, exact, enough)
    _descend(sizes, ranks, a, c, b, most, exact, enough)
    if samples <= _FEW_SAMPLES:
        _search(sizes, ranks, a, c, b, most, exact, bound)
    return ranks


@compiled
def _sift(heap: Ints, key: Floats, at: int, end: int) -> None:
    """Restores a heap of ranks, the largest key first, whose entry `at` got smaller."""
    item = heap[at]
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


@compiled
def _largest_gap(
    sizes: Floats, a: Floats, c: Floats, b: Floats, most: Ints, exact: bool, goal: float
) -> Ints:
    """Each sample, largest first, to the rank that can take most until all have reached `goal`.

    With exact counts a rank keeps room for average ones in its other places.
    """
    samples, world = len(sizes), len(a)
    mean = sizes.mean()
    gap = np.empty(world)
    left = most.copy()
    for j in range(world):
        gap[j] = (goal - b[j] - c[j]) / a[j]
        if exact:
            gap[j] = (goal - b[j] - c[j] * most[j]) / a[j] - mean * (most[j] - 1)
    heap = np.argsort(-gap)
    end = 0
    for j in heap:
        if left[j] > 0:
            heap[end] = j
            end += 1
    ranks = np.empty(samples, np.int64)
    for i in range(samples):
        j = heap[0]
        ranks[i] = j
        gap[j] -= sizes[i] - mean if exact else sizes[i] + c[j] / a[j]
        left[j] -= 1
        if left[j] == 0:
            end -= 1
            heap[0] = heap[end]
        if end:
            _sift(heap, gap, 0, end)
    return ranks


@compiled
def _times(sizes: Floats, ranks: Ints, a: Floats, c: Floats, b: Floats) -> tuple[Floats, Ints]:
    """T and n of each rank."""
    time_s = np.zeros(len(a))
    count = np.zeros(len(a), np.int64)
    for i in range(len(sizes)):
        j = ranks[i]
        time_s[j] += a[j] * sizes[i] + c[j] + (b[j] if count[j] == 0 else 0.0)
        count[j] += 1
    return time_s, count


@compiled
def _lists(ranks: Ints, world: int) -> tuple[Ints, Ints]:
    """The samples of each rank as linked lists: the first of each, and each one's next; -1 ends."""
    first = np.full(world, -1)
    following = np.full(len(ranks), -1)
    for i in range(len(ranks) - 1, -1, -1):
        following[i] = first[ranks[i]]
        first[ranks[i]] = i
    return first, following


@compiled
def hand_over(first: Ints, following: Ints, sample: int, giver: int, taker: int) -> None:
    """Moves a sample from one linked list to another; see `_lists`."""
    if first[giver] == sample:
        first[giver] = following[sample]
    else:
        at = first[giver]
        while following[at] != sample:
            at = following[at]
        following[at] = following[sample]
    following[sample] = first[taker]
    first[taker] = sample


@compiled
def _exchange(
    p: int,
    q: int,
    sizes: Floats,
    first: Ints,
    following: Ints,
    time_s: Floats,
    count: Ints,
    a: Floats,
    c: Floats,
    b: Floats,
    may_move: bool,
    best: float,
) -> tuple[float, int, int]:
    """What p may give q, and get for it, such that the slower of both takes less than `best`.

    Returns:
        What the slower then takes, p's sample (-1: nothing helps), q's sample (-1: none).
    """
    give, get = -1, -1
    i = first[p]
    while i >= 0:
        if may_move:
            p_s = time_s[p] - a[p] * sizes[i] - c[p] if count[p] > 1 else 0.0
            q_s = time_s[q] + a[q] * sizes[i] + c[q] + (b[q] if count[q] == 0 else 0.0)
            if max(p_s, q_s) < best:
                best, give, get = max(p_s, q_s), i, -1
        k = first[q]
        while k >= 0:
            more = sizes[i] - sizes[k]
            if more > 0:
                slower = max(time_s[p] - a[p] * more, time_s[q] + a[q] * more)
                if slower < best:
                    best, give, get = slower, i, k
            k = following[k]
        i = following[i]
    return best, give, get


@compiled
def _apply(
    p: int,
    q: int,
    give: int,
    get: int,
    sizes: Floats,
    ranks: Ints,
    first: Ints,
    following: Ints,
    time_s: Floats,
    count: Ints,
    a: Floats,
    c: Floats,
    b: Floats,
) -> None:
    hand_over(first, following, give, p, q)
    ranks[give] = q
    if get >= 0:
        hand_over(first, following, get, q, p)
        ranks[get] = p
    else:
        count[p] -= 1
        count[q] += 1
    for j in (p, q):  # anew: differences would add up rounding errors
        total, i = 0.0, first[j]
        while i >= 0:
            total += sizes[i]
            i = following[i]
        time_s[j] = a[j] * total + c[j] * count[j] + b[j] if count[j] else 0.0


@compiled
def _pairs(
    sizes: Floats,
    ranks: Ints,
    a: Floats,
    c: Floats,
    b: Floats,
    most: Ints,
    exact: bool,
    enough: float,
) -> None:
    """Slowest with fastest, next slowest with next fastest, …: one exchange each, while it pays."""
    world = len(a)
    time_s, count = _times(sizes, ranks, a, c, b)
    first, following = _lists(ranks, world)
    slowest = np.inf
    while True:
        order = np.argsort(time_s)
        most_s = time_s[order[world - 1]]
        if most_s <= enough or most_s - enough > 0.9 * (slowest - enough):
            break
        slowest = most_s
        for k in range(world // 2):
            p, q = order[world - 1 - k], order[k]
            if time_s[p] <= enough:
                break
            may_move = not exact and count[q] < most[q]
            _, give, get = _exchange(
                p, q, sizes, first, following, time_s, count, a, c, b, may_move, time_s[p]
            )
            if give >= 0:
                _apply(p, q, give, get, sizes, ranks, first, following, time_s, count, a, c, b)


@compiled
def _descend(
    sizes: Floats,
    ranks: Ints,
    a: Floats,
    c: Floats,
    b: Floats,
    most: Ints,
    exact: bool,
    enough: float,
) -> None:
    """The slowest rank's best exchange with any other, again and again, until none helps."""
    world = len(a)
    time_s, count = _times(sizes, ranks, a, c, b)
    first, following = _lists(ranks, world)
    effort = _EFFORT // (1 + world // _FEW_RANKS)
    while effort > 0:
        p = int(np.argmax(time_s))
        if time_s[p] <= enough:
            break
        effort -= (count[p] + 1) * len(sizes) + world
        best, give, get, taker = time_s[p] * (1 - 1e-12), -1, -1, -1
        for q in range(world):
            if q != p and time_s[q] < best and most[q] > 0:
                may_move = not exact and count[q] < most[q]
                found, x, y = _exchange(
                    p, q, sizes, first, following, time_s, count, a, c, b, may_move, best
                )
                if x >= 0:
                    best, give, get, taker = found, x, y, q
        if give < 0:
            break
        _apply(p, taker, give, get, sizes, ranks, first, following, time_s, count, a, c, b)


@compiled
def _search(
    sizes: Floats,
    ranks: Ints,
    a: Floats,
    c: Floats,
    b: Floats,
    most: Ints,
    exact: bool,
    goal: float,
) -> None:
    """Branch and bound, depth first, largest sample first, at most `_NODES` nodes."""
    samples, world = len(sizes), len(a)
    time_s, _ = _times(sizes, ranks, a, c, b)
    best = time_s.max()
    time_s[:] = 0.0
    count = np.zeros(world, np.int64)
    rest = np.zeros(samples + 1)  # load of a sample and all after it
    for i in range(samples - 1, -1, -1):
        rest[i] = rest[i + 1] + sizes[i]
    chosen = np.full(samples, -1)
    before = np.zeros(samples)  # the chosen rank's time without the sample
    i, nodes = 0, 0
    while i >= 0 and nodes < _NODES and best > goal * (1 + 1e-12):
        last = chosen[i]
        tried_s = -1.0
        if last >= 0:
            tried_s = time_s[last]
            time_s[last] = before[i]
            count[last] -= 1
        least, rank = best * (1 - 1e-12), -1
        for j in range(world):  # the next one in order of (time, rank)
            if count[j] < most[j]:
                then = time_s[j] + a[j] * sizes[i] + c[j] + (b[j] if count[j] == 0 else 0.0)
                after = then > tried_s or (then == tried_s and j > last)
                if after and then < least and not _twin(j, time_s, count, a, c, b, most):
                    least, rank = then, j
        chosen[i] = rank
        if rank < 0:
            i -= 1
            continue
        nodes += 1
        before[i] = time_s[rank]
        time_s[rank] = least
        count[rank] += 1
        room = 0.0
        for j in range(world):
            if count[j] < most[j]:
                room += max(best - time_s[j], 0.0) / a[j]
        if room < rest[i + 1]:
            continue
        if i == samples - 1:
            best = time_s.max()
            ranks[:] = chosen
        else:
            i += 1


@compiled
def _twin(j: int, time_s: Floats, count: Ints, a: Floats, c: Floats, b: Floats, most: Ints) -> bool:
    """Whether an earlier rank is in the same state: then trying both is in vain."""
    for k in range(j):
        if (
            time_s[k] == time_s[j]
            and count[k] == count[j]
            and most[k] == most[j]
            and a[k] == a[j]
            and c[k] == c[j]
            and b[k] == b[j]
        ):
            return True
    return False
