"""One reader of the bus for all event streams of a process.

`ChangeReader` reads the stream of changes on the bus, and queries the database about the runs that
clients follow. It puts the next event of each client into the client's `PendingEvent`. An event
reports only that something is new; the client requests the data itself. A slow client therefore
needs no buffer, because later events are merged into the pending one, and no event has to be
replayed. After an outage any run may have changed, so every client gets an event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import anyio
import anyio.to_thread
import redis
import redis.asyncio

from paceline.core.outage import Outage
from paceline.wire import CHANGES, ENDED
from paceline_backend.requests.streams import shared
from paceline_backend.store import Store, StoreError, StoreUnavailableError, meta, runs

log = logging.getLogger(__name__)

_READER_CONNECTIONS = 2
# Maximum time to wait for a free connection.
_QUEUED_S = 20.0  # seconds
_ANSWER_S = 5.0  # seconds
_BLOCK_MS = 250
# Pause between two reads. Changes during the pause are merged into one event.
_READ_PAUSE_S = 0.05  # seconds
_OUTAGE_S = 0.5  # seconds
# Pause between two checks of the database.
_CHECK_S = 2.0  # seconds
_ENTRIES = 1_000  # per read
# Number of threads that query the database.
_THREADS = 2

Event = dict[str, Any]


class PendingEvent:
    """The event that one client gets next, if there is any."""

    def __init__(self) -> None:
        # True if the client gets no further event after the pending one.
        self.is_last = False
        self._event: Event | None = None
        self._pending = asyncio.Event()

    def put(self, event: Event) -> None:
        """Replace the pending event, but keep its `step` unless the new event's is earlier."""
        before = None if self._event is None else self._event["step"]
        self._event = {**event, "step": _earlier(before, event["step"])}
        self._pending.set()

    def end(self) -> None:
        """Mark the pending event as the last one."""
        self.is_last = True
        self._pending.set()

    def take(self) -> Event | None:
        """Remove and return the pending event; None: there is none."""
        event, self._event = self._event, None
        if not self.is_last:
            self._pending.clear()
        return event

    async def wait(self, timeout_s: float) -> None:
        """Wait until an event is pending, but at most `timeout_s` seconds."""
        with anyio.move_on_after(timeout_s):
            await self._pending.wait()


class ChangeReader:
    """Reader of the stream of changes on the bus. It reads only while clients follow a run.

    `tell` and `tell_end` raise `StoreUnavailableError` while the database is unavailable.
    """

    def __init__(self, store: Store, bus: str) -> None:
        self.store = store
        self._url = bus
        self._client: redis.asyncio.Redis | None = None
        self._followers: dict[str, set[PendingEvent]] = {}
        # Position on the bus of the last entry whose events the followers have got.
        self._position: bytes | None = None
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._bus_away = False
        self._database_away = False
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._outage = Outage(
            log, "event streams paused", "event streams resumed", most_s=_OUTAGE_S
        )

    @property
    def client(self) -> redis.asyncio.Redis:
        """Client of the bus."""
        if self._client is None:
            self._client = shared(
                self._url, connections=_READER_CONNECTIONS, queued_s=_QUEUED_S, timeout_s=_ANSWER_S
            )
        return self._client

    @property
    def awaited(self) -> str | None:
        """The service that does not answer, `bus` or `database`; None: both answer."""
        if self._bus_away:
            return "bus"
        return "database" if self._database_away else None

    async def close(self) -> None:
        """Stop reading, and close the connections. Call this after all streams have ended."""
        tasks = [task for task in (self._task, self._watch) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    def join(self, run: str) -> PendingEvent:
        """Return a follower of a run, which gets an event for each change from now on."""
        follower = PendingEvent()
        self._followers.setdefault(run, set()).add(follower)
        if self._task is None or self._task.done():
            # The reader was not running, so what it knew about the bus is outdated.
            self._bus_away = False
            self._position = None
            self._task = asyncio.create_task(self._run())
        if self._watch is None or self._watch.done():
            self._database_away = False
            self._watch = asyncio.create_task(self._watch_database())
        return follower

    def leave(self, run: str, follower: PendingEvent) -> None:
        """Remove a follower."""
        self._followers[run].discard(follower)
        if not self._followers[run]:
            del self._followers[run]

    async def tell(self, changed: Mapping[str, int | None]) -> None:
        """Give the followers of changed runs an event.

        `changed` maps each run to its earliest new step, None if it has no new step.
        """
        wanted = [run for run in changed if run in self._followers]
        if not wanted:
            return
        states = await self._states_of(wanted)
        for run in wanted:
            for follower in self._followers.get(run, ()):
                _put(follower, states.get(run), changed[run])

    async def tell_end(self, run: str, follower: PendingEvent) -> None:
        """Give a follower the final event if its run has already ended."""
        status = (await self._states_of([run])).get(run)
        if status is None or status.state in ENDED:
            _put(follower, status, None)

    async def _states_of(self, names: Collection[str]) -> dict[str, runs.RunStatus]:
        def ask() -> dict[str, runs.RunStatus]:
            with self.store.read() as connection:
                return runs.statuses(connection, names)

        return await anyio.to_thread.run_sync(ask, limiter=self._threads)

    async def _run(self) -> None:
        while self._followers:
            try:
                await self._follow()
            except (redis.RedisError, StoreUnavailableError) as error:
                self._bus_away = isinstance(error, redis.RedisError)
                await asyncio.sleep(self._outage.failed(error))
            except Exception:
                # This task must not end, because the streams of all clients depend on it.
                log.exception("event streams cannot read changes; retrying")
                await asyncio.sleep(_OUTAGE_S)

    async def _follow(self) -> None:
        entries: Any = await self.client.xrevrange(CHANGES, count=1)
        newest = entries[0][0] if entries else b"0-0"
        # If the bus has lost its data, its entries start again below the stored position.
        if self._position is None or _number(newest) < _number(self._position):
            self._position = newest
        self._bus_away = False
        await self.tell(dict.fromkeys(self._followers))
        self._outage.succeeded()
        while self._followers:
            answer: Any = await self.client.xread({CHANGES: self._position}, _ENTRIES, _BLOCK_MS)
            for _, entries in answer:
                await self.tell(_merged(fields for _, fields in entries))
                self._position = entries[-1][0]
                await asyncio.sleep(_READ_PAUSE_S)

    async def _watch_database(self) -> None:
        """Check regularly whether the database answers.

        During an outage of the database nothing is committed, so no entry on the bus would reveal
        the outage.
        """
        asked: asyncio.Future[None] | None = None
        while self._followers or asked is not None:
            asked = asked or asyncio.create_task(anyio.to_thread.run_sync(meta.ask, self.store))
            done, _ = await asyncio.wait((asked,), timeout=_ANSWER_S)
            if not done:
                self._database_away = True
                continue
            try:
                asked.result()
                self._database_away = False
            except StoreError as error:
                log.debug("event streams paused: the database does not answer: %s", error)
                self._database_away = True
            asked = None
            await asyncio.sleep(_CHECK_S)


def _put(follower: PendingEvent, status: runs.RunStatus | None, step: int | None) -> None:
    """Give a follower the event of a change. `status` is None if the run was deleted."""
    ended = status is None or status.state in ENDED
    if status is not None:
        kind = "end" if ended else "change"
        follower.put({"type": kind, "step": step, "revision": status.revision})
    if ended:
        follower.end()


def _merged(entries: Iterable[Mapping[bytes, bytes]]) -> dict[str, int | None]:
    changed: dict[str, int | None] = {}
    for fields in entries:
        for name, value in fields.items():
            run = name.decode()
            changed[run] = _earlier(changed.get(run), int(value) if value else None)
    return changed


def _number(position: bytes) -> tuple[int, ...]:
    return tuple(map(int, position.split(b"-")))


def _earlier(*steps: int | None) -> int | None:
    return min((step for step in steps if step is not None), default=None)
