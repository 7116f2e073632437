"""Detection of shards that yield their samples in a different order each time they are opened.

Ranks that share a shard select its samples by number. If a source shuffles within a shard, each
reading has other numbers: some samples are lost, and others are trained twice. A rank that reads a
part of a shard sees all its samples, so two readings can be compared.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Any, NamedTuple

_BITS = 64


class ShardOrder(NamedTuple):
    """The result of one reading of a shard. Equal words mean that two readings are alike."""

    # Position of the shard in the epoch's order.
    shard: int
    name: str
    # Number of samples, and two digests: one that depends on the order, and one that does not.
    word: str


class SeenSamples:
    """The samples that a reading has seen so far.

    Samples are compared by their pickles. If pickles differ from reading to reading, as after
    random augmentation, or if samples cannot be pickled, the order remains unknown.
    """

    def __init__(self) -> None:
        self._samples, self._together = 0, 0
        self._in_order = hashlib.blake2b(digest_size=_BITS // 8)

    def add(self, sample: Any) -> None:
        """Add the next sample."""
        try:
            pickled = pickle.dumps(sample)
        # A sample's own __reduce__ may raise any error.
        except Exception:
            pickled = b""
        digest = hashlib.blake2b(pickled, digest_size=_BITS // 8).digest()
        self._samples += 1
        self._together = (self._together + int.from_bytes(digest)) % 2**_BITS
        self._in_order.update(digest)

    def order(self, shard: int, name: str) -> ShardOrder:
        """Return the result of the reading."""
        return ShardOrder(
            shard, name, f"{self._samples} {self._together:x} {self._in_order.hexdigest()}"
        )


def difference(word: str, other: str) -> str:
    """Describe how two readings of a shard differ; empty if no samples are known to be lost.

    The arguments are the words of two `ShardOrder`.
    """
    samples, together, in_order = word.split()
    other_samples, other_together, other_in_order = other.split()
    if samples != other_samples:
        return f"yields {samples} samples when opened, and {other_samples} when opened again"
    if together == other_together and in_order != other_in_order:
        return "yields its samples in another order when opened again"
    return ""
