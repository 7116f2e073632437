"""Keeps samples on their nodes where this does not prolong any worker's work (CHRONICA)."""

from __future__ import annotations

import numpy as np

from paceline_backend.policies.solve.room import held
from paceline_backend.policies.values import Floats, Ints, Models, Problem


def kept_on_nodes(placement: Ints, problem: Problem, models: Models) -> Ints:
    """Return a placement in which fewer samples change their node, at no cost to the workers.

    A sample that goes from node A to node B is exchanged for a sample of similar size that goes
    from B to A, unless the longer work of their two workers would become longer, or a node has no
    room for the exchange (`Problem.storage`). The problem is the shuffler's, with `nodes`.
    """
    assert problem.nodes is not None
    nodes, sizes, placement = problem.nodes, problem.sizes, placement.copy()
    mine = placement[problem.remaining]
    load = np.bincount(mine, sizes[problem.remaining], models.world)
    work = models.a * load + models.c * np.bincount(mine, minlength=models.world)
    # All zero where storage does not matter.
    room = lengths = np.zeros(len(sizes), np.int64)
    if problem.storage is not None:
        lengths = problem.storage.lengths
        room = problem.storage.room - held(placement, nodes, problem.storage)
    off, to = nodes[problem.placement], nodes[placement]
    away = np.flatnonzero(off != to)
    off, to = off[away], to[away]
    for first in np.unique(nodes):
        for second in np.unique(nodes[nodes > first]):
            out = _largest_first(away[(off == first) & (to == second)], sizes)
            back = _largest_first(away[(off == second) & (to == first)], sizes)
            for one_way, other_way in zip(out.tolist(), back.tolist(), strict=False):
                # The bytes that the first node gains.
                more = lengths[one_way] - lengths[other_way]
                if more > max(room[first], 0) or -more > max(room[second], 0):
                    continue
                if _exchange(placement, work, (one_way, other_way), sizes, models):
                    room[first] -= more
                    room[second] += more
    return placement


def _largest_first(samples: Ints, sizes: Floats) -> Ints:
    return samples[np.argsort(-sizes[samples], kind="stable")]


def _exchange(
    placement: Ints, work: Floats, samples: tuple[int, int], sizes: Floats, models: Models
) -> bool:
    ranks = placement[list(samples)]
    more = sizes[samples[1]] - sizes[samples[0]]
    after = work[ranks] + models.a[ranks] * np.array([more, -more])
    if after.max() > work[ranks].max():
        return False
    placement[list(samples)] = ranks[::-1]
    work[ranks] = after
    return True
