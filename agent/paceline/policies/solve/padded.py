"""Division of padded batches, in which each sample takes as long as the batch's longest sample.

The time of worker j with n_j samples is T_j = a_j·n_j·f(λ_j) + c_j·n_j + b_j seconds, where λ_j is
the size of its longest sample, f the cost of a sample, and a, c and b the worker's model. Among the
best partitions is one that gives each worker a contiguous slice of the batch sorted by length:
samples can be exchanged until all workers have slices, and these exchanges make no worker's longest
sample longer. So the solver sorts the batch, and only chooses the order of the workers and the
cuts.

In private functions, `sizes` has the cost f(λ) of each sample, [n]; `turn` has the ranks in the
sequence of their slices, [W].
"""

from __future__ import annotations

import numpy as np

from paceline.policies.jit import compiled
from paceline.policies.solve.workers import Workers
from paceline.policies.values import Floats, Ints

# Maximum number of states of the dynamic program in `_reached`. With 10 workers, 1024 states cover
# every order of the workers.
_STATES = 1024
# Relative precision of a step's minimum time.
_STEP_TOLERANCE = 1e-4
# Number of iterations of `_runs`.
_RUN_PASSES = 6
# `_best_counts` tries its candidates on a part of the epoch with about this many bins.
_BINS = 16_384
# Candidates for the number of samples that `_best_counts` moves to the fastest worker.
_TILTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def partition_padded(effective: Floats, workers: Workers, *, laid_out: bool = False) -> Ints:
    """Assign each sample of a padded batch to a rank, [n], so that the slowest rank ends early.

    `effective` has the cost f(λ) of each sample, [n]; there is at least one. The partition is
    optimal for up to 10 workers, and for equal workers. With more workers, those of similar speed
    always get their slices in the sequence of their speeds. With `laid_out`, the solver also tries
    to cut the samples in their given sequence.
    """
    order = np.argsort(-effective, kind="stable")
    descending = effective[order]
    by_speed = np.lexsort((workers.b, workers.a))
    tried = [(order, descending, by_speed), (order, descending, by_speed[::-1].copy())]
    if laid_out:
        tried.append((np.arange(len(order)), effective, np.arange(len(workers.a))))
    best_s, ranks = np.inf, np.empty(len(order), np.int64)
    given = int(workers.most.sum()) == len(order)
    for positions, sizes, turn in tried:
        counts = workers.most[turn] if given else _cut(sizes, turn, workers, best_s)
        if counts.sum() == len(order):
            time_s = _slowest(sizes, turn, counts, workers)
            if time_s < best_s:
                best_s = time_s
                ranks[positions] = np.repeat(turn, counts)
    if not given:
        turn, counts = _merged(descending, _groups(by_speed, workers, descending), workers, best_s)
        if len(turn):
            ranks[order] = np.repeat(turn, counts)
    return ranks


def _cut(sizes: Floats, turn: Ints, workers: Workers, below_s: float) -> Ints:
    """Cut the samples into one slice per rank, in the sequence of `turn`, [W].

    Return the number of samples in each slice, [W]. The sum is below n if no cut takes less than
    `below_s` seconds.
    """
    low, high = 0.0, below_s
    if high == np.inf:
        each = workers.a * sizes.max() + workers.c
        high = float((each * workers.most + workers.b).max())
    best = _fill(sizes, turn, workers, high)
    while best.sum() == len(sizes) and high - low > _STEP_TOLERANCE * high:
        middle = (low + high) / 2
        counts = _fill(sizes, turn, workers, middle)
        if counts.sum() == len(sizes):
            best, high = counts, _slowest(sizes, turn, counts, workers)
        else:
            low = middle
    return best


@compiled
def _slowest(sizes: Floats, turn: Ints, counts: Ints, w: Workers) -> float:
    slowest, at = 0.0, 0
    for k in range(len(turn)):
        j, longest = turn[k], 0.0
        for i in range(at, at + counts[k]):
            longest = max(longest, sizes[i])
        if counts[k]:
            slowest = max(slowest, w.a[j] * counts[k] * longest + w.c[j] * counts[k] + w.b[j])
        at += counts[k]
    return slowest


@compiled
def _fill(sizes: Floats, turn: Ints, w: Workers, time_s: float) -> Ints:
    """Fill the ranks' slices one after the other, in the sequence of `turn`, [W].

    Return the number of samples in each slice, [W]: as many as the rank finishes within `time_s`,
    at most its maximum, `Workers.most`.
    """
    counts = np.zeros(len(turn), np.int64)
    at = 0
    for k in range(len(turn)):
        j, longest = turn[k], 0.0
        while at < len(sizes) and counts[k] < w.most[j]:
            longest = max(longest, sizes[at])
            if (w.a[j] * longest + w.c[j]) * (counts[k] + 1) + w.b[j] > time_s * (1 + 1e-12):
                break
            counts[k] += 1
            at += 1
    return counts


def _groups(by_speed: Ints, workers: Workers, sizes: Floats) -> list[Ints]:
    each = workers.a * sizes.mean() + workers.c
    gaps = np.diff(np.log(np.maximum(each[by_speed], 1e-300)))
    groups, states = [by_speed], len(by_speed) + 1
    for cut in np.argsort(-gaps, kind="stable"):
        splits = sorted({int(cut) + 1, *np.cumsum([len(g) for g in groups])[:-1].tolist()})
        split = np.split(by_speed, splits)
        states = int(np.prod([float(len(g) + 1) for g in split]))
        if states > _STATES:
            break
        groups = split
    return groups


def _merged(
    sizes: Floats, groups: list[Ints], workers: Workers, below_s: float
) -> tuple[Ints, Ints]:
    """Search for the order in which the ranks should get their slices of the sorted batch.

    Return the ranks in this order, and each rank's number of samples, [W] each; both are empty if
    no order takes less than `below_s` seconds. `groups` are ranks of similar speed; within a group,
    the order is fixed. `sizes` is descending.
    """
    turn, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    if len(groups) < 2:
        return turn, counts
    members = np.concatenate(groups)
    starts = np.cumsum([0, *map(len, groups)])
    low, high = 0.0, below_s * (1 - _STEP_TOLERANCE)
    while high - low > _STEP_TOLERANCE * high:
        middle = (low + high) / 2 if len(turn) else high
        tried, filled = _reached(sizes, members, starts, workers, middle)
        if filled.sum() == len(sizes):
            turn, counts = tried, filled
            high = _slowest(sizes, turn, counts, workers)
        elif len(turn):
            low = middle
        else:
            break
    return turn, counts


@compiled
def _reached(
    sizes: Floats, members: Ints, starts: Ints, w: Workers, time_s: float
) -> tuple[Ints, Ints]:
    """Find the order of the ranks in which they finish the most sorted samples within `time_s`.

    Return the ranks in this order, and each rank's number of samples, [W] each, by dynamic
    programming. A state is the number of ranks of each group that have got their slice. The value
    of a state is the largest number of samples that these slices can contain. `sizes` is
    descending. `members` has the ranks sorted by group, [W], and `starts` the index in `members` at
    which each group starts, with W at the end.
    """
    groups = len(starts) - 1
    strides = np.ones(groups + 1, np.int64)
    for g in range(groups):
        strides[g + 1] = strides[g] * (starts[g + 1] - starts[g] + 1)
    far, came = np.zeros(strides[groups], np.int64), np.full(strides[groups], -1)
    for state in range(1, strides[groups]):
        for g in range(groups):
            had = state % strides[g + 1] // strides[g]
            if had == 0:
                continue
            j, at = members[starts[g] + had - 1], far[state - strides[g]]
            end = at
            if at < len(sizes):
                each = max(w.a[j] * sizes[at] + w.c[j], 1e-300)
                room = max(time_s * (1 + 1e-12) - w.b[j], 0.0) / each
                end += min(int(min(room, float(len(sizes) - at))), w.most[j])
            if end > far[state] or came[state] < 0:
                far[state], came[state] = end, g
    turn, counts = np.empty(len(members), np.int64), np.empty(len(members), np.int64)
    state = strides[groups] - 1
    for k in range(len(members) - 1, -1, -1):
        g = came[state]
        turn[k] = members[starts[g] + state % strides[g + 1] // strides[g] - 1]
        before = state - strides[g]
        counts[k] = far[state] - far[before]
        state = before
    return turn, counts


def compose_padded(
    effective: Floats, workers: Workers, global_batch: int, rng: np.random.Generator
) -> Ints:
    """Order an epoch's samples so that each global batch can be cut well into local batches, [R].

    `effective` has the cost f(λ) of each of the R samples, [R]. The result has the samples'
    positions in `effective`; each `global_batch` successive samples are one step.

    An epoch of K steps on W workers has K·W bins: a bin is the local batch of one worker in one
    step. All bins of a worker have the same number of samples, and each is a contiguous slice of
    the epoch's samples sorted by length. The lengths of a step's bins are such that the workers end
    at the same time. If workers have different counts, long samples are put into bins with few
    samples. Steps come in random order; within a step, samples come rank by rank. The samples of a
    smaller last step come last.
    """
    # Put samples of equal lengths in random order.
    order = rng.permutation(len(effective))
    order = order[np.argsort(-effective[order], kind="stable")]
    steps, rest = divmod(len(order), global_batch)
    at = int(rng.integers(steps + 1)) * global_batch
    last = order[at : at + rest]
    if not steps:
        return last
    order = np.concatenate([order[:at], order[at + rest :]])
    sizes = effective[order]
    counts = _best_counts(sizes, workers, global_batch, steps)
    starts, _ = _runs(sizes, workers, counts, steps)
    starts = starts[rng.permutation(steps)].ravel()
    number = np.tile(counts, steps)
    within = np.arange(len(order)) - np.repeat(np.cumsum(number) - number, number)
    return np.concatenate([order[np.repeat(starts, number) + within], last])


def _best_counts(sizes: Floats, workers: Workers, global_batch: int, steps: int) -> Ints:
    world = len(workers.a)
    few = max(1, min(steps, _BINS // world))
    part = sizes[np.arange(few * global_batch) * steps // few]
    base = proportional(float(sizes.mean()), workers, global_batch)
    profile = np.linspace(1.0, -1.0, world)
    best_s, best = np.inf, base
    for tilt in _TILTS:
        more = np.round(tilt * profile[: world // 2]).astype(np.int64)
        counts = base.copy()
        by_speed = np.lexsort((-base, workers.a))
        counts[by_speed[: world // 2]] += more
        counts[by_speed[::-1][: world // 2]] -= more
        if (counts < 0).any() or (counts > workers.most).any():
            continue
        total_s = _runs(part, workers, counts, few)[1]
        if total_s < best_s:
            best_s, best = total_s, counts
    return best


def proportional(mean: float, workers: Workers, samples: int) -> Ints:
    """Return each worker's number of samples in proportion to its speed, [W].

    Each sample, of cost `mean`, goes to the worker that would be the first to finish half of it,
    and that has fewer samples than its maximum, `Workers.most`.
    """
    return _proportional(workers.a * mean + workers.c, workers.b, workers.most, samples)


@compiled
def _proportional(each: Floats, b: Floats, most: Ints, samples: int) -> Ints:
    counts = np.zeros(len(each), np.int64)
    for _ in range(samples):
        least, to = np.inf, 0
        for j in range(len(each)):
            done = b[j] + (counts[j] + 0.5) * each[j]
            if done < least and counts[j] < most[j]:
                least, to = done, j
        counts[to] += 1
    return counts


def _runs(sizes: Floats, workers: Workers, counts: Ints, steps: int) -> tuple[Ints, float]:
    """Cut an epoch's samples, sorted by descending length, into bins of similar lengths.

    Return the position at which each bin starts, [steps, W], and the sum of the steps' times.
    `sizes` is descending, [steps · counts.sum()]. `counts` is each worker's number of samples in a
    step, [W].

    The time of a bin's step determines the maximum length of the samples that the bin can have. The
    bins are filled in descending sequence of this maximum. The resulting times of the steps then
    give new maxima; this is repeated `_RUN_PASSES` times.
    """
    used = counts > 0
    n, a = np.maximum(counts, 1), workers.a
    step_s = sizes[:: len(sizes) // steps][:steps] * float((a * counts).max())
    best_s, best = np.inf, np.empty((0, len(a)), np.int64)
    for _ in range(_RUN_PASSES):
        longest = (step_s[:, None] - workers.b - workers.c * counts) / (a * n)
        longest[:, ~used] = -np.inf
        turn = np.argsort(-longest.ravel(), kind="stable")
        number = np.tile(counts, steps)[turn]
        starts = np.empty((steps, len(a)), np.int64)
        starts.ravel()[turn] = np.minimum(np.cumsum(number) - number, len(sizes) - 1)
        time_s = np.where(used, a * n * sizes[starts] + workers.c * counts + workers.b, 0.0)
        slowest_s = time_s.max(axis=1)
        if slowest_s.sum() < best_s:
            best_s, best = float(slowest_s.sum()), starts
        step_s = (slowest_s + time_s.sum(axis=1) / used.sum()) / 2
    return best, best_s
