"""One client's stream of what happens to a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import redis

from paceline_backend.api.live.changes import Changes, encoded
from paceline_backend.api.live.reader import Channel, Follower, Reader
from paceline_backend.store import StoreUnavailableError

_ENTRIES = 200  # per read while a client catches up
_AGAIN_S = 0.5  # after an outage, and how long a closing server may go unnoticed
_COMMENT_S = 10.0  # proxies close what is silent for longer
_PIECE = 2**16  # bytes: the server holds so much beyond what a slow client took

_RESET = {"type": "reset"}


class Feed:
    """One client's stream: first what it has missed since its position, then all that comes.

    A client that fell too far behind is told to start anew.

    Args:
        reader: shared by all streams.
        run: the run's id.
        since: the client's position.
        newest: the run's position now.
        world: ranks of the run, as far as that is known.
        ended: whether the run has ended.
        closing: whether the server is about to end.
        allowed: whether the client may still read.
    """

    def __init__(
        self,
        reader: Reader,
        run: str,
        since: str,
        newest: str,
        world: int | None,
        ended: bool,
        closing: Callable[[], bool],
        allowed: Callable[[], Awaitable[bool]],
    ) -> None:
        self.reader = reader
        self.run = run
        self.position = since
        self.newest = newest
        self.world = world
        self.ended = ended
        self.closing = closing
        self.allowed = allowed
        self.awaited: str | None = None  # what the client knows that streams wait for

    async def stream(self) -> AsyncIterator[bytes]:
        """The body of the answer."""
        follower = Follower()
        channel = self.reader.channel(self.run, self.newest, self.world, self.ended)
        try:
            yield b": welcome\n\n"
            until = await channel.join(follower)
            async for chunk in self._missed(until):
                yield chunk
            async for chunk in self._coming(channel, follower):
                for start in range(0, len(chunk), _PIECE):
                    yield chunk[start : start + _PIECE]
        finally:
            self.reader.leave(self.run, channel, follower)

    async def _missed(self, until: str) -> AsyncIterator[bytes]:
        """Events between the client's position and the one where the channel's begin."""
        changes = Changes(self.reader.store, self.run, self.world, self.ended)
        while await self._open():
            try:
                lost, entries = await self.reader.entries(self.run, self.position, until, _ENTRIES)
                happened = [] if lost else await self.reader.events(changes, entries, False)
            except (redis.RedisError, StoreUnavailableError):  # the reader's log tells it
                changes.forget()
                for chunk in self._waiting(self.position):
                    yield chunk
                await asyncio.sleep(_AGAIN_S)
                continue
            if lost:
                for chunk in encoded([_RESET], self.position, until):
                    yield chunk
            if lost or not entries:
                return
            before, self.position = self.position, entries[-1][0].decode()
            for chunk in encoded(happened, before, self.position):
                yield chunk

    async def _coming(self, channel: Channel, follower: Follower) -> AsyncIterator[bytes]:
        spoke = time.monotonic()
        while await self._open():
            chunk = follower.take()
            if follower.lagged:
                self.reader.resets += 1
                follower.lagged = False
                yield encoded([_RESET], channel.position, channel.position)[0]
            elif chunk is not None:
                yield chunk
            elif follower.over:
                return
            elif self.reader.awaited != self.awaited:
                yield self._waiting(channel.position)[0]
            elif time.monotonic() - spoke > _COMMENT_S:
                yield b": still here\n\n"
            else:
                await follower.wait(_AGAIN_S)
                continue
            spoke = time.monotonic()

    def _waiting(self, position: str) -> list[bytes]:
        """Tells a client what all streams wait for, if it does not know."""
        if self.reader.awaited == self.awaited:
            return []
        self.awaited = self.reader.awaited
        return encoded([{"type": "waiting", "for": self.awaited}], position, position)

    async def _open(self) -> bool:
        """Whether the stream goes on."""
        return not self.closing() and await self.allowed()
