"""Who computes which samples of a global batch where each local batch is padded to its longest.

T_j = a_j·n_j·f(longest_j) + c_j·n_j + b_j. In the best partition of equal workers each gets a run
of the batch in order of length: so the batch is sorted and cut. With other workers too, with the
question of who gets which run: a table over how many of each kind of worker got one answers it for
two kinds (it is exact), and some orders are tried for more.
"""

from __future__ import annotations

import numpy as np

from paceline_backend.policies._base import Floats, Ints, Models
from paceline_backend.policies._jit import compiled

_HALVINGS = 40


def partition_padded(effective: Floats, models: Models, most: Ints, exact: bool) -> Ints:
    """The rank of each sample, [n].

    Args:
        effective: f(λ) of each sample, [n].
        models: of the workers.
        most: samples that each worker may get, [W].
        exact: each gets just so many.
    """
    order = np.argsort(-effective, kind="stable")
    descending = effective[order]
    ranks = np.empty(len(effective), np.int64)
    if not len(effective):
        return ranks
    best_s = np.inf
    for turn in _turns(models, most):
        arguments = (descending, turn, models.a, models.c, models.b, most)
        counts = most[turn] if exact else _cut(*arguments)
        time_s = _slowest(descending, turn, counts, models.a, models.c, models.b)
        if time_s < best_s:
            best_s = time_s
            ranks[order] = np.repeat(turn, counts)
    return ranks


def compose_padded(effective: Floats, global_batch: int, rng: np.random.Generator) -> Ints:
    """An order of the samples in which those of a step are about equally long, [R].

    Steps come in random order, but a smaller last one stays last.
    """
    order = np.argsort(-effective, kind="stable")
    steps, rest = divmod(len(order), global_batch)
    at = int(rng.integers(steps + 1)) * global_batch
    last = order[at : at + rest]
    full = np.concatenate([order[:at], order[at + rest :]]).reshape(steps, global_batch)
    return np.concatenate([full[rng.permutation(steps)].ravel(), last])


def _turns(models: Models, most: Ints) -> list[Ints]:
    """Orders of the ranks, the one with the longest samples first."""
    speed = np.lexsort((most, models.b, models.a))
    return [speed, speed[::-1].copy(), np.argsort(-most, kind="stable")]


@compiled
def _slowest(sizes: Floats, turn: Ints, counts: Ints, a: Floats, c: Floats, b: Floats) -> float:
    slowest, at = 0.0, 0
    for k in range(len(turn)):
        j = turn[k]
        if counts[k]:
            slowest = max(slowest, a[j] * counts[k] * sizes[at] + c[j] * counts[k] + b[j])
        at += counts[k]
    return slowest


@compiled
def _fill(
    sizes: Floats, turn: Ints, a: Floats, c: Floats, b: Floats, most: Ints, time_s: float
) -> Ints:
    """How many samples each rank in turn takes within a time."""
    counts = np.zeros(len(turn), np.int64)
    at = 0
    for k in range(len(turn)):
        if at == len(sizes):
            break
        j = turn[k]
        each = max(a[j] * sizes[at] + c[j], 1e-300)
        fits = min(max((time_s - b[j]) / each, 0.0), len(sizes) - at)
        counts[k] = min(int(fits), most[j])
        at += counts[k]
    return counts


@compiled
def _cut(sizes: Floats, turn: Ints, a: Floats, c: Floats, b: Floats, most: Ints) -> Ints:
    """Counts of the ranks in turn for the least time in which all samples are taken."""
    low, high = 0.0, 0.0
    for j in range(len(a)):
        if most[j]:
            high = max(high, a[j] * sizes[0] * len(sizes) + c[j] * len(sizes) + b[j])
    high *= 1 + 1e-9
    best = _fill(sizes, turn, a, c, b, most, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        counts = _fill(sizes, turn, a, c, b, most, middle)
        if counts.sum() == len(sizes):
            best, high = counts, middle
        else:
            low = middle
    return best
