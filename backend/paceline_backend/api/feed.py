"""One client's stream of what happens to a run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import orjson
import redis
import redis.asyncio
from fastapi import Request
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from starlette.concurrency import run_in_threadpool

from paceline.core.outage import Outage
from paceline.wire import (
    ENDED,
    Adopted,
    Fallback,
    Message,
    StepBatch,
    SwitchRequested,
    WireError,
    decode,
    live,
)
from paceline_backend.store import (
    Connection,
    Store,
    StoreUnavailableError,
    reads,
    segments,
    switches,
)
from paceline_backend.store import runs as runs_store

log = logging.getLogger(__name__)

BEGINNING = "0-0"  # the position before a stream's first entry

_BLOCK_MS = 500  # how long a closing server or a closed run may go unnoticed
_ENTRIES = 200  # per read
_PAUSE_S = 0.05  # between reads: what comes meanwhile is one event
_OUTAGE_S = 0.5
_COMMENT_S = 10.0  # proxies close what is silent for longer
_STEPS_PER_EVENT = 500
_REMEMBERED = 10_000  # steps that are not sent again

_NOT_OF_RUN = (StepBatch, Adopted, Fallback)  # messages that change nothing in the run's row

Event = dict[str, Any]
Entry = tuple[bytes, dict[bytes, bytes]]


class Feed:
    """One client's stream. The bus is its queue, so a slow client costs no memory.

    A client that fell behind what the bus keeps is told to start anew.
    """

    def __init__(
        self,
        request: Request,
        store: Store,
        bus: str,
        run: str,
        position: str,
        ended: bool,
        world: int | None,
    ) -> None:
        self.state = request.app.state
        self.store = store
        self.bus = bus
        self.run = run
        self.position = position
        self.ended = ended
        self.world = world
        self.version: int | None = None  # of the last segment seen
        self.outage = Outage(
            log, f"events of run {run} wait", f"events of run {run} go on", most_s=_OUTAGE_S
        )
        self.sent: dict[int, float] = {}  # step → its end: a later attempt may run it again

    async def stream(self) -> AsyncIterator[bytes]:
        """The body of the answer."""
        self.state.sse_clients += 1
        client = redis.asyncio.Redis.from_url(
            self.bus, socket_timeout=5, socket_connect_timeout=2, retry=Retry(NoBackoff(), 0)
        )
        try:
            yield b": welcome\n\n"
            spoke = time.monotonic()
            while not self.state.closing():
                try:
                    lost, entries = await self._read(client)
                    # While the bus was away, the control plane may have ended the run by itself.
                    missed = self.outage.active
                    happened = await run_in_threadpool(self._events_of, lost, entries, missed)
                except (redis.RedisError, StoreUnavailableError) as error:
                    lost, entries, happened = False, [], []
                    await asyncio.sleep(self.outage.failed(error))
                else:
                    self.outage.over()
                    if self.ended and not entries and not happened:
                        return
                for chunk in self._encoded(happened, entries):
                    yield chunk
                    spoke = time.monotonic()
                if time.monotonic() - spoke > _COMMENT_S:
                    yield b": still here\n\n"
                    spoke = time.monotonic()
                if entries:
                    await asyncio.sleep(_PAUSE_S)
        finally:
            self.state.sse_clients -= 1
            with anyio.CancelScope(shield=True):  # a client that left cancelled us
                await client.aclose()

    async def _read(self, client: redis.asyncio.Redis) -> tuple[bool, list[Entry]]:
        """Whether entries were lost before we read them, and the next ones."""
        stream = live(self.run)
        answer: Any = await client.xread({stream: self.position}, _ENTRIES, _BLOCK_MS)
        if not answer:
            return False, []
        [(_, entries)] = answer
        # The oldest go first: while our last one is still there, nothing after it is gone.
        if self.position == BEGINNING:
            info: Any = await client.xinfo_stream(stream)
            lost = info["entries-added"] > info["length"]
        else:
            lost = not await client.xrange(stream, self.position, self.position, 1)
        return lost, entries

    def _events_of(self, lost: bool, entries: list[Entry], missed: bool) -> list[Event]:
        """The events of some entries, and the run itself if something about it was `missed`."""
        if lost:
            return [{"type": "reset"}]
        messages = list(_decoded(entries))
        happened: list[Event] = []
        with self.store.read() as connection:
            key = runs_store.key_of(connection, self.run)
            happened += self._steps(connection, key, messages)
            happened += self._segments(connection, key, messages)
        switched = False
        for message in messages:
            if isinstance(message, Adopted):
                switched |= message.segment.version != self.version
                self.version = message.segment.version
            switched |= isinstance(message, SwitchRequested)
        if switched:
            rows = switches.rows(self.store, self.run)
            happened += [{"type": "switch", **row} for row in rows]
        if missed or any(not isinstance(message, _NOT_OF_RUN) for message in messages):
            row = runs_store.get(self.store, self.run)
            self.ended, self.world = row["state"] in ENDED, row["world"]
            happened.append({"type": "run", **row})
        return happened

    def _segments(
        self, connection: Connection, key: int, messages: list[Message]
    ) -> Iterator[Event]:
        """The segments of some messages as they are stored: the database knows their fallbacks."""
        named = [
            (message.attempt, message.segment.seq)
            if isinstance(message, Adopted)
            else (message.attempt, message.segment)
            for message in messages
            if isinstance(message, Adopted | Fallback)
        ]
        for row in segments.shown(connection, key, named):
            yield {"type": "segment", **row}

    def _steps(self, connection: Connection, key: int, messages: list[Message]) -> Iterator[Event]:
        named = {
            record.step
            for message in messages
            if isinstance(message, StepBatch)
            for record in message.records
        }
        order = sorted(named)
        at_once = reads.shown_steps(self.world, _STEPS_PER_EVENT)
        every = reads.shown_every(self.world)
        for i in range(0, len(order), at_once):
            wanted = order[i : i + at_once]
            complete, cells = reads.new_steps(connection, key, wanted, self.sent, every)
            if complete["step"]:
                self.sent.update(zip(complete["step"], complete["ended_at"], strict=True))
                yield {"type": "steps", **complete}
                yield {"type": "worker_steps", **cells}
        while len(self.sent) > _REMEMBERED:
            del self.sent[next(iter(self.sent))]

    def _encoded(self, happened: list[Event], entries: list[Entry]) -> Iterator[bytes]:
        """As server-sent events. Who has them all goes on behind the entries, others before."""
        before = self.position
        if entries:
            self.position = entries[-1][0].decode()
        for i, event in enumerate(happened):
            position = self.position if i == len(happened) - 1 else before
            yield b"event: message\nid: %s\ndata: %s\n\n" % (position.encode(), orjson.dumps(event))


def _decoded(entries: list[Entry]) -> Iterator[Message]:
    for number, fields in entries:
        try:
            yield decode(fields)[1]
        except WireError as error:
            log.warning("entry %s is left out: %s", number.decode(), error)
