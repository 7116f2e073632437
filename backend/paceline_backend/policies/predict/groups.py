"""RNA's groups of ranks of about the same speed, from what steps took them."""

from __future__ import annotations

import numpy as np

from paceline_backend.policies.base import Floats, Ints


def groups(times: Floats, spread: float = 1.0) -> list[list[int]]:
    """Ranks of about the same speed together (RNA, Sec. 4).

    Where the slowest rank takes longer than the fastest by more than the mean, those above the mean
    are one group and the others another; and again in each of them.

    Args:
        times: what a step takes each rank on average, s, [W], > 0.
        spread: what part of the mean that difference may be; RNA: all of it.

    Returns:
        the groups, each with its ranks in order, by their first rank.
    """
    return sorted(sorted(ranks.tolist()) for ranks in _split(times, np.arange(len(times)), spread))


def _split(times: Floats, ranks: Ints, spread: float) -> list[Ints]:
    mine = times[ranks]
    slow = mine > mine.mean()
    # (Without a slow one all are equal, but for how the mean is rounded.)
    if np.ptp(mine) <= spread * mine.mean() or not slow.any():
        return [ranks]
    return _split(times, ranks[~slow], spread) + _split(times, ranks[slow], spread)


def step_times(compute_s: Floats, samples: Ints) -> Floats:
    """What a step took each rank on average, s, [W].

    Steps without samples do not count; a rank that had none in all of them is as fast as the mean.

    Args:
        compute_s: [S, W].
        samples: [S, W].
    """
    worked = samples > 0
    total = np.where(worked, compute_s, 0.0).sum(axis=0)
    count = worked.sum(axis=0)
    mean = total.sum() / max(int(count.sum()), 1)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), mean))
