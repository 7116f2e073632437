"""Reads a stream as one member of a consumer group, so that no entry is lost with a member."""

from __future__ import annotations

import time
from typing import Any

import redis

Entry = tuple[bytes, dict[bytes, bytes]]


class Consumer:
    """One member of a group. Not thread-safe: it shares its client's connection.

    Entries stay the member's until acknowledged (XACK): `read` returns them again after `reset`,
    and another member takes them over once they lay for `claim_idle_s`.

    Args:
        client: bytes in, bytes out; its timeout must be longer than `read` blocks.
        stream: to read.
        group: made, from the stream's start, when it does not exist (any more).
        name: of this member; unique among those that run, and better the same after a restart.
        claim_idle_s: after which time a member that acknowledges nothing counts as dead.
    """

    def __init__(
        self, client: redis.Redis, stream: str, group: str, name: str, claim_idle_s: float = 10.0
    ) -> None:
        self._client = client
        self._stream = stream
        self._group = group
        self._name = name
        self._claim_idle_s = claim_idle_s
        self._claim_from: bytes = b"0-0"
        self.reset()

    def reset(self) -> None:
        """Starts over: own unacknowledged entries, then those of dead members, then new ones."""
        self._own_after: bytes | None = b"0"
        self._claim_at = 0.0

    def read(self, count: int, block_s: float) -> list[Entry]:
        """The next entries, at most `count`; empty when none came within `block_s`.

        Raises:
            redis.RedisError: the bus is away; call `reset` before the next read.
        """
        try:
            return self._own(count) or self._claimed(count) or self._new(count, block_s)
        except redis.ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
        self._make_group()  # the first member ever, or the bus lost its data
        return []

    def _own(self, count: int) -> list[Entry]:
        if self._own_after is None:
            return []
        entries = self._read_group(self._own_after, count, None)
        self._own_after = entries[-1][0] if entries else None
        return self._present(entries)

    def _claimed(self, count: int) -> list[Entry]:
        if time.monotonic() < self._claim_at:
            return []
        reply: Any = self._client.xautoclaim(
            self._stream,
            self._group,
            self._name,
            int(self._claim_idle_s * 1000),
            self._claim_from,
            count,
        )
        self._claim_from = bytes(reply[0])
        if self._claim_from == b"0-0":  # seen all
            self._claim_at = time.monotonic() + self._claim_idle_s
        return list(reply[1])

    def _new(self, count: int, block_s: float) -> list[Entry]:
        return self._read_group(b">", count, max(1, int(block_s * 1000)))

    def _read_group(self, after: bytes, count: int, block_ms: int | None) -> list[Entry]:
        reply: Any = self._client.xreadgroup(
            self._group, self._name, {self._stream: after}, count, block_ms
        )
        return list(reply[0][1]) if reply else []

    def _present(self, entries: list[Entry]) -> list[Entry]:
        """Without entries that were deleted meanwhile; they would stay pending for ever."""
        if gone := [number for number, fields in entries if not fields]:
            self._client.xack(self._stream, self._group, *gone)
        return [(number, fields) for number, fields in entries if fields]

    def _make_group(self) -> None:
        try:
            self._client.xgroup_create(self._stream, self._group, id="0", mkstream=True)
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):  # another member was quicker
                raise
