"""Iterated local search: a better division of one batch than the exchanges of `balance` find.

The search takes too long for plans of a run's steps, so only `paceline.partition` uses it. Each
round moves or exchanges a few random samples and then lets the slowest rank exchange samples until
no exchange helps (`descend`). If the slowest rank then ends later than in the best division so far,
the round is undone; in a quarter of the rounds, only if it ends more than a tenth later. The random
numbers are always the same, so equal batches get equal divisions.
"""

from __future__ import annotations

import numpy as np

from paceline.policies.jit import compiled
from paceline.policies.solve.balance import DescentState, descend, hand_over, linked
from paceline.policies.solve.workers import Workers
from paceline.policies.values import Floats, Ints

# Maximum number of rounds, and about the maximum number of exchanges that all rounds together try.
_ROUNDS = 5_000
_EXCHANGES = 40_000_000
# Maximum number of random changes of a round.
_CHANGES = 6
# In this fraction of the rounds, the slowest rank may end later than in the best division so far,
# by the fraction `_WORSE`.
_WORSE_SHARE = 0.25
_WORSE = 0.1


def explore(costs: Floats, workers: Workers, ranks: Ints, enough: float) -> Ints:
    """Return a division whose slowest rank ends no later than under `ranks`, [n].

    Args:
        costs: cost f(λ) of each sample, [n].
        workers: models of the ranks' times, and their maximum numbers of samples; batches are not
            padded.
        ranks: rank of each sample, [n].
        enough: time of the slowest rank at which the search ends.
    """
    state = DescentState.of(costs, ranks.copy(), workers)
    rng = np.random.default_rng(0)
    draws = rng.integers(0, 2**31, (_ROUNDS, _CHANGES, 2))
    worse = np.where(rng.random(_ROUNDS) < _WORSE_SHARE, _WORSE, 0.0)
    return _rounds(state, enough, draws, rng.integers(1, _CHANGES + 1, _ROUNDS), worse)


@compiled
def _rounds(state: DescentState, enough: float, draws: Ints, changes: Ints, worse: Floats) -> Ints:
    world, samples = len(state.w.a), len(state.sizes)
    best_s, best = state.time_s.max(), state.ranks.copy()
    left, of_step = _EXCHANGES, samples * (1 + samples // world)
    for i in range(len(draws)):
        # `descend` may try about `of_step` exchanges before it checks how many are left.
        if best_s <= enough or left < of_step:
            break
        for change in draws[i, : changes[i]]:
            _change(change[0] % samples, change[1] % (samples + world), state)
        _recount(state)
        left = descend(state, enough, left)
        now_s = state.time_s.max()
        if now_s < best_s * (1 - 1e-12):
            best_s = now_s
            best[:] = state.ranks
        elif now_s > best_s * (1 + worse[i]):
            state.ranks[:] = best
            state.first[:], state.following[:] = linked(best, world)
            _recount(state)
    return best


@compiled
def _change(sample: int, other: int, state: DescentState) -> None:
    """Exchange two samples, or move one to another rank.

    `other` is the second sample or, if there are n samples, n + the number of the other rank.
    """
    giver, samples = state.ranks[sample], len(state.sizes)
    taker = other - samples if other >= samples else state.ranks[other]
    if taker == giver or state.w.most[taker] == 0:
        return
    if other < samples:
        hand_over(state.first, state.following, other, taker, giver)
        state.ranks[other] = giver
    elif state.number[taker] >= state.w.most[taker]:
        return
    else:
        state.number[giver] -= 1
        state.number[taker] += 1
    hand_over(state.first, state.following, sample, giver, taker)
    state.ranks[sample] = taker


@compiled
def _recount(state: DescentState) -> None:
    """Compute the ranks' times and numbers of samples anew."""
    w = state.w
    state.time_s[:] = 0.0
    state.number[:] = 0
    for i in range(len(state.ranks)):
        state.time_s[state.ranks[i]] += state.sizes[i]
        state.number[state.ranks[i]] += 1
    for j in range(len(w.a)):
        if state.number[j]:
            state.time_s[j] = w.a[j] * state.time_s[j] + w.c[j] * state.number[j] + w.b[j]
