"""Rejected messages, from ingest over REST and the command line."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import redis

from paceline.wire import TELEMETRY, Message, RunState, State, StepBatch, encode
from paceline.wire.bus import publish
from paceline_backend.requests import rejected
from paceline_backend.store import Store, StoreUnavailableError
from support import poison
from support.command_line import Main
from support.ingesting import ingest_all
from support.records import add_run, record

V1 = "/api/v1"
STREAM = "paceline:run:r:telemetry"


def reject(
    bus: redis.Redis,
    *messages: Message,
    run: str = "r",
    why: str = "because",
    stream: str = STREAM,
) -> None:
    pipeline = bus.pipeline()
    for message in messages:
        rejected.add(pipeline, stream, b"5000-0", encode(message, run), why, 1)
    rejected.bound(bus, [(stream, number) for number in pipeline.execute()])


def listed(client: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = client.get(f"{V1}/rejected", params=query).json()["items"]
    return items


def test_what_could_not_be_stored_is_listed_with_its_reason(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r")
    publish(bus, TELEMETRY, StepBatch([record(0, 5)]), "r")
    written = bus.xadd(TELEMETRY, {"v": "1", "run": "r", "data": b"\xff"})
    assert isinstance(written, bytes)
    ingest_all(store, bus_url)
    page = client.get(f"{V1}/rejected").json()
    assert (page["kept"], page["ever"]) == (2, 2)
    unreadable, stranger = page["items"]
    assert stranger["reason"] == "run r: rank 5 is out of range: attempt 0 has 2 ranks"
    shared = {"run": "r", "writer": None, "tries": 1}
    assert shared.items() <= stranger.items()
    assert shared.items() <= unreadable.items()
    assert (stranger["kind"], unreadable["kind"]) == ("steps", None)
    assert unreadable["written_at"] == int(written.partition(b"-")[0]) / 1000
    assert unreadable["written_at"] <= unreadable["rejected_at"]
    assert listed(client, limit=1) == [unreadable]


def test_a_message_is_dropped_and_the_audit_log_has_it(
    client: httpx.Client, bus: redis.Redis
) -> None:
    reject(bus, RunState(State.RUNNING, 1.0, "n"))
    [message] = listed(client)
    assert message["writer"] == "run r"
    path = f"{V1}/rejected/{message['entry']}"
    dropped = client.delete(path)
    assert (dropped.status_code, dropped.json()) == (200, message)
    assert (listed(client), bus.xlen(rejected.REJECTED)) == ([], 0)
    [change] = client.get(f"{V1}/audit", params={"action": "rejected.drop"}).json()["items"]
    assert change["target"] == message["entry"]
    assert change["details"] == {"run": "r", "kind": "run_state"}
    again = client.delete(path)
    assert (again.status_code, message["entry"] in again.json()["detail"]) == (404, True)


def test_a_message_stays_while_the_audit_log_cannot_be_written(
    client: httpx.Client, bus: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(*_: object, **__: object) -> None:
        raise StoreUnavailableError("gone")

    reject(bus, RunState(State.RUNNING, 1.0, "n"))
    [message] = listed(client)
    monkeypatch.setattr(rejected, "record", record)
    assert client.delete(f"{V1}/rejected/{message['entry']}").status_code == 503
    assert listed(client) == [message]


@pytest.mark.parametrize("entry", ["1", "x-1", "1-", "1-" + "9" * 20, "%00-1"])
def test_what_is_no_number_of_a_message_is_refused(client: httpx.Client, entry: str) -> None:
    assert client.delete(f"{V1}/rejected/{entry}").status_code == 422


def test_whatever_was_written_can_be_listed(client: httpx.Client, bus: redis.Redis) -> None:
    pipeline = bus.pipeline()
    for fields in poison.TELEMETRY.values():
        rejected.add(pipeline, TELEMETRY, b"5000-0", fields, "why \ud800", 1)
    pipeline.execute()
    assert len(listed(client, limit=500)) == len(poison.TELEMETRY)


def test_forged_fields_deceive_nobody(client: httpx.Client, bus: redis.Redis) -> None:
    forged: dict[bytes, bytes] = {
        **encode(RunState(State.RUNNING, 1.0, "n"), "r"),
        b"stream": b"paceline:run:other:telemetry",
        b"reason": b"all is well",
        b"entry": b"x",
        b"tries": b"9" * 400,
        b"kind": b"hello",
    }
    pipeline = bus.pipeline()
    rejected.add(pipeline, STREAM, b"5000-0", forged, "because", 1)
    pipeline.execute()
    [message] = listed(client)
    expected = {"writer": "run r", "reason": "because", "tries": 1, "written_at": 5.0}
    assert {**expected, "kind": "run_state"}.items() <= message.items()


def test_rejected_messages_are_bounded(
    client: httpx.Client, bus: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejected, "MOST_REJECTED", 1_000)
    for writer in range(10):
        stream = f"paceline:run:{writer}:telemetry"
        reject(bus, *[RunState(State.RUNNING, 1.0, "n")] * 300, stream=stream)
    page = client.get(f"{V1}/rejected").json()
    assert rejected.MOST_REJECTED <= page["kept"] < rejected.MOST_REJECTED + 500
    assert page["ever"] == 3_000
    assert page["items"][0]["writer"] == "run 9", "the newest stay"


def test_a_writer_evicts_its_own_messages_only(
    client: httpx.Client,
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dropped messages do not count."""
    monkeypatch.setattr(rejected, "MOST_OF_WRITER", 50)
    add_run(store, "r", signed=True)
    state = RunState(State.RUNNING, 1.0, "n")
    reject(bus, state, run="other", stream="paceline:run:o:telemetry")
    for number in range(200):
        bus.xadd(STREAM, {"v": "1", "run": "r", "data": f"{number}"})
    ingest_all(store, bus_url, STREAM)
    page = client.get(f"{V1}/rejected").json()
    assert (page["kept"], page["ever"]) == (51, 201)
    assert {message["run"] for message in page["items"]} == {"r"}
    for message in page["items"][:10]:
        client.delete(f"{V1}/rejected/{message['entry']}")
    assert [message["run"] for message in listed(client)] == ["r"] * 40 + ["other"]
    reject(bus, *[state] * 10)
    assert bus.xlen(rejected.REJECTED) == 51
    reject(bus, state)
    assert bus.xlen(rejected.REJECTED) == 51
    assert listed(client, limit=100)[-1]["run"] == "other"


def test_of_a_huge_message_little_is_kept(client: httpx.Client, bus: redis.Redis) -> None:
    reject(
        bus, StepBatch([record(step, 0) for step in range(500)]), run="r" * 9_000, why="w" * 9_000
    )
    [message] = listed(client)
    assert (len(message["run"]), message["kind"]) == (200, "steps")
    assert bus.memory_usage(rejected.REJECTED) < 5_000


def test_the_command_line_lists_counts_and_drops(
    client: httpx.Client, bus: redis.Redis, main: Main
) -> None:
    at = ("--server", str(client.base_url))
    state = RunState(State.RUNNING, 1.0, "n")
    reject(bus, state, why="a terminal \x1b[2J obeys")
    reject(bus, state, run="other")
    code, out, _ = main("rejected", "list", *at)
    assert code == 0
    assert "a terminal \\x1b[2J obeys" in out
    assert "2 kept, 2 rejected in total" in out
    [other] = json.loads(main("rejected", "list", "--limit", "1", "--json", *at)[1])["items"]
    assert other["run"] == "other"
    assert main("rejected", "drop", other["entry"], *at)[1] == f"{other['entry']} is dropped\n"
    assert bus.xlen(rejected.REJECTED) == 1
    code, _, err = main("rejected", "drop", other["entry"], *at)
    words = f"paceline: no rejected message {other['entry']}; GET /rejected lists them\n"
    assert (code, err) == (2, words)


@pytest.mark.parametrize("entry", ["../runs", "1-1/retry", "1", "", "\0", "1-1?x=1"])
def test_the_command_line_deletes_nothing_else(main: Main, entry: str) -> None:
    code, _, err = main("rejected", "drop", "--", entry)
    assert code == 2
    assert "give a number that `paceline rejected list` prints" in err
