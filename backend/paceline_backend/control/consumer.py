"""Reader of streams as one member of a consumer group: if a member dies, no entry is lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import redis

# Idle time after which other members claim an entry. It is short, because a controller that takes
# over a run needs the entries that the dead worker had read.
CLAIM_IDLE_S = 2.0
MOST_BATCH_BYTES = 8 * 2**20

_CLAIM_EVERY_S = 0.5
# Each stream may contribute at least this many entries to a batch, however many streams there are.
_LEAST_PER_STREAM = 8
# An entry counts as this many bytes larger than its values.
_OVERHEAD = 64  # bytes
# Maximum number of entries in a batch's first read. It is low, because the sizes of the entries are
# still unknown.
_FIRST_READ = 500  # entries
# A batch that is not full waits this long for more entries. Ranks end a step at the same time, so
# their entries arrive within milliseconds, and one batch for all of them is cheaper than several.
_LINGER_S = 0.003


class Entry(NamedTuple):
    """Entry of a stream. `number` is the entry's ID on the stream.

    The stream identifies the writer, because each node and run may write only to its own stream.
    """

    stream: str
    number: bytes
    fields: dict[bytes, bytes]


class Consumer:
    """One member of a consumer group. Not thread-safe: it shares its client's connection.

    Entries belong to the member until it acknowledges them (XACK): `read` returns them again after
    `reset`, and another member claims them once they have been idle for `claim_idle_s`.

    Streams are read fairly. Each stream has an equal quota of a batch. If some streams have fewer
    entries, streams with more entries than their quota share the rest of the batch. So a flooded
    stream does not delay others. The sizes of entries are unknown before they are read. So the
    first read of the first batch, and of the first batch after `reset`, gets one entry of each
    stream. The first read of each later batch gets up to twice as many entries as that of the batch
    before, but no more than fill half of a batch's bytes if all are as large as the largest entry
    of the batch before. Streams with large entries contribute fewer entries.

    Args:
        client: client of the bus that returns bytes, not strings. Its timeout must be longer than
            the time for which `read` blocks.
        group: name of the group. On a stream where it does not exist (or no longer exists), it is
            created at the start of the stream.
        name: name of this member, unique among running members. It should be the same after a
            restart.
        claim_idle_s: idle time after which a member that acknowledges nothing counts as dead.
    """

    def __init__(
        self,
        client: redis.Redis,
        streams: Iterable[str],
        group: str,
        name: str,
        claim_idle_s: float = CLAIM_IDLE_S,
    ) -> None:
        self._client = client
        self._group = group
        self._name = name
        self._claim_idle_s = claim_idle_s
        self._streams: list[str] = []
        # By stream that may have unacknowledged entries of this member: the position after which
        # `read` continues with them. New entries of any stream are read after them.
        self._own_after: dict[str, bytes] = {}
        self._claim_from: dict[str, bytes] = {}
        self._claim_at = 0.0
        self._kept: set[tuple[str, bytes]] = set()
        # Maximum number of entries of the next read, unless there are more streams than that.
        self._first = 1
        # True if the last read returned entries that had been delivered before.
        self.repeated = False
        # Streams that may hold more entries than the last batch took.
        self.unread: set[str] = set()
        self.follow(streams)

    def follow(self, streams: Iterable[str]) -> None:
        """Read only these streams from now on."""
        wanted = list(dict.fromkeys(streams))
        new = set(wanted) - set(self._streams)
        self._streams = wanted
        self._own_after = {
            stream: after for stream, after in self._own_after.items() if stream in set(wanted)
        } | dict.fromkeys(new, b"0")
        # A stream that no longer exists has no group, so each XAUTOCLAIM on it would fail.
        self._claim_from = {
            stream: at for stream, at in self._claim_from.items() if stream in set(wanted)
        }

    def reset(self) -> None:
        """Start over: read unacknowledged entries before new ones, this member's own first."""
        self._own_after = dict.fromkeys(self._streams, b"0")
        self._claim_from = {}
        self._claim_at = 0.0
        self._kept = set()
        self._first = 1

    def read(self, count: int, block_s: float, most_bytes: int = MOST_BATCH_BYTES) -> list[Entry]:
        """Return the next entries, or an empty list if none arrived within `block_s`.

        After a `redis.RedisError`, call `reset` before the next read.

        Args:
            count: maximum number of entries, unless there are more streams than that.
            block_s: longest wait, in seconds.
            most_bytes: reading ends once the entries have this size. The batch can be larger: the
                first entries are read without knowing their size, and each further read at most
                doubles their number.
        """
        # New entries are read last. Until they have been read, every stream may hold some.
        self.unread = set(self._streams)
        try:
            first = min(count, self._first)
            left = self._own(first) or self._claimed(first)
            self.repeated = bool(left)
            entries = left or self._new(count, block_s, most_bytes)
            largest = max(map(_size, entries), default=1)
            self._first = max(1, min(_FIRST_READ, 2 * self._first, most_bytes // (2 * largest)))
            return entries
        except redis.ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
        # A stream has no group, because the group or the stream is new, or the bus lost its data.
        self._make_groups()
        return []

    def keep(self, entries: Iterable[Entry]) -> set[tuple[str, bytes]]:
        """Renew this member's claim on entries that it has read and not acknowledged yet.

        Call this before each `read`. Without it, another member claims entries that have been idle
        for `claim_idle_s`. The next `read` does not return the given entries, however late that
        call is.

        Returns:
            Streams and numbers of the entries that still exist. Another member may have handled
            the other entries while this member was stuck.
        """
        numbers: dict[str, list[bytes]] = {}
        for entry in entries:
            numbers.setdefault(entry.stream, []).append(entry.number)
        pipeline = self._client.pipeline(transaction=False)
        for stream, of_stream in numbers.items():
            ids: Any = of_stream
            pipeline.xclaim(stream, self._group, self._name, 0, ids, justid=True)
        replies = zip(numbers, pipeline.execute(), strict=True)
        self._kept = {(stream, bytes(number)) for stream, reply in replies for number in reply}
        return self._kept

    def often(self, entries: Iterable[Entry], times: int) -> dict[tuple[str, bytes], int]:
        """Return the delivery counts of entries that were delivered at least `times` times.

        The keys are stream and number. Only this member's entries count.
        """
        spans: dict[str, list[bytes]] = {}
        for entry in entries:
            spans.setdefault(entry.stream, []).append(entry.number)
        pipeline = self._client.pipeline(transaction=False)
        for stream, numbers in spans.items():
            first, last = min(numbers, key=_place), max(numbers, key=_place)
            pipeline.xpending_range(stream, self._group, first, last, 2 * _FIRST_READ, self._name)
        replies: Any = zip(spans, pipeline.execute(), strict=True)
        return {
            (stream, bytes(pending["message_id"])): int(pending["times_delivered"])
            for stream, reply in replies
            for pending in reply
            if pending["times_delivered"] >= times
        }

    def _own(self, count: int) -> list[Entry]:
        if not self._own_after:
            return []
        entries = self._read_group(self._own_after, self._part(count), None)
        # If the answer has no entry of a stream, no unacknowledged entry is left on it.
        self._own_after = {entry.stream: entry.number for entry in entries}
        return self._present(entries)

    def _claimed(self, count: int) -> list[Entry]:
        if time.monotonic() < self._claim_at:
            return []
        pipeline = self._client.pipeline(transaction=False)
        streams = list(self._claim_from) or self._streams
        for stream in streams:
            pipeline.xautoclaim(
                stream,
                self._group,
                self._name,
                int(self._claim_idle_s * 1000),
                self._claim_from.get(stream, b"0-0"),
                self._part(count),
            )
        replies: list[Any] = pipeline.execute()
        positions = {
            stream: bytes(reply[0]) for stream, reply in zip(streams, replies, strict=True)
        }
        self._claim_from = {stream: at for stream, at in positions.items() if at != b"0-0"}
        # All streams were scanned to their end.
        if not self._claim_from:
            self._claim_at = time.monotonic() + min(_CLAIM_EVERY_S, self._claim_idle_s)
        return [
            Entry(stream, number, fields)
            for stream, reply in zip(streams, replies, strict=True)
            for number, fields in reply[1]
            if (stream, number) not in self._kept
        ]

    def _new(self, count: int, block_s: float, most_bytes: int) -> list[Entry]:
        part = self._part(min(count, self._first))
        new = dict.fromkeys(self._streams, b">")
        entries = self._read_group(new, part, max(1, int(block_s * 1000)))
        if entries and not _full(entries, part):
            time.sleep(_LINGER_S)
            entries += self._read_group(new, part, None)
        full = _full(entries, part)
        counts, sizes = Counter[str](), Counter[str]()
        streams = len(full)
        while True:
            for entry in entries[counts.total() :]:
                counts[entry.stream] += 1
                sizes[entry.stream] += _size(entry)
            # A stream of large entries is skipped once it has used its quota of bytes.
            readable = {each for each in full if sizes[each] * streams < most_bytes} or full
            left = most_bytes - sizes.total()
            if not readable or left <= 0:
                break
            # The entries read so far from these streams predict the size of their next ones.
            given, size = (
                sum(counts[each] for each in readable),
                sum(sizes[each] for each in readable),
            )
            fitting = min(count - len(entries), given * left // size)
            part = min(2 * part, fitting // len(readable))
            if part < 1:
                break
            more = self._read_group(dict.fromkeys(readable, b">"), part, None)
            entries += more
            full = (full - readable) | _full(more, part)
        self.unread = full
        return entries

    def _part(self, count: int) -> int:
        """Return the number of entries that each stream may contribute to a batch of `count`."""
        return max(min(_LEAST_PER_STREAM, count), count // max(1, len(self._streams)))

    def _read_group(
        self, after: Mapping[str, bytes], count: int, block_ms: int | None
    ) -> list[Entry]:
        positions: dict[Any, Any] = dict(after)
        reply: Any = self._client.xreadgroup(self._group, self._name, positions, count, block_ms)
        pairs = reply.items() if isinstance(reply, dict) else reply or ()
        return [
            Entry(name.decode(), number, fields)
            for name, entries in pairs
            for number, fields in entries
        ]

    def _present(self, entries: list[Entry]) -> list[Entry]:
        # Deleted entries would stay pending for ever, so acknowledge them.
        for entry in entries:
            if not entry.fields:
                self._client.xack(entry.stream, self._group, entry.number)
        return [entry for entry in entries if entry.fields]

    def _make_groups(self) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for stream in self._streams:
            pipeline.xgroup_create(stream, self._group, id="0", mkstream=True)
        for answer in pipeline.execute(raise_on_error=False):
            # BUSYGROUP: the group exists already, perhaps because another member just made it.
            if isinstance(answer, Exception) and not str(answer).startswith("BUSYGROUP"):
                raise answer


def _full(entries: list[Entry], part: int) -> set[str]:
    """Return the streams that used their whole quota."""
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry.stream] = counts.get(entry.stream, 0) + 1
    return {stream for stream, count in counts.items() if count >= part}


def _size(entry: Entry) -> int:
    return _OVERHEAD + sum(map(len, entry.fields.values()))


def in_order(entries: Iterable[Entry], most_bytes: int) -> list[list[Entry]]:
    """Sort entries by the time of writing, and split them into parts.

    A part has at most `most_bytes`, or a single entry that is larger.
    """
    parts: list[list[Entry]] = []
    room = 0
    for entry in sorted(entries, key=_age):
        size = _size(entry)
        if size > room:
            parts.append([])
            room = most_bytes
        parts[-1].append(entry)
        room -= size
    return parts


def _place(number: bytes) -> tuple[int, int]:
    milliseconds, _, within = number.partition(b"-")
    return int(milliseconds), int(within)


def _age(entry: Entry) -> tuple[int, bool, int]:
    """Return a sort key: the time of writing; within a millisecond, entries of nodes come last.

    The second part of an entry's number counts within its stream and its millisecond, so it cannot
    order entries of different streams.
    """
    milliseconds, within = _place(entry.number)
    return milliseconds, entry.stream.startswith("paceline:node:"), within
