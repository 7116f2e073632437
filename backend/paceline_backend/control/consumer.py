"""Reads streams as one member of a consumer group, so that no entry is lost with a member."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import redis

CLAIM_IDLE_S = 2.0  # who takes over a run cannot plan without what the dead one had read
MOST_BYTES = 8 * 2**20  # of a batch, about

_CLAIM_EVERY_S = 0.5
_LEAST = 8  # entries that each stream may give to a batch, however many streams there are
_OVERHEAD = 64  # bytes of an entry besides its values
_FIRST = 500  # entries of a batch's first read: how large a stream's entries are is not known yet


class Entry(NamedTuple):
    """An entry, and the stream that it was read from: who may write there wrote it."""

    stream: str
    number: bytes
    fields: dict[bytes, bytes]


class Consumer:
    """One member of a group. Not thread-safe: it shares its client's connection.

    Entries stay the member's until acknowledged (XACK): `read` returns them again after `reset`,
    and another member takes them over once they lay for `claim_idle_s`.

    Streams are read fairly. Each gives its part to a batch, and a stream with more to give than its
    part gets what the others leave. So a stream that is flooded does not hold up the others.
    How large entries are is not known before they are read, so the first reads, and those after
    `reset`, are of one entry of each stream; each further one may have twice as many, as long as
    that is half of a batch's bytes at most. Streams whose entries are large give fewer of them.

    Args:
        client: bytes in, bytes out; its timeout must be longer than `read` blocks.
        streams: to read.
        group: made, from each stream's start, when it does not exist (any more).
        name: of this member; unique among those that run, and better the same after a restart.
        claim_idle_s: after which time a member that acknowledges nothing counts as dead.
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
        self._own_after: dict[str, bytes] = {}  # streams whose unacknowledged entries come first
        self._claim_from: dict[str, bytes] = {}
        self._claim_at = 0.0
        self._kept: set[tuple[str, bytes]] = set()
        self._first = 1  # entries of the next read, if there are not too many streams
        self.repeated = False  # the last read gave entries that were delivered before
        self.unread: set[str] = set()  # streams that may have more to give than the last batch took
        self.follow(streams)

    def follow(self, streams: Iterable[str]) -> None:
        """Reads these streams from now on, and no others."""
        wanted = list(dict.fromkeys(streams))
        new = set(wanted) - set(self._streams)
        self._streams = wanted
        self._own_after = {
            stream: after for stream, after in self._own_after.items() if stream in set(wanted)
        } | dict.fromkeys(new, b"0")
        # A stream that is gone has no group: to claim from it would fail for ever.
        self._claim_from = {
            stream: at for stream, at in self._claim_from.items() if stream in set(wanted)
        }

    def reset(self) -> None:
        """Starts over: own unacknowledged entries, then those of dead members, then new ones."""
        self._own_after = dict.fromkeys(self._streams, b"0")
        self._claim_from = {}
        self._claim_at = 0.0
        self._kept = set()
        self._first = 1

    def read(self, count: int, block_s: float, most_bytes: int = MOST_BYTES) -> list[Entry]:
        """The next entries; empty when none came within `block_s`.

        Args:
            count: at most so many, if there are not too many streams.
            block_s: longest wait.
            most_bytes: nothing is read on top of so many bytes. A first part of the entries is
                read without knowing how large they are, and each further part at most doubles it.

        Raises:
            redis.RedisError: the bus is away; call `reset` before the next read.
        """
        self.unread = set(self._streams)  # until new entries are read: they come last
        try:
            first = min(count, self._first)
            left = self._own(first) or self._claimed(first)
            self.repeated = bool(left)
            entries = left or self._new(count, block_s, most_bytes)
            largest = max(map(_size, entries), default=1)
            self._first = max(1, min(_FIRST, 2 * self._first, most_bytes // (2 * largest)))
            return entries
        except redis.ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
        self._make_groups()  # the first member ever, a new stream, or the bus lost its data
        return []

    def keep(self, entries: Iterable[Entry]) -> set[tuple[str, bytes]]:
        """Keeps entries this member's that it has read and not acknowledged yet.

        Call it before each `read`. Otherwise another member claims an entry that lies for
        `claim_idle_s`. The next `read` does not return these entries, however long it comes later.

        Returns:
            Streams and numbers of those that are still there: another member may have dealt with
            the others while this one was stuck.

        Raises:
            redis.RedisError: the bus is away.
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
        """Return which of this member's entries were delivered at least `times`, and how often.

        Raises:
            redis.RedisError: the bus is away.
        """
        spans: dict[str, list[bytes]] = {}
        for entry in entries:
            spans.setdefault(entry.stream, []).append(entry.number)
        pipeline = self._client.pipeline(transaction=False)
        for stream, numbers in spans.items():
            first, last = min(numbers, key=_place), max(numbers, key=_place)
            pipeline.xpending_range(stream, self._group, first, last, 2 * _FIRST, self._name)
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
        # A stream without an entry in the answer has none left.
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
        if not self._claim_from:  # seen all
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
        full = _full(entries, part)
        counts, sizes = Counter[str](), Counter[str]()
        streams = len(full)
        while True:
            for entry in entries[counts.total() :]:
                counts[entry.stream] += 1
                sizes[entry.stream] += _size(entry)
            # A stream of large entries waits once it has given its part of the bytes.
            turn = {each for each in full if sizes[each] * streams < most_bytes} or full
            left = most_bytes - sizes.total()
            if not turn or left <= 0:
                break
            # What these streams gave shows how large their next entries may be.
            given, size = sum(counts[each] for each in turn), sum(sizes[each] for each in turn)
            fitting = min(count - len(entries), given * left // size)
            part = min(2 * part, fitting // len(turn))
            if part < 1:
                break
            more = self._read_group(dict.fromkeys(turn, b">"), part, None)
            entries += more
            full = (full - turn) | _full(more, part)
        self.unread = full
        return entries

    def _part(self, count: int) -> int:
        """How many entries of `count` each stream may give."""
        return max(min(_LEAST, count), count // max(1, len(self._streams)))

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
        """Without entries that were deleted meanwhile; they would stay pending for ever."""
        for entry in entries:
            if not entry.fields:
                self._client.xack(entry.stream, self._group, entry.number)
        return [entry for entry in entries if entry.fields]

    def _make_groups(self) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for stream in self._streams:
            pipeline.xgroup_create(stream, self._group, id="0", mkstream=True)
        for answer in pipeline.execute(raise_on_error=False):
            # BUSYGROUP: the stream has its group, or another member was quicker.
            if isinstance(answer, Exception) and not str(answer).startswith("BUSYGROUP"):
                raise answer


def _full(entries: list[Entry], part: int) -> set[str]:
    """The streams that gave their whole part."""
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry.stream] = counts.get(entry.stream, 0) + 1
    return {stream for stream, count in counts.items() if count >= part}


def _size(entry: Entry) -> int:
    """Its bytes, about."""
    return _OVERHEAD + sum(map(len, entry.fields.values()))


def in_order(entries: Iterable[Entry], most_bytes: int) -> list[list[Entry]]:
    """Entries in the order in which they were written, in parts of so many bytes or one entry."""
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
    """Entries' numbers tell when they were written. Of one moment, nodes' entries come last.

    The second part of a number counts the entries of one stream within a millisecond. So it says
    nothing about the entries of another stream.
    """
    milliseconds, within = _place(entry.number)
    return milliseconds, entry.stream.startswith("paceline:node:"), within
