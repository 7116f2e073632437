"""Keeps samples on their nodes where that makes no worker's work longer."""

from __future__ import annotations

import numpy as np

from paceline_backend.policies.solve.room import held
from paceline_backend.policies.values import Floats, Ints, Models, Problem


def kept_on_nodes(placement: Ints, problem: Problem, models: Models) -> Ints:
    """A placement with fewer samples that change their node, and no longer work of any pair.

    A sample that goes from node A to node B changes places with a sample of about its size that
    goes from B to A, unless the longer work of their two workers would become longer, or a node has
    no room for that (`Problem.storage`).

    Args:
        placement: where a shuffler wants the samples, [N] ranks.
        problem: of the shuffler; with `nodes`.
        models: of the workers.
    """
    assert problem.nodes is not None
    nodes, sizes, placement = problem.nodes, problem.sizes, placement.copy()
    mine = placement[problem.remaining]
    load = np.bincount(mine, sizes[problem.remaining], models.world)
    work = models.a * load + models.c * np.bincount(mine, minlength=models.world)
    room = lengths = np.zeros(len(sizes), np.int64)  # where storage does not matter
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
                more = lengths[one_way] - lengths[other_way]  # bytes that the first then has
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
    """Lets two samples change places, unless that makes the longer work longer."""
    ranks = placement[list(samples)]
    more = sizes[samples[1]] - sizes[samples[0]]
    after = work[ranks] + models.a[ranks] * np.array([more, -more])
    if after.max() > work[ranks].max():
        return False
    placement[list(samples)] = ranks[::-1]
    work[ranks] = after
    return True
