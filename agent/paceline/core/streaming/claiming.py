"""The shards of a stream's source that a rank reads: it claims the next one when it has room.

Ranks share one number, which they change by compare-and-set: how many parts of shards are claimed.
At first a rank claims whole shards. Towards the end it claims fewer parts at once, by its share of
the samples, so that no slow rank begins a shard that keeps it busy when the others have finished.
Several ranks then read the same shard, and each keeps its own parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# Number of parts of a shard: sample i is in part i % PARTS.
PARTS = 8
# Fraction of a rank's share of the unclaimed parts that it may claim at once.
_FAIR = 0.5


class Claim(NamedTuple):
    """The next data that a rank reads: parts [first, end) of a shard."""

    shard: int
    first: int
    end: int

    def has(self, sample: int) -> bool:
        """Return True if the shard's sample of this number is in these parts."""
        return self.first <= sample % PARTS < self.end


def next_claim(claimed: int, shards: int, share: float) -> Claim | None:
    """Return a rank's next claim; None if nothing is left.

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
        read: reads the shared text; empty: nothing is claimed.
        change: replaces an expected text by another one; returns the text that is stored then.
        rank: this rank. It is part of the rank's texts, so that they differ from those of others.
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
