"""Division of one global batch among the workers so that its slowest worker ends early.

The time of worker j with n samples of sizes λ is T_j = a_j·Σf(λ) + c_j·n + b_j seconds, and 0
without samples; f(λ) is the cost of a sample, and a, c and b are the worker's model (`Models`).
For padded batches, this formula does not hold, and `partition` calls the module `padded`.

First each sample goes to the worker with the largest gap between its time so far and the time that
all workers would need at best. Then workers exchange samples: with many workers, first in pairs
(`pairs`). Last, the slowest worker exchanges samples with any other worker until no exchange helps
(`descend`). If the batch has few samples, branch and bound (`_search`) improves the result further.
`constraints` calls `pairs` and `descend` for batches whose counts are fixed.

In private functions, `sizes` has the cost f(λ) of each sample of the batch, and `ranks` the rank of
each sample, [n] each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.policies.jit import compiled
from paceline.policies.solve.padded import partition_padded
from paceline.policies.solve.workers import Workers, descending, least, level, most_of
from paceline.policies.values import Floats, Ints, Models

# The search ends when the slowest rank's time exceeds its lower bound by less than this fraction:
# `_CLOSE` with more than `FEW_RANKS` ranks, otherwise `_CLOSER`.
_CLOSE = 1e-3
_CLOSER = 1e-5
# Number of bisections of the maximum time of a slice in `_cut`.
_CUT_BISECTIONS = 6
# With more ranks than this, `pairs` runs before `descend`, and the search ends earlier.
FEW_RANKS = 64
# Maximum number of samples for branch and bound.
_FEW_SAMPLES = 20
# Maximum number of exchanges that are tried for one batch, which take 2 ms. With many ranks, the
# maximum is lower.
_BATCH_EXCHANGES = 1_000_000
# Maximum number of nodes of branch and bound, which take 2 ms.
_MOST_SEARCH_NODES = 30_000


def partition(
    sizes: Floats,
    models: Models,
    counts: Ints | None = None,
    limits: Ints | None = None,
    *,
    laid_out: bool = False,
) -> Ints:
    """Assign each sample of a global batch to a rank, [n], so that the slowest rank ends early.

    To level loads in proportion to `counts`, pass models with ``a = 1 / counts``.

    Args:
        sizes: size λ of each of the n samples of the batch, [n].
        models: models of the W workers; `models.cost` defines the cost of a batch from its sizes.
        counts: the number of samples that each worker must get, [W]; their sum is n. None: the
            function chooses the numbers.
        limits: maximum number of samples that fit into each worker's memory, [W]; ignored if the
            batch does not fit into the memory of all workers together.
        laid_out: true if the samples are already arranged for ranks 0, 1, …; the search then begins
            with the best cut of this sequence.

    Raises:
        ValueError: the counts' sum is not n.
    """
    samples, world = len(sizes), models.world
    if counts is not None and int(np.sum(counts)) != samples:
        raise ValueError(f"counts: their sum is {int(np.sum(counts))}; sizes has {samples} samples")
    workers = Workers.of(models, most_of(limits if counts is None else counts, samples, world))
    effective = np.array(models.cost.sizes(sizes), np.float64)
    if samples == 0:
        return np.empty(0, np.int64)
    if models.cost.padded:
        return partition_padded(effective, workers, laid_out=laid_out)
    goal = level(effective, workers)
    cut, fits = np.empty(0, np.int64), False
    if laid_out and counts is None:
        cut, fits = _cut(effective, workers, goal)
    if fits and samples > _FEW_SAMPLES:
        return _improved(effective, workers, goal, cut)
    order = descending(effective)
    ranks = np.empty(samples, np.int64)
    effective = effective[order]
    found = _improved(effective, workers, goal, cut[order] if fits else None)
    if samples <= _FEW_SAMPLES:
        _, bound = _goal_and_bound(effective, workers, goal)
        search(effective, workers, bound, found, _MOST_SEARCH_NODES)
    ranks[order] = found
    return ranks


def improve(
    sizes: Floats,
    models: Models,
    start: Ints,
    counts: Ints | None = None,
    limits: Ints | None = None,
) -> Ints:
    """Improve an assignment of samples to ranks, [n], by exchanges; see `partition`.

    `start` must have the `counts` or keep the `limits`. Here `sizes` has the costs f(λ) of the
    samples, and batches must not be padded.
    """
    most = most_of(limits if counts is None else counts, len(sizes), models.world)
    workers = Workers.of(models, most)
    return _improved(sizes, workers, level(sizes, workers), start.copy())


def _improved(sizes: Floats, workers: Workers, goal: float, start: Ints | None) -> Ints:
    """Improve an assignment of samples to ranks by exchanges; return each sample's rank, [n].

    `goal` is the time at which all ranks would end if samples were divisible: see `level`. `start`
    is the assignment at the start, [n]; None: `_largest_gap` makes it, and `sizes` must be
    descending.
    """
    few = len(workers.a) <= FEW_RANKS
    goal, bound = _goal_and_bound(sizes, workers, goal)
    ranks = _largest_gap(sizes, workers, goal) if start is None else start
    enough = bound * (1 + (_CLOSER if few else _CLOSE))
    state = DescentState.of(sizes, ranks, workers)
    if not few:
        pairs(state, enough)
    descend(state, enough, _BATCH_EXCHANGES // (1 + len(workers.a) // FEW_RANKS))
    return ranks


def _goal_and_bound(sizes: Floats, workers: Workers, goal: float) -> tuple[float, float]:
    """Return a pair: `goal`, and a lower bound of the slowest rank's time.

    `goal` is raised to the shortest time in which a rank computes the largest sample alone.
    """
    alone = float((workers.a * sizes.max() + workers.c + workers.b)[workers.most > 0].min())
    goal = max(goal, alone)
    return goal, max(least(sizes, workers), alone) if len(workers.a) <= FEW_RANKS else goal


def search(sizes: Floats, workers: Workers, bound: float, ranks: Ints, nodes: int) -> None:
    """Improve an assignment of samples to ranks, [n], by a branch and bound, in place.

    The result is optimal if the search ends before it has visited `nodes` nodes. `sizes` must be
    descending. `bound` is a lower bound of the slowest rank's time.
    """
    slowest_s = float(DescentState.of(sizes, ranks, workers).time_s.max())
    if slowest_s > bound * (1 + 1e-12):
        rest = np.append(np.cumsum(sizes[::-1])[::-1], 0.0)
        _search(sizes, rest, workers, bound, slowest_s, ranks, nodes)


@compiled
def _cut(sizes: Floats, w: Workers, low: float) -> tuple[Ints, bool]:
    """Cut the sequence of samples into one slice per rank, so that the slowest rank ends early.

    Return each sample's rank, [n], and whether some cut keeps the ranks' limits; if none does, the
    first result has no meaning. No cut takes less time than `low`. The search begins with the time
    `low`, because samples arranged by `compose` have cuts whose time is near it.
    """
    ranks, best, fits = np.empty(len(sizes), np.int64), np.empty(len(sizes), np.int64), False
    step = _CLOSE / 16 * low
    high, halvings = low + step, 0
    while halvings < _CUT_BISECTIONS and 0 < step < 64 * low:
        time_s = (low + high) / 2 if fits else high
        i = 0
        for j in range(len(w.a)):
            done, end = w.b[j], min(i + w.most[j], len(sizes))
            while i < end:
                done += w.a[j] * sizes[i] + w.c[j]
                if done > time_s:
                    break
                ranks[i] = j
                i += 1
        if fits:
            halvings += 1
        if i == len(sizes):
            ranks, best, fits, high = best, ranks, True, time_s
        elif fits:
            low = time_s
        else:
            low, step = high, 2 * step
            high = low + step
    return best, fits


@compiled
def grouped(ranks: Ints, world: int) -> tuple[Ints, Ints]:
    """Return the samples' positions sorted by rank, [n], and each rank's number of samples, [W].

    `ranks` has the rank of each of the n samples. A rank's positions are in ascending order.
    """
    counts = np.zeros(world, np.int64)
    for i in range(len(ranks)):
        counts[ranks[i]] += 1
    at = np.empty(world, np.int64)
    total = 0
    for j in range(world):
        at[j] = total
        total += counts[j]
    order = np.empty(len(ranks), np.int64)
    for i in range(len(ranks)):
        order[at[ranks[i]]] = i
        at[ranks[i]] += 1
    return order, counts


def _largest_gap(sizes: Floats, workers: Workers, goal: float) -> Ints:
    """Give each sample, largest first, to the rank whose load can still grow most.

    A rank's load can grow until the rank takes the time `goal`. `sizes` is descending. If
    `workers.most` fixes each rank's number of samples, `_by_deviation` assigns them.
    """
    a, c, b, most = workers
    left = most.copy()
    if int(most.sum()) == len(sizes):
        mean = float(sizes.mean())
        return _by_deviation(sizes - mean, (goal - b - c * most) / a - mean * most, left)
    gap = (goal - b - c) / a
    return _largest_first(sizes, gap, c / a, left, _heap(gap, left))


def _by_deviation(more: Floats, gap: Floats, left: Ints) -> Ints:
    """Assign samples to ranks with fixed numbers of samples.

    Samples above the mean, the largest first, go to the rank whose load can still grow most. Then
    samples below the mean, the smallest first, go to the rank whose load can grow least. The
    samples that a rank does not have yet count as samples of mean size. `more` is how far each
    sample is above the mean, descending, [n]; `gap` how much each rank's load can grow beyond
    average samples, [W]; `left` each rank's number of samples, [W].
    """
    above, none = int(np.count_nonzero(more >= 0)), np.zeros(len(gap))
    ranks = np.empty(len(more), np.int64)
    ranks[:above] = _largest_first(more[:above], gap, none, left, _heap(gap, left))
    gap, smallest_first = -gap, -more[above:][::-1]
    ranks[above:][::-1] = _largest_first(smallest_first, gap, none, left, _heap(gap, left))
    return ranks


def _heap(gap: Floats, left: Ints) -> Ints:
    """Return the ranks that can get samples, sorted by descending gap and thus a heap."""
    order = np.argsort(-gap, kind="stable")
    return order[left[order] > 0]


@compiled
def _largest_first(sizes: Floats, gap: Floats, each: Floats, left: Ints, heap: Ints) -> Ints:
    end = len(heap)
    ranks = np.empty(len(sizes), np.int64)
    for i in range(len(sizes)):
        j = heap[0]
        ranks[i] = j
        gap[j] -= sizes[i] + each[j]
        left[j] -= 1
        if left[j] == 0:
            end -= 1
            heap[0] = heap[end]
        item, at = heap[0], 0
        while True:
            child = 2 * at + 1
            if child >= end:
                break
            if child + 1 < end and gap[heap[child + 1]] > gap[heap[child]]:
                child += 1
            if gap[heap[child]] <= gap[item]:
                break
            heap[at] = heap[child]
            at = child
        heap[at] = item
    return ranks


class DescentState(NamedTuple):
    """An assignment of n samples to W ranks that is being improved.

    `sizes` has the cost f(λ) of each sample, and `ranks` its rank. The samples of a rank are a
    linked list: `first` has the first sample of each rank, and `following` the next sample of the
    same rank after each sample; -1 ends the list. `time_s` is each rank's time, and `number` its
    number of samples. `sizes` and `w` stay constant.
    """

    sizes: Floats  # [n]
    w: Workers
    ranks: Ints  # [n]
    first: Ints  # [W]
    following: Ints  # [n]
    time_s: Floats  # [W]
    number: Ints  # [W]

    @staticmethod
    def of(sizes: Floats, ranks: Ints, workers: Workers) -> DescentState:
        """Make the state from the rank of each sample, [n], which exchanges change in place."""
        world = len(workers.a)
        count = np.bincount(ranks, minlength=world)
        load = np.bincount(ranks, sizes, minlength=world)
        time_s = workers.a * load + workers.c * count + workers.b
        first, following = linked(ranks, world)
        time_s = np.where(count > 0, time_s, 0.0)
        return DescentState(sizes, workers, ranks, first, following, time_s, count)


@compiled
def linked(ranks: Ints, world: int) -> tuple[Ints, Ints]:
    """Return each rank's samples as a linked list, from the rank of each sample, [n].

    The results are `first` and `following` of `DescentState`.
    """
    first = np.full(world, -1)
    following = np.full(len(ranks), -1)
    for i in range(len(ranks) - 1, -1, -1):
        following[i] = first[ranks[i]]
        first[ranks[i]] = i
    return first, following


@compiled
def hand_over(first: Ints, following: Ints, sample: int, giver: int, taker: int) -> None:
    """Move a sample from the list of rank `giver` to the list of rank `taker`.

    `first` and `following` are the lists that `linked` returns; they are changed in place.
    """
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
def _exchange(p: int, q: int, state: DescentState, best: float) -> tuple[float, int, int]:
    """Find the best exchange between ranks p and q after which both take less than `best` seconds.

    Return the time of the slower of the two ranks after the exchange, the sample that p gives (-1:
    no exchange helps), and the sample that q gives in return (-1: none).
    """
    sizes, w = state.sizes, state.w
    give, get = -1, -1
    p_s, q_s, a_p, a_q = state.time_s[p], state.time_s[q], w.a[p], w.a[q]
    may_move = state.number[q] < w.most[q]
    more_p = w.c[p] + (w.b[p] if state.number[p] == 1 else 0.0)
    more_q = w.c[q] + (w.b[q] if state.number[q] == 0 else 0.0)
    i = state.first[p]
    while i >= 0:
        if may_move:
            slower = max(p_s - a_p * sizes[i] - more_p, q_s + a_q * sizes[i] + more_q)
            if slower < best:
                best, give, get = slower, i, -1
        k = state.first[q]
        while k >= 0:
            more = sizes[i] - sizes[k]
            if more > 0:
                slower = max(p_s - a_p * more, q_s + a_q * more)
                if slower < best:
                    best, give, get = slower, i, k
            k = state.following[k]
        i = state.following[i]
    return best, give, get


@compiled
def _apply(p: int, q: int, give: int, get: int, state: DescentState) -> None:
    sizes, w = state.sizes, state.w
    hand_over(state.first, state.following, give, p, q)
    state.ranks[give] = q
    if get >= 0:
        hand_over(state.first, state.following, get, q, p)
        state.ranks[get] = p
    else:
        state.number[p] -= 1
        state.number[q] += 1
    # Recompute the sums, because adding differences would accumulate rounding errors.
    for j in (p, q):
        total, i = 0.0, state.first[j]
        while i >= 0:
            total += sizes[i]
            i = state.following[i]
        count = state.number[j]
        state.time_s[j] = w.a[j] * total + w.c[j] * count + w.b[j] if count else 0.0


def pairs(state: DescentState, enough: float) -> None:
    """Pair the slowest rank with the fastest, the next slowest with the next fastest, and so on.

    The ranks of each pair exchange samples. This is repeated until the slowest rank takes at most
    `enough` seconds, or its distance from `enough` shrinks by less than 10 %.
    """
    slowest = np.inf
    while True:
        order = np.argsort(state.time_s, kind="stable")
        most_s = float(state.time_s[order[-1]])
        # Not true either if a time is not finite.
        if not (enough < most_s < slowest and most_s - enough <= 0.9 * (slowest - enough)):
            break
        slowest = most_s
        _paired(order, state, enough)


@compiled
def _paired(order: Ints, state: DescentState, enough: float) -> None:
    for k in range(len(order) // 2):
        p, q = order[len(order) - 1 - k], order[k]
        if state.time_s[p] <= enough:
            break
        give, get = _best_exchange(p, q, state)
        if give >= 0:
            _apply(p, q, give, get, state)


@compiled
def _best_exchange(p: int, q: int, state: DescentState) -> tuple[int, int]:
    """Find the exchange after which the slower of the ranks p and q takes the least time.

    Return the sample that p gives (-1: no exchange helps), and the sample that q gives in return
    (-1: none).
    """
    sizes, w = state.sizes, state.w
    give, get = -1, -1
    p_s, q_s, a_p, a_q = state.time_s[p], state.time_s[q], w.a[p], w.a[q]
    best = p_s * (1 - 1e-12)
    ours, theirs = _ascending(p, state), _ascending(q, state)
    if state.number[q] < w.most[q]:
        more_p = w.c[p] + (w.b[p] if state.number[p] == 1 else 0.0)
        more_q = w.c[q] + (w.b[q] if state.number[q] == 0 else 0.0)
        for i in ours:
            slower = max(p_s - a_p * sizes[i] - more_p, q_s + a_q * sizes[i] + more_q)
            if slower < best:
                best, give, get = slower, i, -1
    # After an exchange with this difference of the sizes, both ranks would take the same time.
    ideal = (p_s - q_s) / (a_p + a_q)
    at = 0
    for i in ours:
        while at < len(theirs) and sizes[theirs[at]] <= sizes[i] - ideal:
            at += 1
        # The differences nearest to the ideal are those to the samples before and after `at`.
        for k in theirs[max(at - 1, 0) : at + 1]:
            more = sizes[i] - sizes[k]
            slower = max(p_s - a_p * more, q_s + a_q * more)
            if slower < best:
                best, give, get = slower, i, k
    return give, get


@compiled
def _ascending(rank: int, state: DescentState) -> Ints:
    """Return a rank's samples, the smallest first."""
    samples = np.empty(state.number[rank], np.int64)
    i = state.first[rank]
    for k in range(len(samples)):
        samples[k] = i
        i = state.following[i]
    return samples[np.argsort(state.sizes[samples], kind="mergesort")]


@compiled
def descend(state: DescentState, enough: float, effort: int) -> int:
    """Repeatedly make the best exchange of the slowest rank with another rank.

    The function ends when the slowest rank takes at most `enough` seconds, when no exchange helps,
    or after about `effort` exchanges were tried; it returns what is left of `effort`. An exchange
    after which both ranks take at most `enough` is made at once, without a search for a better one.
    """
    sizes, w = state.sizes, state.w
    world = len(w.a)
    while effort > 0:
        p = int(np.argmax(state.time_s))
        if state.time_s[p] <= enough:
            break
        effort -= (state.number[p] + 1) * len(sizes) + world
        best = state.time_s[p] * (1 - 1e-12)
        give, get, taker = p, p, p
        least_p = state.time_s[p] - w.c[p] - (w.b[p] if state.number[p] == 1 else 0.0)
        for q in range(world):
            # No exchange lets both ranks end before the time at which they would end together if
            # their load were divisible.
            together = (least_p * w.a[q] + state.time_s[q] * w.a[p]) / (w.a[p] + w.a[q])
            if q != p and state.time_s[q] < best and together < best and w.most[q] > 0:
                slower_s, x, y = _exchange(p, q, state, best)
                if x >= 0:
                    best, give, get, taker = slower_s, x, y, q
                    if best <= enough:
                        break
        if taker == p:
            break
        _apply(p, taker, give, get, state)
    return effort


@compiled
def _search(
    sizes: Floats,
    rest: Floats,
    w: Workers,
    goal: float,
    best: float,
    ranks: Ints,
    most_nodes: int,
) -> None:
    """Improve `ranks` by a depth-first branch and bound, in place.

    The search assigns the largest sample first, and visits at most `most_nodes` nodes. `sizes` is
    descending. `rest` has the sum of `sizes` from each sample to the last one, [n + 1]. `best` is
    the slowest rank's time under `ranks`. The search ends when this time reaches its lower bound
    `goal`.
    """
    samples, world = len(sizes), len(w.a)
    time_s, count = np.zeros(world), np.zeros(world, np.int64)
    chosen = np.full(samples, -1)
    # Time of each sample's chosen rank without the sample.
    before = np.zeros(samples)
    i, nodes = 0, 0
    while i >= 0 and nodes < most_nodes and best > goal * (1 + 1e-12):
        last = chosen[i]
        tried_s = -1.0
        if last >= 0:
            tried_s = time_s[last]
            time_s[last] = before[i]
            count[last] -= 1
        least_s, rank = best * (1 - 1e-12), -1
        for j in range(world):
            if count[j] < w.most[j]:
                then = time_s[j] + w.a[j] * sizes[i] + w.c[j] + (w.b[j] if count[j] == 0 else 0.0)
                after = then > tried_s or (then == tried_s and j > last)
                if after and then < least_s and not _twin(j, time_s, count, w):
                    least_s, rank = then, j
        chosen[i] = rank
        if rank < 0:
            i -= 1
            continue
        nodes += 1
        before[i] = time_s[rank]
        time_s[rank] = least_s
        count[rank] += 1
        room = 0.0
        for j in range(world):
            if count[j] < w.most[j]:
                room += max(best - time_s[j], 0.0) / w.a[j]
        if room < rest[i + 1]:
            continue
        if i == samples - 1:
            best = 0.0
            for j in range(world):
                best = max(best, time_s[j])
            for k in range(samples):
                ranks[k] = chosen[k]
        else:
            i += 1


@compiled
def _twin(j: int, time_s: Floats, count: Ints, w: Workers) -> bool:
    """Return True if a rank below j has the same state and model, so that j need not be tried."""
    for k in range(j):
        equal = time_s[k] == time_s[j] and count[k] == count[j] and w.most[k] == w.most[j]
        if equal and w.a[k] == w.a[j] and w.c[k] == w.c[j] and w.b[k] == w.b[j]:
            return True
    return False
