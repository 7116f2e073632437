"""Finds the best partition of few samples among the workers by branch and bound."""

from __future__ import annotations

import numpy as np

from paceline_backend.policies.jit import compiled
from paceline_backend.policies.solve.workers import Workers
from paceline_backend.policies.values import Floats, Ints

# The most nodes of branch and bound (2 ms).
_NODES = 30_000


@compiled
def search(sizes: Floats, rest: Floats, w: Workers, goal: float, best: float, ranks: Ints) -> None:
    """Search depth first, largest sample first, at most `_NODES` nodes; improve `ranks` in place.

    `sizes` are descending, [n]; `rest` is the load of each sample and all after it, [n + 1]. `best`
    is the time of `ranks`, and the search ends at the lower bound `goal`.
    """
    samples, world = len(sizes), len(w.a)
    time_s, count = np.zeros(world), np.zeros(world, np.int64)
    chosen = np.full(samples, -1)
    # The chosen rank's time without the sample.
    before = np.zeros(samples)
    i, nodes = 0, 0
    while i >= 0 and nodes < _NODES and best > goal * (1 + 1e-12):
        last = chosen[i]
        tried_s = -1.0
        if last >= 0:
            tried_s = time_s[last]
            time_s[last] = before[i]
            count[last] -= 1
        least_s, rank = best * (1 - 1e-12), -1
        # Find the next rank in order of (time, rank).
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
    """Return True if an earlier rank is in the same state, so that this rank is useless."""
    for k in range(j):
        equal = time_s[k] == time_s[j] and count[k] == count[j] and w.most[k] == w.most[j]
        if equal and w.a[k] == w.a[j] and w.c[k] == w.c[j] and w.b[k] == w.b[j]:
            return True
    return False
