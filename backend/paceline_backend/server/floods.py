"""Keeps one writer from filling the bus: who writes too much is switched off for a while.

Each run and each node writes to a stream of its own as a user of its own. `Guard.look_at_all`
switches the writer of a stream off that is over its bounds, so that ranks spool what they have to
say, and trims a run's stream where it is at twice its bounds although ingest stores it: only a
flood gets there.
`Guard.switch_on` lets writers back. Who is off until when stands on the bus, so any worker may let
them back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import redis

from paceline.wire import writer_of

log = logging.getLogger(__name__)

OFF = "paceline:off"  # user → until when, and its stream
FLOODS = "paceline:floods"  # what was ever done: counts by name

_PATTERN = "paceline:*:*:telemetry"


@dataclass(frozen=True)
class Bounds:
    """How much may wait on one writer's stream."""

    entries: int = 500_000
    bytes: int = 512 * 2**20
    off_s: float = 10.0  # how long a writer stays off: a silent run is soon taken for lost


class _Size(NamedTuple):
    """How much waits on a stream."""

    entries: int
    bytes: int

    def over(self, bounds: Bounds) -> float:
        """How much of its bounds a stream takes: 1 is all of them."""
        return max(self.entries / bounds.entries, self.bytes / bounds.bytes)


@dataclass(frozen=True)
class Flood:
    """A stream that was over its bounds, and what was done about it."""

    stream: str
    entries: int
    bytes: int
    dropped: int  # entries
    off: bool  # the writer was switched off; else this bus has no such user, or not for us
    news: bool  # this did not stand so at the last look of any guard

    @property
    def run(self) -> str | None:
        """The run whose stream it is."""
        kind, name = writer_of(self.stream)
        return name if kind == "run" else None


@dataclass(frozen=True)
class Counts:
    """What the guards of this bus have done."""

    off_now: int  # writers
    switched_off: int
    dropped: int  # entries


class Guard:
    """Looks at streams of runs and nodes.

    Args:
        client: of a user that may change users; without that right, runs' streams are only trimmed.
        bounds: of each stream.
    """

    def __init__(self, client: redis.Redis, bounds: Bounds | None = None) -> None:
        self._client = client
        self.bounds = bounds or Bounds()
        self._warned = False
        self._oldest: dict[str, bytes] = {}  # streams over their bounds at the last look

    def streams(self) -> Iterator[str]:
        """The streams of all runs and nodes.

        Raises:
            redis.RedisError: the bus is away.
        """
        for name in self._client.scan_iter(match=_PATTERN, count=1_000, _type="stream"):
            yield name.decode(errors="backslashreplace")

    def look_at_all(self) -> list[Flood]:
        """Switches off the writers of all streams that are over their bounds.

        Raises:
            redis.RedisError: the bus is away.
        """
        streams = list(self.streams())
        there = set(streams)
        self._oldest = {each: first for each, first in self._oldest.items() if each in there}
        sizes = zip(streams, self._measure(streams), strict=True)
        floods = [self._enforce(stream, size) for stream, size in sizes]
        return [flood for flood in floods if flood is not None]

    def switch_on(self) -> list[str]:
        """Lets those back whose time is over and whose streams have drained; the users.

        Raises:
            redis.RedisError: the bus is away.
        """
        back = []
        now = self._now()
        known: Any = self._client.hgetall(OFF)
        for user, value in known.items():
            until, _, stream = value.decode().partition(" ")
            if float(until) > now or self._measure([stream])[0].over(self.bounds) > 0.5:
                continue
            name = user.decode()
            # At once: whoever makes users meanwhile looks here who is off.
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hdel(OFF, name)
            if self._exists(name):
                pipeline.execute_command("ACL", "SETUSER", name, "on")  # type: ignore[no-untyped-call]
            pipeline.execute()
            back.append(name)
        return back

    def _enforce(self, stream: str, size: _Size) -> Flood | None:
        """Does what the size of a stream asks for."""
        over = size.over(self.bounds)
        if over <= 1:
            self._oldest.pop(stream, None)
            return None
        off, newly = self._switch_off(stream)
        dropped = self._trim(stream, int(size.entries / over)) if over > 2 else 0
        news = newly or dropped > 0 or (not off and stream not in self._oldest)
        self._oldest[stream] = self._first(stream)
        return Flood(stream, size.entries, size.bytes, dropped, off, news)

    def _measure(self, streams: Sequence[str]) -> list[_Size]:
        """The sizes of streams, in two round trips however many there are."""
        pipeline = self._client.pipeline(transaction=False)
        for stream in streams:
            pipeline.xlen(stream)
        lengths: list[int] = pipeline.execute()
        # Ingest deletes what it has stored, so most streams are empty. One entry may be huge.
        filled = [stream for stream, length in zip(streams, lengths, strict=True) if length]
        for stream in filled:
            pipeline.memory_usage(stream)
        sizes = dict(zip(filled, pipeline.execute(), strict=True))
        return [
            _Size(length, sizes.get(stream) or 0)
            for stream, length in zip(streams, lengths, strict=True)
        ]

    def _first(self, stream: str) -> bytes:
        """The number of the oldest entry."""
        entries: Any = self._client.xrange(stream, count=1)
        return entries[0][0] if entries else b""

    def _trim(self, stream: str, kept: int) -> int:
        """Drops the oldest entries of a flood; how many.

        A node's stream is left alone: what its agent sent it has deleted. So is a stream of which
        ingest has stored nothing since the last look: a healthy run's gets so long, too, while the
        database is away.
        """
        kind, _ = writer_of(stream)
        first = self._first(stream)
        if kind != "run" or self._oldest.get(stream, first) == first:
            return 0
        dropped = int(self._client.xtrim(stream, maxlen=kept, approximate=False))
        self._client.hincrby(FLOODS, "dropped", dropped)
        return dropped

    def _switch_off(self, stream: str) -> tuple[bool, bool]:
        """Whether the writer is off now, and whether it was on."""
        user = user_of(stream)
        try:
            if not self._exists(user):
                return False, False
            # First, so that somebody switches it on again whatever happens to this process.
            until = self._now() + self.bounds.off_s
            newly = bool(self._client.hset(OFF, user, f"{until} {stream}"))
            self._acl("SETUSER", user, "off")
        except redis.ResponseError as error:  # of a missing right, too
            if not self._warned:
                log.warning("the bus does not let us switch %s off: %s", user, error)
            self._warned = True
            self._client.hdel(OFF, user)
            return False, False
        # A user that is off keeps the connections that it has.
        self._client.execute_command("CLIENT", "KILL", "USER", user)  # type: ignore[no-untyped-call]
        if newly:
            self._client.hincrby(FLOODS, "switched_off", 1)
        return True, newly

    def _exists(self, user: str) -> bool:
        """A user must exist to be changed: else the bus would make one of this name."""
        return self._acl("GETUSER", user) is not None

    def _acl(self, *arguments: str) -> Any:
        return self._client.execute_command("ACL", *arguments)  # type: ignore[no-untyped-call]

    def _now(self) -> float:
        seconds, microseconds = self._client.time()
        return float(seconds) + float(microseconds) / 1e6


def user_of(stream: str) -> str:
    """The user of the bus that writes to a stream of a run or a node."""
    return "paceline-{}-{}".format(*writer_of(stream))


def counts(client: redis.Redis) -> Counts:
    """What the guards of this bus have done.

    Raises:
        redis.RedisError: the bus is away.
    """
    done: Any = client.hgetall(FLOODS)
    switched_off, dropped = (int(done.get(name, 0)) for name in (b"switched_off", b"dropped"))
    return Counts(int(client.hlen(OFF)), switched_off, dropped)
