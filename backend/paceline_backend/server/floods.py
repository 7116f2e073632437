"""Rate limiter that keeps one writer from filling the bus.

Each run and each node writes to a stream of its own, as a user of its own. `Guard.look_at_all`
switches off the writer of a stream that exceeds its bounds; the ranks then spool their messages.
`look_at_all` also trims a run's stream that has reached twice its bounds although ingest stores
entries from it: only a flood fills a stream that far. `Guard.switch_on` switches writers on again.
The bus itself stores which writer is off until when, so any worker can switch the writer on.

All public functions raise `redis.RedisError` while the bus is unavailable.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import redis

from paceline.wire import writer_of

log = logging.getLogger(__name__)

# Redis hash: name of a user → time until which the user is off, and the user's stream.
OFF = "paceline:off"
# Redis hash: "switched_off" or "dropped" → count since the bus was created.
FLOODS = "paceline:floods"

_PATTERN = "paceline:*:*:telemetry"


@dataclass(frozen=True)
class Bounds:
    """Maximum backlog of one writer's stream."""

    entries: int = 500_000
    bytes: int = 512 * 2**20
    # Time for which a writer stays off: short, because a silent run soon counts as lost.
    off_s: float = 10.0  # seconds


class _Size(NamedTuple):
    entries: int
    bytes: int

    def fullness(self, bounds: Bounds) -> float:
        """Return the backlog as a fraction of the bounds: 1 is the limit."""
        return max(self.entries / bounds.entries, self.bytes / bounds.bytes)


@dataclass(frozen=True)
class Flood:
    """A stream that exceeded its bounds, and the action of the guard.

    `off` means that the stream's writer was switched off. `off` is False if the bus has no user for
    this writer, or does not let the guard change users. `news` is False if a guard has already
    reported the same state in its previous check.
    """

    stream: str
    entries: int
    bytes: int
    dropped: int  # entries
    off: bool
    news: bool

    @property
    def run(self) -> str | None:
        """Return the run that writes to the stream; None: a node writes to it."""
        kind, name = writer_of(self.stream)
        return name if kind == "run" else None


@dataclass(frozen=True)
class Counts:
    """Numbers of writers that the guards of a bus have switched off, and of dropped entries."""

    off_now: int  # writers
    switched_off: int
    dropped: int  # entries


class Guard:
    """Rate limiter for the streams of runs and nodes.

    If a run or node writes too much, its user of the bus is switched off, and a run's stream may be
    trimmed. If the server's own user of the bus may not change users, streams are only trimmed.
    """

    def __init__(self, client: redis.Redis, bounds: Bounds | None = None) -> None:
        self._client = client
        self.bounds = bounds or Bounds()
        self._warned = False
        # Stream that exceeded its bounds at the last check → number of its oldest entry.
        self._oldest: dict[str, bytes] = {}

    def streams(self) -> Iterator[str]:
        """Yield the streams of all runs and nodes."""
        for name in self._client.scan_iter(match=_PATTERN, count=1_000, _type="stream"):
            yield name.decode(errors="backslashreplace")

    def look_at_all(self) -> list[Flood]:
        """Switch off the writers of all streams that exceed their bounds. Return these streams."""
        streams = list(self.streams())
        there = set(streams)
        self._oldest = {each: first for each, first in self._oldest.items() if each in there}
        sizes = zip(streams, self._measure(streams), strict=True)
        floods = [self._enforce(stream, size) for stream, size in sizes]
        return [flood for flood in floods if flood is not None]

    def switch_on(self) -> list[str]:
        """Switch on writers whose off time is over and whose streams have drained; return them."""
        back = []
        now = self._now()
        known: Any = self._client.hgetall(OFF)
        for user, value in known.items():
            until, _, stream = value.decode().partition(" ")
            if float(until) > now or self._measure([stream])[0].fullness(self.bounds) > 0.5:
                continue
            name = user.decode()
            # Change the hash and the user in one transaction, because the hash tells `users.make`
            # which users must stay switched off.
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hdel(OFF, name)
            if self._exists(name):
                pipeline.execute_command("ACL", "SETUSER", name, "on")  # type: ignore[no-untyped-call]
            pipeline.execute()
            back.append(name)
        return back

    def _enforce(self, stream: str, size: _Size) -> Flood | None:
        over = size.fullness(self.bounds)
        if over <= 1:
            self._oldest.pop(stream, None)
            return None
        off, newly = self._switch_off(stream)
        dropped = self._trim(stream, int(size.entries / over)) if over > 2 else 0
        news = newly or dropped > 0 or (not off and stream not in self._oldest)
        self._oldest[stream] = self._first(stream)
        return Flood(stream, size.entries, size.bytes, dropped, off, news)

    def _measure(self, streams: Sequence[str]) -> list[_Size]:
        """Return the sizes of streams. This takes two round trips for any number of streams."""
        pipeline = self._client.pipeline(transaction=False)
        for stream in streams:
            pipeline.xlen(stream)
        lengths: list[int] = pipeline.execute()
        # Most streams are empty, because ingest deletes what it has stored. Streams with entries
        # are also measured in bytes, because a single entry may be huge.
        filled = [stream for stream, length in zip(streams, lengths, strict=True) if length]
        for stream in filled:
            pipeline.memory_usage(stream)
        sizes = dict(zip(filled, pipeline.execute(), strict=True))
        return [
            _Size(length, sizes.get(stream) or 0)
            for stream, length in zip(streams, lengths, strict=True)
        ]

    def _first(self, stream: str) -> bytes:
        entries: Any = self._client.xrange(stream, count=1)
        return entries[0][0] if entries else b""

    def _trim(self, stream: str, kept: int) -> int:
        """Drop the oldest entries of a flood. Return the number of dropped entries.

        Two kinds of streams are not trimmed. One is the stream of a node, because the node's agent
        has deleted its own copy of what it sent. The other is a stream of which ingest has stored
        nothing since the last check: while the database is unavailable, the stream of a normal run
        also grows to this length.
        """
        kind, _ = writer_of(stream)
        first = self._first(stream)
        if kind != "run" or self._oldest.get(stream, first) == first:
            return 0
        dropped = int(self._client.xtrim(stream, maxlen=kept, approximate=False))
        self._client.hincrby(FLOODS, "dropped", dropped)
        return dropped

    def _switch_off(self, stream: str) -> tuple[bool, bool]:
        """Switch a stream's writer off; return whether it is off now, and whether it was on."""
        user = user_of(stream)
        try:
            if not self._exists(user):
                return False, False
            # Record the end of the pause before it begins: if this process dies, a worker
            # switches the user on again.
            until = self._now() + self.bounds.off_s
            newly = bool(self._client.hset(OFF, user, f"{until} {stream}"))
            self._acl("SETUSER", user, "off")
        except redis.ResponseError as error:
            # Usually, the reason is that the client's own user may not change users.
            if not self._warned:
                log.warning("the server may not switch the bus user %s off: %s", user, error)
            self._warned = True
            self._client.hdel(OFF, user)
            return False, False
        # The bus keeps open connections of a user that is off, so they must be closed.
        self._client.execute_command("CLIENT", "KILL", "USER", user)  # type: ignore[no-untyped-call]
        if newly:
            self._client.hincrby(FLOODS, "switched_off", 1)
        return True, newly

    def _exists(self, user: str) -> bool:
        """Return whether the bus has a user. Changing an unknown user would create it."""
        return self._acl("GETUSER", user) is not None

    def _acl(self, *arguments: str) -> Any:
        return self._client.execute_command("ACL", *arguments)  # type: ignore[no-untyped-call]

    def _now(self) -> float:
        seconds, microseconds = self._client.time()
        return float(seconds) + float(microseconds) / 1e6


def user_of(stream: str) -> str:
    """Return the user of the bus that writes to the stream of a run or a node."""
    return "paceline-{}-{}".format(*writer_of(stream))


def counts(client: redis.Redis) -> Counts:
    """Return the numbers of switched-off writers and dropped entries of this bus."""
    done: Any = client.hgetall(FLOODS)
    switched_off, dropped = (int(done.get(name, 0)) for name in (b"switched_off", b"dropped"))
    return Counts(int(client.hlen(OFF)), switched_off, dropped)
