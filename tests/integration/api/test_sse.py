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

from paceline.wire import (
    CHANGES,
    TELEMETRY,
    Evaluation,
    Fallback,
    Message,
    RunState,
    State,
    StepBatch,
)
from paceline.wire.bus import publish
from paceline_backend.api import change_reader
from paceline_backend.control.ingest import Ingest
from paceline_backend.control.silent_runs import SilentRuns
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.store import Store, runs, schema, telemetry
from support.records import add_run, adopted, hello, record
from support.waiting import DEADLINE_S, until
from support.web import ANY, serving

RUN = "r"


@pytest.fixture
def client(store: Store, bus_url: str) -> Iterator[httpx.Client]:
    """Server and ingest over one run."""
    add_run(store, RUN, node="n", max_restarts=1)
    stop = threading.Event()
    ingest = threading.Thread(target=Ingest(store, bus_url, "test").run, args=(stop,))
    ingest.start()
    with serving(store, bus_url) as opened:
        yield opened
    stop.set()
    ingest.join(timeout=DEADLINE_S)


@dataclass
class Events:
    """What one client received."""

    items: list[dict[str, Any]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def read(self, response: httpx.Response) -> None:
        try:
            for line in response.iter_lines():
                self.begun.set()
                if line.startswith("data: "):
                    self.items.append(json.loads(line[6:]))
        finally:
            self.ended.set()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [item for item in self.items if item["type"] == kind]

    def steps(self) -> set[int]:
        """The earliest new step of each event that names one."""
        return {item["step"] for item in self.items if item.get("step") is not None}


def new(client: httpx.Client, since: int) -> dict[str, Any]:
    """What a client asks for that has a view up to a step."""
    answer: dict[str, Any] = client.get(f"/api/v1/runs/{RUN}/view", params={"since": since}).json()
    return answer


@contextmanager
def following(client: httpx.Client) -> Iterator[Events]:
    """A client that reads events until the block ends."""
    events = Events()
    own = httpx.Client(
        base_url=client.base_url, headers=client.headers, timeout=DEADLINE_S, trust_env=False
    )
    with own, own.stream("GET", f"/api/v1/runs/{RUN}/events") as response:
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


def test_an_event_names_the_step_from_which_on_to_ask(
    client: httpx.Client, bus: redis.Redis
) -> None:
    tell(bus, hello(), step(0, 0), step(0, 1))
    url = f"/api/v1/runs/{RUN}"
    until(lambda: client.get(url).json()["step"] == 0, "step 0 is not stored")
    assert client.get(f"{url}/view", params={"last": 5}).json()["steps"]["step"] == [0]
    tell(bus, step(1, 0), step(1, 1))  # between the view and the stream
    until(lambda: client.get(url).json()["step"] == 1, "step 1 is not stored")
    with following(client) as events:
        assert new(client, 0)["steps"]["step"] == [1]
        tell(bus, step(2, 0), adopted(0, 0))
        until(lambda: new(client, 1)["segments"], "no segment")
        assert new(client, 1)["steps"]["step"] == [], "step 2 is not complete"
        tell(bus, step(2, 1))
        until(lambda: new(client, 1)["steps"]["step"] == [2], "step 2 is not stored")
        # Events are merged, so the one of step 1 may have come late and name step 1.
        until(lambda: min(events.steps(), default=3) <= 2, "step 2 was not told")
    (event, *_) = events.of("change")
    assert event["revision"] == client.get(url).json()["revision"]
    answer = new(client, 1)
    stored = client.get(f"{url}/steps", params={"from": 2}).json()
    assert answer["steps"]["ended_at"] == stored["ended_at"]
    assert answer["worker_steps"]["ranks"] == [0, 1]
    assert answer["worker_steps"]["compute_s"] == [[0.1], [0.2]]
    assert answer["heat"]["step"] == [2]
    assert answer["segments"] == client.get(f"{url}/segments").json()
    assert new(client, 2)["steps"]["step"] == new(client, 2)["heat"]["step"] == []
    with following(client) as events:
        tell(bus, Fallback(0, 0, "the script has two optimisers"))
        until(lambda: events.of("change"), "no event")
        until(lambda: new(client, 2)["segments"][-1]["fallback"] != "", "no fallback")


def test_steps_that_are_trained_again_are_new(
    client: httpx.Client, store: Store, bus: redis.Redis
) -> None:
    # Without the bus, so that no late event names one of these steps.
    first = [record(number, rank) for number in range(4) for rank in range(2)]
    telemetry.write(store, [(RUN, hello()), (RUN, StepBatch(first))])
    with following(client) as events:
        until(lambda: events.items, "the server has read the bus")
        tell(bus, hello(attempt=1, step=2), step(2, 0, attempt=1), step(2, 1, attempt=1))
        until(lambda: 2 in events.steps() or 0 in events.steps(), "step 2 was not told")
    assert new(client, 1)["run"]["attempt"] == 1
    assert new(client, 1)["steps"]["step"] == [2, 3]


def test_evaluations_are_part_of_what_is_new(client: httpx.Client, bus: redis.Redis) -> None:
    tell(bus, hello(), step(0, 0), step(0, 1))
    with following(client) as events:
        tell(bus, Evaluation(0, 0, 0, 0, 16, 5.0, None, {"accuracy": 0.5}))
        until(lambda: new(client, 0)["evaluations"], "no evaluation")
        until(lambda: events.of("change"), "no event")
    assert new(client, 0)["evaluations"][0]["metrics"] == {"accuracy": 0.5}
    assert "evaluations" not in client.get(f"/api/v1/runs/{RUN}/view").json()


def test_what_a_client_asks_for_is_bounded(client: httpx.Client, store: Store) -> None:
    both = [record(number, rank) for number in range(2_100) for rank in range(2)]
    telemetry.write(store, [(RUN, hello()), (RUN, StepBatch(both))])
    assert new(client, 1_999)["steps"]["step"] == [*range(2_000, 2_100)]
    assert new(client, -1)["steps"]["step"] == [*range(100, 2_100)]


def test_switches_and_their_effect(client: httpx.Client, bus: redis.Redis) -> None:
    tell(bus, hello())
    with following(client) as events:
        client.post(f"/api/v1/runs/{RUN}/policy", json={"policy": "chronica"}, headers=ANY)
        until(lambda: [each["revision"] for each in events.of("change")][-1:] == [1], "no revision")
        assert new(client, -1)["switches"][-1]["effective_step"] is None
        assert new(client, -1)["run"]["policy"] == "chronica"
        count = len(events.items)
        tell(bus, adopted(0, 8, version=1, policy="chronica"))
        until(lambda: len(events.items) > count, "no event")
        until(lambda: new(client, -1)["switches"][-1]["effective_step"] == 8, "no effect")


def test_the_stream_ends_with_the_run(client: httpx.Client, bus: redis.Redis) -> None:
    tell(bus, hello())
    with following(client) as events:
        tell(bus, step(0, 0), step(0, 1), RunState(State.FINISHED, 5.0, "n", exit_code=0))
        assert events.ended.wait(DEADLINE_S), "the stream goes on"
    assert events.items[-1]["type"] == "end"
    assert new(client, -1)["run"]["state"] == "finished"
    assert new(client, -1)["steps"]["step"] == [0]
    with following(client) as again:
        assert again.ended.wait(DEADLINE_S)
    assert [item["type"] for item in again.items] == ["end"]


def test_the_stream_ends_when_the_server_itself_ends_the_run(
    client: httpx.Client, store: Store, bus_url: str
) -> None:
    with following(client) as events:
        with store.write() as connection:
            connection.execute(sa.update(schema.runs).values(state="running"))
        silent = SilentRuns(store, silent_s=1e-9)
        with redis.Redis.from_url(bus_url) as bus:
            assert silent.look(bus) == []
            assert silent.look(bus) == [RUN]
        assert events.ended.wait(DEADLINE_S), "the stream goes on"
    assert events.items[-1]["type"] == "end"
    assert client.get(f"/api/v1/runs/{RUN}").json()["state"] == "failed"


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


def test_a_client_hears_that_the_database_is_away(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_reader, "_CHECK_S", 0.1)
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

    monkeypatch.setattr(change_reader.meta, "ask", ask)
    monkeypatch.setattr(change_reader, "_ANSWER_S", 0.5)
    monkeypatch.setattr(change_reader, "_CHECK_S", 0.1)
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


def test_a_bus_that_lost_its_data_makes_clients_ask(store: Store, tmp_path: Path) -> None:
    """Also where nothing is published any more, as of a run that hangs."""
    add_run(store, RUN)
    with (
        EmbeddedBus(tmp_path / "bus") as bus,
        serving(store, bus.url) as client,
        following(client) as events,
    ):
        until(lambda: events.items, "the server has read the bus")
        with redis.Redis.from_url(bus.url) as own:
            tell_stored(store, own, hello(), step(0, 0), step(0, 1))
        until(lambda: 0 in events.steps(), "the client has caught up")
        count = len(events.of("change"))
        bus.kill()
        for file in (tmp_path / "bus" / "appendonlydir").iterdir():
            file.unlink()
        bus.start()
        until(lambda: len(events.of("change")) > count, "what was lost stays unknown")


def test_a_run_that_is_deleted_ends_its_streams(
    client: httpx.Client, store: Store, bus: redis.Redis
) -> None:
    with following(client) as events:
        with store.write() as connection:
            connection.execute(sa.update(schema.runs).values(pruned_at=5.0))
        bus.xadd(CHANGES, {RUN: ""})
        assert events.ended.wait(DEADLINE_S), "the stream goes on"


def tell_stored(store: Store, bus: redis.Redis, *messages: Message) -> None:
    """As ingest does: commits, then names the run."""
    written = telemetry.write(store, [(RUN, message) for message in messages])
    bus.xadd(CHANGES, {RUN: written.steps[RUN]})


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
    assert events.items[-1]["type"] == "end"
