"""Divides ranks into groups of about the same speed, as RNA does, from the times of their steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline_backend.policies.values import LEAST, Floats, Ints


def groups(times: Floats, spread: float = 1.0) -> list[list[int]]:
    """Return groups of ranks of about the same speed (RNA, Sec. 4), in order of their first rank.

    If the slowest rank's time exceeds the fastest rank's by more than the mean, the ranks above the
    mean become one group and the other ranks another. Both groups are divided in the same way.

    `times` are the mean times of each rank's step, s, [W], > 0. `spread` is the largest difference
    within a group, relative to the mean; RNA: 1.
    """
    return sorted(sorted(ranks.tolist()) for ranks in _split(times, np.arange(len(times)), spread))


def of_nodes(nodes: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node as groups, given the number of each rank's node, [W]."""
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return list(ranks.values())


def _split(times: Floats, ranks: Ints, spread: float) -> list[Ints]:
    mine = times[ranks]
    slow = mine > mine.mean()
    # No rank is slow if all times are equal, up to rounding of the mean.
    if np.ptp(mine) <= spread * mine.mean() or not slow.any():
        return [ranks]
    return _split(times, ranks[~slow], spread) + _split(times, ranks[slow], spread)


def step_times(compute_s: Floats, samples: Ints) -> Floats:
    """Return the mean time of each rank's step, s, [W], from arrays [S, W].

    Steps without samples, or without a time, do not count. A rank that has only such steps gets the
    overall mean.
    """
    worked = (samples > 0) & (compute_s > LEAST)
    total = np.where(worked, compute_s, 0.0).sum(axis=0)
    count = worked.sum(axis=0)
    mean = total.sum() / max(int(count.sum()), 1)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), mean))
