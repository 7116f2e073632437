"""A run's events: real ingest behind, a real HTTP client in front."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import sqlalchemy as sa

from paceline.wire import TELEMETRY, Fallback, Message, RunState, State, StepBatch, live
from paceline.wire.bus import publish
from paceline_backend.api.live import reader
from paceline_backend.control.ingest import Ingest
from paceline_backend.control.silence import Sweep
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.store import Store, runs, schema, telemetry
from support.ingesting import said
from support.records import add_run, adopted, hello, record
from support.waiting import DEADLINE_S, until
from support.web import ANY, serving

RUN = "r"


@pytest.fixture
def client(store: Store, bus_url: str) -> Iterator[httpx.Client]:
    """Server and ingest over one run."""
    add_run(store, RUN, node="n")
    stop = threading.Event()
    ingest = threading.Thread(target=Ingest(store, bus_url, "test").run, args=(stop,))
    ingest.start()
    with serving(store, bus_url) as opened:
        yield opened
    stop.set()
    ingest.join(timeout=DEADLINE_S)


@pytest.fixture
def bus(bus_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(bus_url) as opened:
        yield opened


@dataclass
class Events:
    """What one client received."""

    items: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def read(self, response: httpx.Response) -> None:
        try:
            for line in response.iter_lines():
                self.begun.set()
                if line.startswith("id: "):
                    self.ids.append(line[4:])
                elif line.startswith("data: "):
                    self.items.append(json.loads(line[6:]))
        finally:
            self.ended.set()

    def steps(self) -> list[int]:
        """Those that were told, each once: what is stored while a client comes is told again."""
        numbers = (step for item in self.items if item["type"] == "steps" for step in item["step"])
        return list(dict.fromkeys(numbers))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [item for item in self.items if item["type"] == kind]


@contextmanager
def following(client: httpx.Client, **params: str) -> Iterator[Events]:
    """A client that reads events until the block ends."""
    events = Events()
    own = httpx.Client(
        base_url=client.base_url, headers=client.headers, timeout=DEADLINE_S, trust_env=False
    )
    with own, own.stream("GET", f"/api/v1/runs/{RUN}/events", params=params) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        reader = threading.Thread(target=_quietly, args=(events, response))
        reader.start()
        assert events.begun.wait(DEADLINE_S)
        yield events
        connection = response.extensions["network_stream"].get_extra_info("socket")
        with suppress(OSError):  # the server may have closed it before
            connection.shutdown(socket.SHUT_RDWR)
        reader.join(timeout=DEADLINE_S)
        assert not reader.is_alive()


def _quietly(events: Events, response: httpx.Response) -> None:
    with suppress(httpx.TransportError):  # the block ended while we read
        events.read(response)


def tell(bus: redis.Redis, *messages: Message) -> None:
    for message in messages:
        publish(bus, TELEMETRY, message, RUN)


def step(number: int, rank: int, **fields: Any) -> Message:
    return StepBatch([record(number, rank, **fields)])


def test_events_follow_the_snapshot(client: httpx.Client, bus: redis.Redis) -> None:
    tell(bus, hello(), step(0, 0), step(0, 1))
    url = f"/api/v1/runs/{RUN}"
    until(lambda: client.get(url).json()["step"] == 0, "step 0 is not stored")
    until(lambda: len(said(bus, live(RUN))) == 3, "not published")
    snapshot = client.get(f"{url}/snapshot").json()
    assert snapshot["steps"]["step"] == [0]
    tell(bus, step(1, 0), step(1, 1))  # between the snapshot and the stream
    with following(client, since=snapshot["since"]) as events:
        until(lambda: events.steps() == [1], "what happened before the stream opened is missing")
        tell(bus, step(2, 0))
        tell(bus, adopted(0, 0))
        until(lambda: events.of("segment"), "no segment")
        assert events.steps() == [1], "step 2 is not complete"
        tell(bus, step(2, 1))
        until(lambda: events.steps() == [1, 2], "step 2 was not told")
        until(lambda: events.of("worker_steps")[-1]["step"] == [2, 2], "its cells were not told")
    (event,) = [item for item in events.of("steps") if item["step"] == [2]]
    stored = client.get(f"{url}/steps", params={"from": 2}).json()
    assert {name: event[name] for name in event if name != "type"} == {
        name: stored[name] for name in stored if name not in ("from", "to", "bucket")
    }
    cells = events.of("worker_steps")[-1]
    assert cells["rank"] == [0, 1]
    assert cells["compute_s"] == [0.1, 0.2]
    assert cells["wait_s"] == [0.0, 0.0]
    segment = events.of("segment")[0]
    assert {**segment} == {"type": "segment", **client.get(f"{url}/segments").json()[0]}
    with following(client, since=snapshot["since"]) as events:
        tell(bus, Fallback(0, 0, "the script has two optimisers"))
        until(lambda: events.of("segment")[-1:] not in ([], [segment]), "no fallback")
        assert events.of("segment")[-1] == {**segment, "fallback": "the script has two optimisers"}
        assert events.of("run") == []


def test_a_client_that_comes_back_misses_nothing(client: httpx.Client, bus: redis.Redis) -> None:
    tell(bus, hello())
    seen: list[int] = []
    position = "0-0"
    for number in range(6):
        tell(bus, step(number, 0), step(number, 1))
        with following(client, since=position) as events:
            until(lambda n=number: n in events.steps(), f"step {number} is missing")  # type: ignore[misc]
        seen += events.steps()
        position = events.ids[-1]
    assert sorted(set(seen)) == list(range(6))


def test_switches_and_their_effect(client: httpx.Client, bus: redis.Redis) -> None:
    tell(bus, hello())
    with following(client, since="0-0") as events:
        client.post(f"/api/v1/runs/{RUN}/policy", json={"policy": "chronica"}, headers=ANY)
        until(lambda: any(s["version"] == 1 for s in events.of("switch")), "no switch")
        assert events.of("switch")[-1]["effective_step"] is None
        until(lambda: events.of("run")[-1]["policy"] == "chronica", "the run has the old policy")
        tell(bus, adopted(0, 8, version=1, policy="chronica"))
        until(lambda: events.of("switch")[-1]["effective_step"] == 8, "no effect")


def test_a_trimmed_stream_resets_the_client(client: httpx.Client, bus: redis.Redis) -> None:
    tell(bus, hello())
    for number in range(5):  # in an entry of its own at least
        tell(bus, step(number, 0), step(number, 1))
        count = 1 + 2 * (number + 1)
        until(lambda count=count: len(said(bus, live(RUN))) == count, "not published")  # type: ignore[misc]
    oldest = bus.xrange(live(RUN), count=1)[0][0].decode()
    bus.xtrim(live(RUN), maxlen=3, approximate=False)
    for position in (oldest, "0-0"):
        with following(client, since=position) as events:
            until(lambda: events.items, "nothing came")  # type: ignore[misc]
        assert events.items[0] == {"type": "reset"}
        with following(client, since=events.ids[0]) as after:
            tell(bus, step(9, 0), step(9, 1))
            until(lambda: 9 in after.steps(), "nothing comes after a reset")  # type: ignore[misc]
        assert not after.of("reset")
        bus.xtrim(live(RUN), maxlen=1, approximate=False)


def test_the_stream_ends_with_the_run(client: httpx.Client, bus: redis.Redis) -> None:
    tell(bus, hello())
    with following(client, since="0-0") as events:
        tell(bus, step(0, 0), step(0, 1), RunState(State.FINISHED, 5.0, "n", exit_code=0))
        assert events.ended.wait(DEADLINE_S), "the stream goes on"
    assert events.of("run")[-1]["state"] == "finished"
    assert events.steps() == [0]
    url = f"/api/v1/runs/{RUN}/events"
    again = client.get(url, headers={"Last-Event-ID": events.ids[-1]})
    assert again.status_code == 204, "a browser that comes back shall stop"
    with following(client, since="0-0") as replay:
        assert replay.ended.wait(DEADLINE_S)
    assert replay.steps() == [0]
    assert replay.ids[-1] == events.ids[-1]
    assert set(replay.ids[:-1]) == {"0-0"}, "who leaves amid a batch gets the rest when he is back"


def test_the_stream_ends_when_the_server_itself_ends_the_run(
    client: httpx.Client, store: Store, bus_url: str
) -> None:
    with following(client, since="0-0") as events:
        with store.write() as connection:
            connection.execute(sa.update(schema.runs).values(state="running"))
        sweep = Sweep(store, bus_url, silent_s=1e-9)
        assert sweep.look() == []
        assert sweep.look() == [RUN]
        assert events.ended.wait(DEADLINE_S), "the stream goes on"
    assert events.of("run")[-1]["state"] == "failed"


def test_open_streams_do_not_hold_shutdown(
    store: Store, bus_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    add_run(store, RUN)
    with ExitStack() as stack:
        with serving(store, bus_url) as client:
            events = stack.enter_context(following(client))
            assert "paceline_sse_clients 1.0" in client.get("/metrics").text
            assert not events.ended.is_set()
        assert events.ended.wait(DEADLINE_S)
    assert "timeout graceful shutdown exceeded" not in caplog.text, "uvicorn cancelled the stream"


def test_a_bus_that_dies_interrupts_nothing(store: Store, tmp_path: Path) -> None:
    add_run(store, RUN)
    with (
        EmbeddedBus(tmp_path / "bus") as bus,
        serving(store, bus.url) as client,
        following(client) as events,
    ):
        bus.kill()
        bus.start()
        with redis.Redis.from_url(bus.url) as again:
            telemetry.write(store, [(RUN, hello())])
            publish(again, live(RUN), hello(), RUN)
        until(lambda: events.of("run"), "nothing comes after the bus came back")
        assert not events.ended.is_set()


def test_a_client_hears_that_the_bus_is_away(store: Store, tmp_path: Path) -> None:
    add_run(store, RUN)
    with (
        EmbeddedBus(tmp_path / "bus") as bus,
        serving(store, bus.url) as client,
        following(client) as events,
    ):
        for _ in range(2):
            bus.kill()
            until(lambda: waits(events) == "bus", "nobody says that the bus is away")
            with following(client) as late:  # a page that is opened meanwhile
                until(partial(waits, late), "only those who were there hear it")
                assert waits(late) == "bus"
            bus.start()
            until(lambda: waits(events) is None, "nobody says that the bus is back")
        assert not events.ended.is_set()


def test_a_client_hears_that_the_database_is_away(store: Store, bus_url: str) -> None:
    add_run(store, RUN)
    path = Path(str(store.url.database))
    with serving(store, bus_url) as client, following(client) as events:
        until(lambda: client.get("/readyz").json()["database"] == "ok", "the database")
        path.rename(path.with_suffix(".away"))
        until(lambda: waits(events) == "database", "nobody says that the database is away")
        path.with_suffix(".away").rename(path)
        until(lambda: waits(events) is None, "nobody says that the database is back")
        assert not events.ended.is_set()


def test_a_client_hears_that_the_database_hangs(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_run(store, RUN)
    asked: list[Store] = []
    answers = threading.Event()

    def ask(of: Store) -> None:
        asked.append(of)
        answers.wait(DEADLINE_S)

    monkeypatch.setattr(reader.meta, "ask", ask)
    monkeypatch.setattr(reader, "_ANSWER_S", 0.5)
    with serving(store, bus_url) as client, following(client) as events:
        try:
            until(lambda: waits(events) == "database", "nobody says that the database hangs")
            assert len(asked) == 1, "each question takes a thread until it is answered"
        finally:
            answers.set()
        until(lambda: waits(events) is None, "nobody says that the database answers again")
        assert not events.ended.is_set()


def waits(events: Events) -> str | None:
    """What the server waits for, as it said last."""
    return next((each["for"] for each in reversed(events.of("waiting"))), None)


def test_a_snapshot_without_a_bus_is_followed_by_a_new_one(store: Store, tmp_path: Path) -> None:
    """Nobody knows the position that such a snapshot has: the whole stream is not told again."""
    add_run(store, RUN)
    url = f"/api/v1/runs/{RUN}/snapshot"
    with EmbeddedBus(tmp_path / "bus") as bus, serving(store, bus.url) as client:
        with redis.Redis.from_url(bus.url) as own:
            tell_stored(store, own, hello())
            tell_stored(store, own, step(0, 0), step(0, 1))
        bus.kill()
        snapshot = client.get(url).json()
        assert snapshot["steps"]["step"] == [0]
        with following(client, since=snapshot["since"]) as events:
            bus.start()
            until(lambda: events.of("reset"), "the client does not start anew")
            assert events.steps() == []
        with following(client, since=client.get(url).json()["since"]) as events:
            with redis.Redis.from_url(bus.url) as own:
                tell_stored(store, own, step(1, 0), step(1, 1))
            until(lambda: events.steps(), "nothing comes after the outage")
        assert events.steps() == [1]
        assert not events.of("reset")


def test_a_bus_that_lost_its_data_resets_clients_at_once(store: Store, tmp_path: Path) -> None:
    """Also where nothing is published any more, as of a run that hangs."""
    add_run(store, RUN)
    with EmbeddedBus(tmp_path / "bus") as bus, serving(store, bus.url) as client:
        with redis.Redis.from_url(bus.url) as own:
            tell_stored(store, own, hello())
        with following(client) as events:
            with redis.Redis.from_url(bus.url) as own:
                tell_stored(store, own, step(0, 0), step(0, 1))
            until(lambda: events.steps(), "the client has caught up")
            bus.kill()
            for file in (tmp_path / "bus" / "appendonlydir").iterdir():
                file.unlink()
            bus.start()
            until(lambda: events.of("reset"), "what was lost stays unknown")


def tell_stored(store: Store, bus: redis.Redis, *messages: Message) -> None:
    """As ingest does: commits, then publishes."""
    telemetry.write(store, [(RUN, message) for message in messages])
    for message in messages:
        publish(bus, live(RUN), message, RUN)


def test_a_run_that_ended_while_the_bus_was_away(store: Store, tmp_path: Path) -> None:
    """Nobody could publish the end: the stream asks the database when the bus is back."""
    add_run(store, RUN)
    with (
        EmbeddedBus(tmp_path / "bus") as bus,
        serving(store, bus.url) as client,
        following(client) as events,
    ):
        bus.kill()
        with store.write() as connection:
            assert runs.end(connection, RUN, State.STOPPED, "stopped before it started")
        bus.start()
        assert events.ended.wait(DEADLINE_S), "the stream goes on"
    assert events.of("run")[-1]["state"] == "stopped"
