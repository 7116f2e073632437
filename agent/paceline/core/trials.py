"""Sizes of the trial batches that a profile times before training (paper LBB, Alg. 1).

Ranks time them (`paceline.train.profile`), and so does the simulator for its workers.
"""

from __future__ import annotations

# Number of timings of each batch size, whose median is used.
TIMINGS = 3


def trial_sizes(most: int) -> list[int]:
    """Return the numbers of samples to time: 2, 4, 8, … and `most`."""
    return [min(2**k, most) for k in range(1, max(most - 1, 1).bit_length() + 1)]


def equal_share(global_batch: int, world: int) -> int:
    """Return the samples of the largest local batch if a step is split equally."""
    return -(-global_batch // world)


def most_samples(global_batch: int, world: int, limit: int | None) -> int:
    """Return the largest number of samples that a run which begins under LBB times on a rank.

    It is twice an equal share of a step, but not above the rank's memory limit, `limit`.
    """
    most = min(global_batch, 2 * equal_share(global_batch, world))
    return most if limit is None else min(most, limit)
