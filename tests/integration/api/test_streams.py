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

import httpx
import pytest
import redis

from paceline.wire import CHANGES, StepBatch
from paceline_backend.api.change_reader import ChangeReader, PendingEvent
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
    changed(bus, run, step)


def changed(bus: redis.Redis, run: str, step: int | None = None) -> None:
    """What ingest publishes for open pages."""
    bus.xadd(CHANGES, {run: "" if step is None else step})


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
                    if event.get("step") is not None:
                        self.steps[event["step"]] += 1

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


def test_a_slow_browser_gets_one_event_of_all_that_it_missed() -> None:
    async def follow() -> None:
        follower = PendingEvent()
        assert follower.take() is None
        for step, revision in ((7, 0), (None, 1), (5, 1), (8, 2)):
            follower.put({"type": "change", "step": step, "revision": revision})
        await follower.wait(DEADLINE_S)
        assert follower.take() == {"type": "change", "step": 5, "revision": 2}
        assert follower.take() is None
        follower.put({"type": "end", "step": None, "revision": 2})
        follower.end()
        assert follower.is_last
        assert follower.take() == {"type": "end", "step": None, "revision": 2}

    asyncio.run(follow())


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


def test_a_fault_of_the_reader_does_not_end_the_streams(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    follow = ChangeReader._follow

    async def once_failing(self: ChangeReader) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("of this test")
        await follow(self)

    monkeypatch.setattr(ChangeReader, "_follow", once_failing)
    add_run(store, "r")
    with (
        serving(store, bus_url) as client,
        redis.Redis.from_url(bus_url) as bus,
        opened(client.base_url, "/api/v1/runs/r/events") as page,
    ):
        heard_until(page, b": welcome")
        assert failed.wait(DEADLINE_S)
        heard_until(page, b'"type":"change"')
        changed(bus, "r", 3)
        heard_until(page, b'"step":3')


def _followers(client: httpx.Client) -> int:
    text = client.get("/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("paceline_sse_clients ")]
    return int(float(line.split()[1]))
