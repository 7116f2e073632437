"""Whether a shard yields its samples in the same order each time that it is opened.

Ranks that share a shard keep its samples by their numbers. If a source shuffles within a shard,
each reading has other numbers: some samples are lost, and others are trained twice. Who reads a
part of a shard sees all its samples, so two readings can be compared.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Any, NamedTuple

_BITS = 64


class ShardOrder(NamedTuple):
    """What one reading of a shard saw. Equal words say that two readings are alike."""

    shard: int  # its place in the epoch's order
    name: str
    word: str  # how many samples, and a digest of each order and of none


class Seen:
    """What a reading has seen so far.

    Samples are compared by their pickles. Where these differ from reading to reading, as after
    random augmentation, or where samples cannot be pickled, nothing can be said of the order.
    """

    def __init__(self) -> None:
        self._samples, self._together = 0, 0
        self._in_order = hashlib.blake2b(digest_size=_BITS // 8)

    def add(self, sample: Any) -> None:
        """Takes in the next sample."""
        try:
            pickled = pickle.dumps(sample)
        except Exception:  # a sample's own __reduce__ may raise anything
            pickled = b""
        digest = hashlib.blake2b(pickled, digest_size=_BITS // 8).digest()
        self._samples += 1
        self._together = (self._together + int.from_bytes(digest)) % 2**_BITS
        self._in_order.update(digest)

    def order(self, shard: int, name: str) -> ShardOrder:
        """What was seen of a shard."""
        return ShardOrder(
            shard, name, f"{self._samples} {self._together:x} {self._in_order.hexdigest()}"
        )


def difference(word: str, other: str) -> str:
    """How two readings of a shard differ, so that samples are lost; empty: as far as known, not.

    Args:
        word: of the first `ShardOrder`.
        other: of the second.
    """
    samples, together, in_order = word.split()
    other_samples, other_together, other_in_order = other.split()
    if samples != other_samples:
        return f"yields {samples} samples when opened, and {other_samples} when opened again"
    if together == other_together and in_order != other_in_order:
        return "yields its samples in another order when opened again"
    return ""
