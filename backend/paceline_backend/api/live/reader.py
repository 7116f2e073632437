"""One reader of the bus for all event streams of a process."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread
import redis
import redis.asyncio

from paceline.core.outage import Outage
from paceline.wire import live
from paceline_backend.api.live.changes import Changes, Entry, encoded
from paceline_backend.requests.streams import shared
from paceline_backend.store import Store, StoreError, StoreUnavailableError, meta

log = logging.getLogger(__name__)

BEGINNING = "0-0"  # the position before a stream's first entry
UNKNOWN = "0-1"  # while the bus is away; no entry has it, so its clients start anew afterwards

_CONNECTIONS = 4  # of a process: one waits for entries, the others serve clients that catch up
_POSITION_S = 2.0  # a snapshot waits no longer for the bus
_QUEUED_S = 20.0  # for a free connection
_ANSWER_S = 5.0
_BLOCK_MS = 100  # how long the first entries of a run that is newly followed may wait
_PAUSE_S = 0.05  # between reads: what comes meanwhile is one event
_OUTAGE_S = 0.5
_LOOK_S = 2.0  # whether the database answers
_ENTRIES = 2_000  # of all runs together, per read
_LEAST_ENTRIES = 10  # of a run, per read
_THREADS = 4  # that ask the database for events


def number(position: str) -> tuple[int, int]:
    """A position's two parts, to compare it with others."""
    ms, _, count = position.partition("-")
    return int(ms), int(count)


class Follower:
    """What a channel has for one client. The bytes are shared by all clients of the run."""

    most_bytes = 4 * 2**20  # that wait, unless one event alone is larger

    def __init__(self) -> None:
        self.lagged = False  # the client must start anew
        self.over = False  # nothing comes after what is waiting
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._news = asyncio.Event()

    def put(self, chunks: Sequence[bytes]) -> None:
        """Adds events, or drops all that wait when a slow client has too many."""
        size = sum(map(len, chunks))
        if self.lagged or (self._waiting and self._bytes + size > self.most_bytes):
            self.drop()
        else:
            self._waiting.extend(chunks)
            self._bytes += size
            self._news.set()

    def drop(self) -> None:
        """The client is told to start anew; what waits is of no use to it."""
        self.lagged = True
        self._waiting.clear()
        self._bytes = 0
        self._news.set()

    def end(self) -> None:
        """Nothing comes any more."""
        self.over = True
        self._news.set()

    def take(self) -> bytes | None:
        """The next event; None: there is none yet."""
        if not self._waiting:
            self._news.clear()
            if self.over or self.lagged:
                self._news.set()
            return None
        chunk = self._waiting.popleft()
        self._bytes -= len(chunk)
        return chunk

    async def wait(self, timeout_s: float) -> None:
        """Returns when something has come, or after a while."""
        with anyio.move_on_after(timeout_s):
            await self._news.wait()


class Channel:
    """A run that somebody follows: its entries become events once, for all that follow it."""

    def __init__(self, changes: Changes, position: str) -> None:
        self.changes = changes
        self.position = position  # the followers have everything up to here
        self.followers: set[Follower] = set()
        self.clients = 0  # who asked for the channel, followers or about to be
        self.missed = False  # something about the run may have changed without an entry
        self.lock = asyncio.Lock()  # held while entries become events

    async def join(self, follower: Follower) -> str:
        """Gives the follower all events from now on; returns the position that they begin at."""
        async with self.lock:
            self.changes.forget()
            self.followers.add(follower)
            return self.position

    def tell(self, chunks: Sequence[bytes]) -> None:
        """Gives events to all followers."""
        for follower in self.followers:
            follower.put(chunks)

    def end(self) -> None:
        """Ends the followers' streams."""
        for follower in self.followers:
            follower.end()


class Reader:
    """Reads the live streams of all runs that somebody follows; idle while nobody does."""

    def __init__(self, store: Store, bus: str) -> None:
        self.store = store
        self.resets = 0  # clients that were told to start anew, because they were too slow
        self._url = bus
        self._client: redis.asyncio.Redis | None = None
        self._channels: dict[str, Channel] = {}
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._bus_away = False
        self._database_away = False
        self._advancing: dict[str, asyncio.Task[None]] = {}  # by run: a slow run holds up no other
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._outage = Outage(log, "event streams wait", "event streams go on", most_s=_OUTAGE_S)

    @property
    def client(self) -> redis.asyncio.Redis:
        """The shared client of the bus: its calls queue for a few connections."""
        if self._client is None:
            self._client = shared(
                self._url, connections=_CONNECTIONS, queued_s=_QUEUED_S, timeout_s=_ANSWER_S
            )
        return self._client

    @property
    def awaited(self) -> str | None:
        """What all streams wait for: ``bus`` or ``database``; None: both answer."""
        if self._bus_away:
            return "bus"
        return "database" if self._database_away else None

    async def close(self) -> None:
        """Closes the connections; the streams have ended."""
        own = [task for task in (self._task, self._watch) if task is not None]
        tasks = [*self._advancing.values(), *own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def position(self, run: str) -> str:
        """The newest entry's id; the beginning where there is none; unknown without a bus."""
        try:
            async with asyncio.timeout(_POSITION_S):
                newest: Any = await self.client.xrevrange(live(run), count=1)
        except (redis.RedisError, TimeoutError) as error:
            log.warning("the position of run %s is unknown: %s", run, error)
            return UNKNOWN
        return str(newest[0][0].decode()) if newest else BEGINNING

    def channel(self, run: str, position: str, world: int | None, ended: bool) -> Channel:
        """The channel of a run; `leave` gives it back.

        Args:
            run: the run's id.
            position: where to read from, if nobody follows the run yet.
            world: as the database has it now.
            ended: whether the run has ended, by the database.
        """
        channel = self._channels.get(run)
        if channel is None:
            channel = Channel(Changes(self.store, run, world, ended), position)
            self._channels[run] = channel
        # The control plane may have ended the run while the bus was away.
        channel.missed |= ended and not channel.changes.ended
        channel.clients += 1
        if self._task is None or self._task.done():
            self._bus_away = False  # what was known when nobody followed is old
            self._task = asyncio.create_task(self._run())
        if self._watch is None or self._watch.done():
            self._database_away = False
            self._watch = asyncio.create_task(self._watch_database())
        return channel

    def leave(self, run: str, channel: Channel, follower: Follower) -> None:
        """Takes a client away, and with the last one the channel."""
        channel.followers.discard(follower)
        channel.clients -= 1
        if not channel.clients:
            del self._channels[run]

    async def entries(
        self, run: str, position: str, until: str, most: int
    ) -> tuple[bool, list[Entry]]:
        """Whether entries after a position were lost, and the next ones up to another position.

        Raises:
            RedisError: the bus is away.
        """
        came: Any = []
        if number(position) < number(until):
            came = await self.client.xrange(live(run), f"({position}", until, most)
        return await self._lost(run, position, bool(came)), list(came)

    async def events(self, changes: Changes, entries: Sequence[Entry], missed: bool) -> list[Any]:
        """What `Changes.of` makes of entries, in one of a few threads.

        Raises:
            StoreUnavailableError: the database is away.
        """
        return await anyio.to_thread.run_sync(changes.of, entries, missed, limiter=self._threads)

    async def _lost(self, run: str, position: str, more: bool) -> bool:
        # The oldest go first: while our last one is still there, nothing after it is gone.
        if position != BEGINNING:
            return not await self.client.xrange(live(run), position, position, 1)
        if not more:
            return False
        info: Any = await self.client.xinfo_stream(live(run))
        return bool(info["entries-added"] > info["length"])

    async def _run(self) -> None:
        """Reads until nobody follows any run."""
        while self._channels:
            try:
                if not await self._round():
                    continue
                await asyncio.sleep(_PAUSE_S)
            except (redis.RedisError, StoreUnavailableError) as error:
                self._bus_away = isinstance(error, redis.RedisError)
                self._miss()
                await asyncio.sleep(self._outage.failed(error))
            except Exception:  # the streams of all clients depend on this task
                log.exception("event streams wait for the next look")
                self._miss()
                await asyncio.sleep(_OUTAGE_S)

    async def _watch_database(self) -> None:
        """Looks whether the database answers: without it nothing is committed, and no entry comes.

        Apart from `_run`, which a database that hangs must not hold up. A question that is not
        answered in time is waited for, and no other one is asked meanwhile.
        """
        asked: asyncio.Future[None] | None = None
        while self._channels or asked is not None:
            asked = asked or asyncio.create_task(anyio.to_thread.run_sync(meta.ask, self.store))
            done, _ = await asyncio.wait((asked,), timeout=_ANSWER_S)
            if not done:
                self._database_away = True
                continue
            try:
                asked.result()
                self._database_away = False
            except StoreError as error:
                log.debug("event streams wait for the database: %s", error)
                self._database_away = True
            asked = None
            await asyncio.sleep(_LOOK_S)

    def _miss(self) -> None:
        """All runs may have changed: what their entries would have said is looked up."""
        for channel in self._channels.values():
            channel.missed = True

    async def _round(self) -> bool:
        """Reads once for all channels but those still at their last entries; whether some came."""
        idle = {run: each for run, each in self._channels.items() if run not in self._advancing}
        came = await self._read(idle) if idle else {}
        if idle:
            self._bus_away = False
        for run, channel in idle.items():
            entries = came.get(live(run), [])
            if entries or channel.missed:
                work = self._advance(run, channel, entries)
                self._advancing[run] = asyncio.create_task(work)
            elif channel.changes.ended:
                channel.end()
        if self._advancing:
            await self._advanced()
        if not self._advancing:  # what is under way may still fail
            self._outage.over()
        return bool(came)

    async def _advanced(self) -> None:
        """Takes away what has ended, after a moment; raises what one of them raised."""
        done, _ = await asyncio.wait(self._advancing.values(), timeout=_PAUSE_S)
        self._advancing = {run: task for run, task in self._advancing.items() if task not in done}
        errors = [error for task in done if (error := task.exception()) is not None]
        if errors:
            raise errors[0]

    async def _read(self, channels: Mapping[str, Channel]) -> dict[str, list[Entry]]:
        """What has come on the streams of some runs."""
        positions: Any = {live(run): channel.position for run, channel in channels.items()}
        most = max(_LEAST_ENTRIES, _ENTRIES // len(positions))
        answer: Any = await self.client.xread(positions, most, _BLOCK_MS)
        return {name.decode(): entries for name, entries in answer or ()}

    async def _advance(self, run: str, channel: Channel, entries: list[Entry]) -> None:
        try:
            async with channel.lock:
                await self._tell(run, channel, entries)
        except (redis.RedisError, StoreUnavailableError):
            channel.changes.forget()
            raise
        except Exception:  # of one run: the others' streams go on
            log.exception("the event streams of run %s end", run)
            channel.end()

    async def _tell(self, run: str, channel: Channel, entries: list[Entry]) -> None:
        before = channel.position
        # After an outage also without entries: a bus that lost some may get no further ones.
        if await self._lost(run, before, more=bool(entries)):
            after = await self.position(run)
            channel.tell(encoded([{"type": "reset"}], before, after))
        else:
            after = entries[-1][0].decode() if entries else before
            happened = await self.events(channel.changes, entries, channel.missed)
            channel.tell(encoded(happened, before, after))
        channel.missed = False
        channel.position = after
