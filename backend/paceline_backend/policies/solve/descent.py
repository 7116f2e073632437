"""Improves a partition: the slowest worker exchanges samples with others until no exchange helps.

`balance` (for many ranks) and `grid` call `pairs`, and then `descend`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline_backend.policies.jit import compiled
from paceline_backend.policies.solve.workers import Workers
from paceline_backend.policies.values import Floats, Ints


class DescentState(NamedTuple):
    """A partition that is being improved; each rank's samples are a linked list that ends with -1.

    `first` is the first sample of each rank, `following` the next sample of the same rank, and
    `number` the number of samples of each rank.
    """

    ranks: Ints  # [n]
    first: Ints  # [W]
    following: Ints  # [n]
    time_s: Floats  # [W]
    number: Ints  # [W]

    @staticmethod
    def of(sizes: Floats, ranks: Ints, workers: Workers) -> DescentState:
        """Return the state of a partition; `ranks` is then changed in place."""
        world = len(workers.a)
        count = np.bincount(ranks, minlength=world)
        load = np.bincount(ranks, sizes, minlength=world)
        time_s = workers.a * load + workers.c * count + workers.b
        first, following = linked(ranks, world)
        return DescentState(ranks, first, following, np.where(count > 0, time_s, 0.0), count)


@compiled
def linked(ranks: Ints, world: int) -> tuple[Ints, Ints]:
    """Return linked lists: each rank's first sample, each sample's next sample; -1 ends."""
    first = np.full(world, -1)
    following = np.full(len(ranks), -1)
    for i in range(len(ranks) - 1, -1, -1):
        following[i] = first[ranks[i]]
        first[ranks[i]] = i
    return first, following


@compiled
def hand_over(first: Ints, following: Ints, sample: int, giver: int, taker: int) -> None:
    """Move a sample from one rank's linked list to another's; see `linked`."""
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
    p: int, q: int, sizes: Floats, w: Workers, state: DescentState, best: float
) -> tuple[float, int, int]:
    """Find the best exchange between p and q after which both take less than `best`.

    Return the time of the slower rank, p's sample (-1: no exchange helps), q's sample (-1: none).
    """
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
def _apply(
    p: int, q: int, give: int, get: int, sizes: Floats, w: Workers, state: DescentState
) -> None:
    hand_over(state.first, state.following, give, p, q)
    state.ranks[give] = q
    if get >= 0:
        hand_over(state.first, state.following, get, q, p)
        state.ranks[get] = p
    else:
        state.number[p] -= 1
        state.number[q] += 1
    # Compute the sums again: adding differences would accumulate rounding errors.
    for j in (p, q):
        total, i = 0.0, state.first[j]
        while i >= 0:
            total += sizes[i]
            i = state.following[i]
        count = state.number[j]
        state.time_s[j] = w.a[j] * total + w.c[j] * count + w.b[j] if count else 0.0


def pairs(sizes: Floats, workers: Workers, state: DescentState, enough: float) -> None:
    """Exchange slowest with fastest, next slowest with next fastest, …, while this helps."""
    slowest = np.inf
    while True:
        order = np.argsort(state.time_s, kind="stable")
        most_s = float(state.time_s[order[-1]])
        if most_s <= enough or most_s - enough > 0.9 * (slowest - enough):
            break
        slowest = most_s
        _paired(order, sizes, workers, state, enough)


@compiled
def _paired(order: Ints, sizes: Floats, w: Workers, state: DescentState, enough: float) -> None:
    for k in range(len(order) // 2):
        p, q = order[len(order) - 1 - k], order[k]
        if state.time_s[p] <= enough:
            break
        _, give, get = _exchange(p, q, sizes, w, state, state.time_s[p])
        if give >= 0:
            _apply(p, q, give, get, sizes, w, state)


@compiled
def descend(sizes: Floats, w: Workers, state: DescentState, enough: float, effort: int) -> None:
    """Apply the slowest rank's best exchange, or the first that suffices, while one helps."""
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
            # No exchange brings both ranks below the time at which they would end together.
            together = (least_p * w.a[q] + state.time_s[q] * w.a[p]) / (w.a[p] + w.a[q])
            if q != p and state.time_s[q] < best and together < best and w.most[q] > 0:
                slower_s, x, y = _exchange(p, q, sizes, w, state, best)
                if x >= 0:
                    best, give, get, taker = slower_s, x, y, q
                    if best <= enough:
                        break
        if taker == p:
            break
        _apply(p, taker, give, get, sizes, w, state)
