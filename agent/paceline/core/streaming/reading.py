"""The shards of a stream's source that a rank reads, and the order in which they yield samples.

Each shard has `PARTS` parts. Ranks share one number, which they change by compare-and-set: the
number of claimed parts. A rank claims the next data (`ShardClaims`) when its buffer has room. At
first it claims whole shards. Towards the end it claims fewer parts at once, in proportion to its
share of the samples. So no slow rank begins a shard that it would still be reading after the others
have finished. Several ranks then read the same shard, and each keeps only the samples of its own
parts.

Ranks that share a shard select its samples by number. If a source shuffles within a shard, samples
have other numbers in each reading: some are lost, and others are trained twice. A rank that reads a
part of a shard sees all samples of the shard (`SeenSamples`), so two readings of a shard can be
compared (`difference`).
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

# Number of parts of a shard: sample i is in part i % PARTS.
PARTS = 8
# A rank's share of the unclaimed parts, times this fraction, is the maximum that it claims at once.
_FAIR = 0.5
_BITS = 64


class Claim(NamedTuple):
    """The data that a rank reads next: parts [first, end) of a shard."""

    shard: int
    first: int
    end: int

    def has(self, sample: int) -> bool:
        """Return True if the claim includes the shard's sample of this number."""
        return self.first <= sample % PARTS < self.end


def next_claim(claimed: int, shards: int, share: float) -> Claim | None:
    """Return a rank's next claim; None if no part is left to claim.

    `claimed` parts of the shards are claimed already. The rank trains `share` of the samples.
    """
    left = shards * PARTS - claimed
    if left <= 0:
        return None
    shard, first = divmod(claimed, PARTS)
    most = PARTS - first
    return Claim(shard, first, first + max(1, min(most, int(left * share * _FAIR))))


class ShardClaims:
    """The claims of one rank in an epoch.

    Args:
        read: a function that returns the text that the ranks' store holds about the epoch's claims;
            empty: nothing is claimed yet.
        change: a function of an expected and a new text. It replaces the stored text if that is as
            expected, and returns the text that is stored afterwards.
        rank: this rank. The number is part of the text that the rank stores, so that the texts of
            two ranks differ.
    """

    def __init__(
        self, read: Callable[[], str], change: Callable[[str, str], str], rank: int
    ) -> None:
        self._read, self._change, self._rank = read, change, rank
        self._tries = 0

    def take(self, shards: int, share: float) -> Claim | None:
        """Claim the data that this rank reads next; None if nothing is left. See `next_claim`."""
        word = self._read()
        while True:
            claimed = int(word.split()[0]) if word else 0
            claim = next_claim(claimed, shards, share)
            if claim is None:
                return None
            self._tries += 1
            wanted = f"{claimed + claim.end - claim.first} {self._rank} {self._tries}"
            word = self._change(word, wanted)
            if word == wanted:
                return claim


class ShardOrder(NamedTuple):
    """The number and order of the samples that one reading of a shard has seen."""

    # Position of the shard in the epoch's order.
    shard: int
    name: str
    # Number of samples, and two digests: one that depends on the order, and one that does not.
    word: str


class SeenSamples:
    """The samples that one reading of a shard has seen so far.

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
        """Return the order in which this reading has seen the samples of a shard."""
        return ShardOrder(
            shard, name, f"{self._samples} {self._together:x} {self._in_order.hexdigest()}"
        )


def difference(word: str, other: str) -> str:
    """Describe how two readings of a shard differ.

    Return an empty text if the readings agree, or if their samples cannot be compared. The
    arguments are the fields `word` of two `ShardOrder`.
    """
    samples, together, in_order = word.split()
    other_samples, other_together, other_in_order = other.split()
    if samples != other_samples:
        return f"yields {samples} samples when opened, and {other_samples} when opened again"
    if together == other_together and in_order != other_in_order:
        return "yields its samples in another order when opened again"
    return ""
