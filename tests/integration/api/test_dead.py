"""Dead letters, from ingest over REST and the command line to another try."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import sqlalchemy as sa

from paceline.wire import TELEMETRY, Message, RunState, State, StepBatch, encode
from paceline.wire.bus import connect, publish
from paceline_backend.requests import dead
from paceline_backend.store import Store, StoreUnavailableError, schema, telemetry
from support import poison
from support.command_line import Main, in_process
from support.ingesting import ingest_all
from support.records import add_run, record

V1 = "/api/v1"
STREAM = "paceline:run:r:telemetry"


@pytest.fixture
def bus(bus_url: str) -> Iterator[redis.Redis]:
    with connect(bus_url) as opened:
        yield opened


def put_aside(
    bus: redis.Redis,
    *messages: Message,
    run: str = "r",
    why: str = "because",
    stream: str = STREAM,
) -> None:
    pipeline = bus.pipeline()
    sizes = [
        dead.put_aside(pipeline, stream, b"5000-0", encode(message, run), why, 1)
        for message in messages
    ]
    letters = zip(pipeline.execute(), sizes, strict=True)
    dead.bound(bus, [dead.Added(stream, *letter) for letter in letters])


def letters(client: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = client.get(f"{V1}/dead", params=query).json()["items"]
    return items


def test_what_could_not_be_stored_is_listed_with_its_reason(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r")
    publish(bus, TELEMETRY, StepBatch([record(0, 5)]), "r")
    written = bus.xadd(TELEMETRY, {"v": "1", "run": "r", "data": b"\xff"})
    assert isinstance(written, bytes)
    ingest_all(store, bus_url)
    page = client.get(f"{V1}/dead").json()
    assert (page["kept"], page["ever"], page["next_cursor"]) == (2, 2, None)
    unreadable, stranger = page["items"]
    assert stranger["reason"] == "run r: rank 5 is out of range: attempt 0 has 2 ranks"
    shared = {"run": "r", "stream": TELEMETRY, "writer": None, "tries": 1, "whole": True}
    assert shared.items() <= stranger.items()
    assert shared.items() <= unreadable.items()
    assert (stranger["kind"], unreadable["kind"]) == ("steps", None)
    assert unreadable["first_at"] == int(written.partition(b"-")[0]) / 1000
    assert unreadable["first_at"] <= unreadable["last_at"]
    shown = client.get(f"{V1}/dead/{stranger['entry']}").json()
    assert "'type': 'steps'" in shown.pop("message")
    assert shown == stranger


def test_pages_and_runs(client: httpx.Client, bus: redis.Redis) -> None:
    for number in range(130):
        put_aside(bus, RunState(State.RUNNING, 1.0, "n"), run=f"r{number % 2}")
    first = client.get(f"{V1}/dead", params={"limit": 100}).json()
    rest = client.get(f"{V1}/dead", params={"cursor": first["next_cursor"]}).json()
    assert (len(first["items"]), len(rest["items"]), rest["next_cursor"]) == (100, 30, None)
    entries = [letter["entry"] for letter in first["items"] + rest["items"]]
    assert len(set(entries)) == 130
    of_one = client.get(f"{V1}/dead", params={"limit": 60, "run": "r1"}).json()
    assert len(of_one["items"]) == 60
    last = letters(client, run="r1", cursor=of_one["next_cursor"])
    assert {letter["run"] for letter in of_one["items"] + last} == {"r1"}
    assert len(last) == 5


def test_nothing_is_older_than_the_first_number(client: httpx.Client, bus: redis.Redis) -> None:
    put_aside(bus, RunState(State.RUNNING, 1.0, "n"))
    assert letters(client, cursor="0-0") == letters(client, cursor="00-000") == []


def test_a_message_that_may_be_stored_now_is_put_back(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str
) -> None:
    publish(bus, TELEMETRY, StepBatch([record(0, 1)]), "r")
    ingest_all(store, bus_url)
    [letter] = letters(client)
    assert letter["reason"] == "unknown run 'r'"
    again = client.post(f"{V1}/dead/{letter['entry']}/retry")
    assert (again.status_code, again.json()) == (202, letter)
    ingest_all(store, bus_url)
    [second] = letters(client)
    assert (second["tries"], second["first_at"]) == (2, letter["first_at"])
    add_run(store, "r")
    client.post(f"{V1}/dead/{second['entry']}/retry")
    ingest_all(store, bus_url)
    assert letters(client) == []
    with store.read() as connection:
        assert connection.scalar(sa.select(schema.worker_steps.c.rank)) == 1


def test_a_failure_that_nobody_understands_is_tried_three_times(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str, monkeypatch: Any
) -> None:
    add_run(store, "r")
    real, tries = telemetry.write, []

    def write(store: Store, messages: Any, **named: Any) -> Any:
        if not messages:
            return real(store, messages, **named)
        tries.append(messages)
        raise KeyError("surprise")

    monkeypatch.setattr(telemetry, "write", write)
    publish(bus, TELEMETRY, StepBatch([record(0, 1)]), "r")
    ingest_all(store, bus_url)
    [letter] = letters(client)
    assert (letter["tries"], letter["reason"]) == (3, "KeyError: 'surprise'")
    assert len(tries) == 3


def test_a_message_goes_back_to_the_stream_that_it_came_from(
    client: httpx.Client, store: Store, bus: redis.Redis
) -> None:
    add_run(store, "r", signed=True)
    state = RunState(State.RUNNING, 1.0, "n")
    put_aside(bus, state)
    [letter] = letters(client)
    assert (letter["writer"], letter["first_at"]) == ("run r", 5.0)
    client.post(f"{V1}/dead/{letter['entry']}/retry")
    [(_, fields)] = bus.xrange(STREAM)
    assert encode(state, "r").items() <= fields.items()
    assert bus.xlen(dead.DEAD) == 0


def test_a_message_stays_whose_stream_nobody_reads_any_more(
    client: httpx.Client, store: Store, bus: redis.Redis
) -> None:
    add_run(store, "r", signed=True, state="finished", seen_at=1.0)
    put_aside(bus, RunState(State.RUNNING, 1.0, "n"))
    [letter] = letters(client)
    answer = client.post(f"{V1}/dead/{letter['entry']}/retry")
    assert (answer.status_code, STREAM in answer.json()["detail"]) == (409, True)
    assert (letters(client), bus.exists(STREAM)) == ([letter], 0)


def test_what_cannot_be_written_down_is_not_done(
    client: httpx.Client, store: Store, bus: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(*_: object, **__: object) -> None:
        raise StoreUnavailableError("gone")

    add_run(store, "r", signed=True)
    put_aside(bus, RunState(State.RUNNING, 1.0, "n"))
    [letter] = letters(client)
    monkeypatch.setattr(dead, "record", record)
    for method, action in (("POST", "/retry"), ("DELETE", "")):
        answer = client.request(method, f"{V1}/dead/{letter['entry']}{action}")
        assert answer.status_code == 503
    assert (letters(client), bus.exists(STREAM)) == ([letter], 0)


def test_a_message_is_dropped_for_good(client: httpx.Client, bus: redis.Redis) -> None:
    put_aside(bus, RunState(State.RUNNING, 1.0, "n"))
    [letter] = letters(client)
    gone = client.delete(f"{V1}/dead/{letter['entry']}")
    assert (gone.status_code, gone.json()) == (200, letter)
    assert (letters(client), bus.xlen(dead.DEAD)) == ([], 0)
    for method, action in (("GET", ""), ("POST", "/retry"), ("DELETE", "")):
        answer = client.request(method, f"{V1}/dead/{letter['entry']}{action}")
        assert answer.status_code == 404
        assert letter["entry"] in answer.json()["detail"]


@pytest.mark.parametrize("entry", ["1", "x-1", "1-", "1-" + "9" * 20, "%00-1"])
def test_what_is_no_number_of_a_message_is_refused(client: httpx.Client, entry: str) -> None:
    assert client.get(f"{V1}/dead/{entry}").status_code == 422
    assert client.get(f"{V1}/dead", params={"cursor": entry}).status_code == 422


def test_whatever_was_written_can_be_looked_at(client: httpx.Client, bus: redis.Redis) -> None:
    pipeline = bus.pipeline()
    for fields in poison.TELEMETRY.values():
        dead.put_aside(pipeline, TELEMETRY, b"5000-0", fields, "why \ud800", 1)
    pipeline.execute()
    listed = letters(client, limit=500)
    assert len(listed) == len(poison.TELEMETRY)
    for letter in listed:
        shown = client.get(f"{V1}/dead/{letter['entry']}").json()
        assert shown["message"].isascii()
        assert len(shown["message"]) <= 2_010


def test_forged_fields_deceive_nobody(client: httpx.Client, bus: redis.Redis) -> None:
    forged: dict[bytes, bytes] = {
        **encode(RunState(State.RUNNING, 1.0, "n"), "r"),
        b"stream": b"paceline:run:other:telemetry",
        b"reason": b"all is well",
        b"entry": b"x",
        b"tries": b"9" * 400,
        b"first": b"-1",
        b"bytes": b"7",
    }
    pipeline = bus.pipeline()
    dead.put_aside(pipeline, STREAM, b"5000-0", forged, "because", 1)
    pipeline.execute()
    [letter] = letters(client)
    expected = {"stream": STREAM, "reason": "because", "tries": 1, "first_at": 5.0, "whole": True}
    assert expected.items() <= letter.items()


def test_letters_are_bounded_by_number_and_by_bytes(
    client: httpx.Client, bus: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "MOST", 1_000)
    for writer in range(10):
        stream = f"paceline:run:{writer}:telemetry"
        put_aside(bus, *[RunState(State.RUNNING, 1.0, "n")] * 300, stream=stream)
    page = client.get(f"{V1}/dead").json()
    assert dead.MOST <= page["kept"] < dead.MOST + 500
    assert page["ever"] == 3_000
    monkeypatch.setattr(dead, "MOST_BYTES", 50_000)
    dead.bound(bus, [])
    assert 0 < bus.xlen(dead.DEAD) < dead.MOST
    assert bus.memory_usage(dead.DEAD, samples=0) <= 50_000
    assert client.get(f"{V1}/dead").json()["items"][0] == page["items"][0], "the newest stay"


def test_a_writer_evicts_its_own_letters_only(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """By number or by bytes; what was put back or dropped does not count."""
    add_run(store, "r", signed=True)
    put_aside(
        bus, RunState(State.RUNNING, 1.0, "n"), run="other", stream="paceline:run:o:telemetry"
    )
    pipeline = bus.pipeline(transaction=False)
    for number in range(20_000):
        pipeline.xadd(STREAM, {"v": "1", "run": "r", "data": f"{number}"})
    pipeline.execute()
    ingest_all(store, bus_url, STREAM)
    page = client.get(f"{V1}/dead", params={"limit": 500}).json()
    assert (page["kept"], page["ever"]) == (dead.MOST_OF_WRITER + 1, 20_001)
    assert len(letters(client, run="other")) == 1
    for letter in page["items"][:100]:
        client.delete(f"{V1}/dead/{letter['entry']}")
    put_aside(bus, *[RunState(State.RUNNING, 1.0, "n")] * 100)
    assert bus.xlen(dead.DEAD) == dead.MOST_OF_WRITER + 1
    large = {b"v": b"1", b"run": b"r", b"data": b"x" * (3 * 2**20)}
    for _ in range(4):
        sizes = [dead.put_aside(pipeline, STREAM, b"5000-0", large, "because", 1)]
        dead.bound(bus, [dead.Added(STREAM, pipeline.execute()[0], *sizes)])
    assert [letter["bytes"] > 2**20 for letter in letters(client)] == [True, True, False]
    assert len(letters(client, run="other")) == 1


def test_of_a_huge_message_only_its_size_is_kept(
    client: httpx.Client, bus: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "LARGEST", 1_000)
    put_aside(bus, StepBatch([record(step, 0) for step in range(50)]))
    [letter] = letters(client)
    assert not letter["whole"]
    assert letter["bytes"] > 1_000
    assert bus.memory_usage(dead.DEAD) < 5_000
    refused = client.post(f"{V1}/dead/{letter['entry']}/retry")
    assert refused.status_code == 409
    assert "too large to be kept" in refused.json()["detail"]
    assert letters(client) == [letter]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    return in_process(monkeypatch, capsys)


def test_the_command_line_lists_shows_puts_back_and_drops(
    client: httpx.Client, store: Store, bus: redis.Redis, main: Main
) -> None:
    add_run(store, "r", signed=True, state="running")
    at = ("--server", str(client.base_url))
    state = RunState(State.RUNNING, 1.0, "n\x1b[2J")
    put_aside(bus, state, why="a terminal \x1b[2J obeys")
    put_aside(bus, state, run="other")
    code, out, _ = main("dead", "list", *at)
    assert code == 0
    assert "a terminal \\x1b[2J obeys" in out
    assert "2 kept, 2 ever" in out
    [letter] = json.loads(main("dead", "list", "--run", "r", "--json", *at)[1])["items"]
    code, _, err = main("dead", "list", "--run", "nobody", *at)
    assert (code, "no run's id begins with it" in err) == (2, True)
    code, out, _ = main("dead", "show", letter["entry"], *at)
    assert code == 0
    assert "writer: run r" in out
    assert "'run_state'" in out
    assert "\x1b" not in out
    assert main("dead", "retry", letter["entry"], *at)[1] == (
        f"{letter['entry']} is back on {STREAM}\n"
    )
    assert bus.xlen(STREAM) == 1
    [other] = json.loads(main("dead", "list", "--json", *at)[1])["items"]
    assert main("dead", "drop", other["entry"], *at)[1] == f"{other['entry']} is dropped\n"
    assert bus.xlen(dead.DEAD) == 0
    code, _, err = main("dead", "show", other["entry"], *at)
    assert (code, err) == (2, f"paceline: no dead letter {other['entry']}; GET /dead lists them\n")


@pytest.mark.parametrize("entry", ["../runs", "1-1/retry", "1", "", "\0", "1-1?x=1"])
def test_the_command_line_posts_nowhere_else(main: Main, entry: str, tmp_path: Path) -> None:
    code, _, err = main("dead", "retry", "--", entry)
    assert code == 2
    assert "give a number that `paceline dead list` prints" in err
