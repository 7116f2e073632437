"""Many event streams, slow ones, and too many of one client."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from paceline.wire import RunChanged, StepBatch, live
from paceline.wire.bus import publish
from paceline_backend.api.live.changes import Changes
from paceline_backend.api.live.reader import Follower, Reader
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.store import Store, telemetry
from support.records import add_run, hello, record
from support.waiting import DEADLINE_S, until
from support.web import ADMIN, SIGNED_IN, serving

RUNS = ["r0", "r1", "r2"]
MOST_CONNECTIONS = 5


def committed(store: Store, bus: redis.Redis, run: str, step: int) -> None:
    """A step of both ranks as ingest stores and publishes it."""
    both = StepBatch([record(step, 0), record(step, 1)])
    telemetry.write(store, [(run, hello()), (run, both)])
    publish(bus, live(run), both, run)


def connections(bus: redis.Redis) -> int:
    """How many connections the bus has, but for the test's own."""
    return len(bus.client_list()) - 1


class Pages:
    """Many clients in one thread."""

    def __init__(self, url: str, streams: int) -> None:
        self.url = url
        self.streams = streams
        self.open = 0
        self.steps: Counter[int] = Counter()  # step → clients that were told about it

    async def follow(self, http: httpx.AsyncClient, run: str) -> None:
        async with http.stream("GET", f"{self.url}/api/v1/runs/{run}/events") as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith(": welcome"):
                    self.open += 1
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if event["type"] == "steps":
                        self.steps.update(set(event["step"]))

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            timeout=120, limits=limits, trust_env=False, headers=SIGNED_IN
        ) as http:
            tasks = [
                asyncio.create_task(self.follow(http, RUNS[i % len(RUNS)]))
                for i in range(self.streams)
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                done = await asyncio.gather(*tasks, return_exceptions=True)
                assert {type(end) for end in done} == {asyncio.CancelledError}, done

    async def all_open(self) -> None:
        await asyncio.to_thread(until, lambda: self.open == self.streams, "all streams", 120)

    async def all_told(self, step: int) -> None:
        reached = lambda: self.steps[step] == self.streams  # noqa: E731
        await asyncio.to_thread(until, reached, f"step {step} on all pages", 120)


@pytest.mark.parametrize("streams", [40, pytest.param(500, marks=pytest.mark.long)])
def test_many_streams_share_few_connections(store: Store, tmp_path: Path, streams: int) -> None:
    """Also after the bus was away."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for run in RUNS:
        add_run(store, run)

    async def watched(bus: EmbeddedBus, url: str) -> None:
        pages = Pages(url, streams)
        async with pages.following():
            await pages.all_open()
            for step in range(2):
                with redis.Redis.from_url(bus.url) as client:
                    for run in RUNS:
                        await asyncio.to_thread(committed, store, client, run, step)
                    await pages.all_told(step)
                    assert connections(client) <= MOST_CONNECTIONS
                if step == 0:
                    await asyncio.to_thread(bus.kill)
                    await asyncio.to_thread(bus.start)

    with (
        EmbeddedBus(tmp_path / "bus") as bus,
        serving(store, bus.url, max_streams=streams) as client,
    ):
        asyncio.run(watched(bus, str(client.base_url)))
        until(lambda: _followers(client) == 0, "all streams are closed")


def test_the_first_questions_after_an_outage_are_answered(store: Store, tmp_path: Path) -> None:
    """A page that does not learn its position starts anew once more."""

    async def asked(bus: EmbeddedBus, wanted: list[str]) -> None:
        reader = Reader(store, bus.url)
        try:
            for _ in range(2):
                # As many at once as take all connections, which the bus closes when it is killed.
                assert await asyncio.gather(*map(reader.position, RUNS * 4)) == wanted * 4
                await asyncio.to_thread(bus.kill)
                await asyncio.to_thread(bus.start)
        finally:
            await reader.close()

    with EmbeddedBus(tmp_path / "bus") as bus:
        with redis.Redis.from_url(bus.url) as client:
            wanted = [client.xadd(live(run), {"v": "1"}).decode() for run in RUNS]
        asyncio.run(asked(bus, wanted))


@contextmanager
def opened(url: httpx.URL, path: str) -> Iterator[socket.socket]:
    """A browser that has asked for a page and reads only what the test reads."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(DEADLINE_S)
        connection.connect((url.host, url.port))
        head = f"Host: {url.host}\r\nAuthorization: Bearer {ADMIN}"
        connection.sendall(f"GET {path} HTTP/1.1\r\n{head}\r\n\r\n".encode())
        yield connection


def heard_until(connection: socket.socket, word: bytes) -> bytes:
    """What came until the word did."""
    heard = bytearray()
    while word not in heard[-2 * 2**16 :]:
        piece = connection.recv(2**16)
        assert piece, "the server closed the stream"
        heard += piece
    return bytes(heard)


def test_a_slow_browser_is_told_to_start_anew(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Follower, "most_bytes", 1_000_000)
    events, size = 30, 1_000_000
    add_run(store, "r", args=["x" * size])  # so a `run` event has a megabyte
    path = "/api/v1/runs/r/events"
    with (
        serving(store, bus_url) as client,
        redis.Redis.from_url(bus_url) as bus,
        opened(client.base_url, path) as slow,
        opened(client.base_url, path) as fast,
    ):
        heard_until(slow, b": welcome")
        heard_until(fast, b": welcome")
        for _ in range(events):
            publish(bus, live("r"), RunChanged(), "r")
            heard_until(fast, b'"type":"run"')
        heard = heard_until(slow, b'"reset"')
        assert len(heard) < events * size / 2, "all of it waited in the server's memory"
        assert "paceline_event_streams_reset_total 1.0" in client.get("/metrics").text
        publish(bus, live("r"), RunChanged(), "r")
        heard_until(slow, b'"type":"run"')


def test_streams_of_a_client_are_limited(store: Store, bus_url: str) -> None:
    add_run(store, "r")
    path = "/api/v1/runs/r/events"
    with serving(store, bus_url, max_streams=2) as client:
        with ExitStack() as stack:
            pages = [stack.enter_context(opened(client.base_url, path)) for _ in range(2)]
            for page in pages:
                heard_until(page, b": welcome")
            refused = client.get(path)
            assert refused.status_code == 429
            assert refused.headers["content-type"] == "application/problem+json"
            assert refused.headers["retry-after"] == "5"
            assert "2 event streams" in refused.json()["detail"]
            assert "--max-streams" in refused.json()["detail"]
            assert "paceline_event_streams_refused_total 1.0" in client.get("/metrics").text
        until(lambda: _followers(client) == 0, "both pages are gone")
        with opened(client.base_url, path) as page:
            heard_until(page, b": welcome")


def test_a_page_that_joins_others_misses_no_step(store: Store, bus_url: str) -> None:
    """The others were told of the step between the newcomer's snapshot and its stream."""
    add_run(store, "r")
    first, second = StepBatch([record(0, 0)]), StepBatch([record(0, 1)])
    path = "/api/v1/runs/r"
    with (
        serving(store, bus_url) as client,
        redis.Redis.from_url(bus_url) as bus,
        opened(client.base_url, f"{path}/events") as other,
    ):
        heard_until(other, b": welcome")
        telemetry.write(store, [("r", hello()), ("r", first)])
        stamp = publish(bus, live("r"), hello(), "r").decode()  # the newcomer's snapshot: no step
        heard_until(other, b'"type":"run"')
        telemetry.write(store, [("r", second)])
        since = publish(bus, live("r"), first, "r").decode()
        heard_until(other, b'"type":"steps"')
        assert stamp < since
        with opened(client.base_url, f"{path}/events?since={since}") as newcomer:
            heard_until(newcomer, b": welcome")
            until(lambda: _followers(client) == 2, "the newcomer's stream")
            publish(bus, live("r"), second, "r")
            heard_until(newcomer, b'"type":"steps"')


def test_a_slow_run_holds_up_no_other(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the database answers for one run, others' clients are told."""
    began, go_on, events_of = threading.Event(), threading.Event(), Changes.of

    def slow(self: Changes, *given: Any) -> Any:
        if self.run == "r0":
            began.set()
            assert go_on.wait(DEADLINE_S)
        return events_of(self, *given)

    monkeypatch.setattr(Changes, "of", slow)
    for run in RUNS[:2]:
        add_run(store, run)
    path = "/api/v1/runs/{}/events"
    with (
        serving(store, bus_url) as client,
        redis.Redis.from_url(bus_url) as bus,
        opened(client.base_url, path.format("r0")) as stuck,
        opened(client.base_url, path.format("r1")) as other,
    ):
        try:
            for page in (stuck, other):
                heard_until(page, b": welcome")
            publish(bus, live("r0"), RunChanged(), "r0")
            assert began.wait(DEADLINE_S)
            publish(bus, live("r1"), RunChanged(), "r1")
            heard_until(other, b'"type":"run"')
        finally:
            go_on.set()
        heard_until(stuck, b'"type":"run"')


def test_a_fault_of_the_reader_does_not_end_the_streams(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    rounds = Reader._round

    async def once_failing(self: Reader) -> bool:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("of this test")
        return await rounds(self)

    monkeypatch.setattr(Reader, "_round", once_failing)
    add_run(store, "r")
    with (
        serving(store, bus_url) as client,
        redis.Redis.from_url(bus_url) as bus,
        opened(client.base_url, "/api/v1/runs/r/events") as page,
    ):
        heard_until(page, b": welcome")
        assert failed.wait(DEADLINE_S)
        publish(bus, live("r"), RunChanged(), "r")
        heard_until(page, b'"type":"run"')


def _followers(client: httpx.Client) -> int:
    text = client.get("/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("paceline_sse_clients ")]
    return int(float(line.split()[1]))
