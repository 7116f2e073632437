"""Order of an epoch's samples, as PyTorch draws it, without importing PyTorch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from paceline.policies.jit import compiled
from paceline.policies.values import Ints

# torch.randperm draws 32 bits for each swap if a permutation is shorter than this, else 64 bits.
_LONGEST_32_BIT = (2**32 - 1) // 20


@lru_cache(maxsize=4)
def epoch_order(n: int, seed: int, epoch: int) -> Ints:
    """Return the permutation of an epoch, [n], as ``DistributedSampler`` draws it.

    The result equals ``torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))``:
    Mersenne Twister seeded with the low 32 bits, 32-bit draws, Fisher-Yates from the front. The
    cached array is read-only.

    Raises:
        ValueError: PyTorch draws permutations of this length in another way.
    """
    if n >= _LONGEST_32_BIT:
        raise ValueError(f"n: {n} samples; epoch_order handles fewer than {_LONGEST_32_BIT}")
    swaps = max(n - 1, 0)
    generator = np.random.MT19937()
    generator._legacy_seeding((seed + epoch) & 0xFFFFFFFF)
    here = np.arange(swaps)
    there = generator.random_raw(swaps).astype(np.int64) % (n - here) + here
    result = _swapped(there, n)
    result.setflags(write=False)
    return result


@compiled
def _swapped(there: Ints, n: int) -> Ints:
    order = np.arange(n)
    for i in range(len(there)):
        order[i], order[there[i]] = order[there[i]], order[i]
    return order


def remaining_in_order(n: int, seed: int, epoch: int, remaining: Ints) -> Ints:
    """Return the remaining samples of an epoch in the epoch's order, [R]."""
    order = epoch_order(n, seed, epoch)
    if len(remaining) == n:
        return order
    left = np.zeros(n, bool)
    left[remaining] = True
    return order[left[order]]
