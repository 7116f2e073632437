"""Credentials over REST, and launches that only their node can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis
import sqlalchemy as sa

from paceline.wire import (
    TELEMETRY,
    Kill,
    Launch,
    NodeState,
    StepBatch,
    StopTraining,
    commands,
    control,
    decode_signed,
    live,
    node_telemetry,
)
from paceline.wire.bus import connect, publish
from paceline.wire.sealing import unseal
from paceline_backend.server.keys import Keys
from paceline_backend.store import Store, meta, schema
from support.leading import ingest, working
from support.records import add_run, record
from support.waiting import until
from support.web import ANY, serving


@pytest.fixture
def web(store: Store, bus_url: str) -> Iterator[httpx.Client]:
    with serving(store, bus_url) as client, working(ingest(store, bus_url)):
        yield client


def alive(web: httpx.Client, node: str) -> bool:
    return any(n["id"] == node and n["alive"] for n in web.get("/api/v1/nodes").json())


def register(bus: redis.Redis, web: httpx.Client, node: str, *, signed: bool) -> None:
    """What its agent says of itself."""
    import time

    state = NodeState(node, "host", 1, 1, [], time.time(), "0")
    publish(bus, node_telemetry(node) if signed else TELEMETRY, state)
    until(lambda: alive(web, node), "the node to be known")


def launched(bus: redis.Redis, node: str, key: bytes | None) -> Launch:
    ((_, fields),) = bus.xrange(commands(node))
    _, message = decode_signed(fields, commands(node), key)
    assert isinstance(message, Launch)
    return message


def test_a_launch_is_read_by_its_node_only(
    web: httpx.Client, bus: redis.Redis, store: Store
) -> None:
    session = web.post("/api/v1/nodes/here/session").raise_for_status().json()
    assert session["id"] == meta.control_id(store)
    register(bus, web, "here", signed=True)
    body = {"script": "train.py", "nproc": 1, "env": {"TOKEN": "open-sesame"}}
    run = web.post("/api/v1/runs", json=body).raise_for_status().json()["id"]
    key = bytes.fromhex(session["key"])
    launch = launched(bus, "here", key)
    assert launch.env == {}
    secrets = unseal(launch.sealed, key)
    assert secrets.env == {"TOKEN": "open-sesame", "PACELINE_FIRST_POLICY": '{"paceline":{}}'}
    assert secrets.key == Keys(meta.secret(store)).of_run(run)
    assert f"paceline-run-{run}:" in secrets.bus
    with connect(secrets.bus) as rank:
        assert rank.ping()
    (fields,) = (fields for _, fields in bus.xrange(commands("here")))
    assert not any(b"sesame" in value or b"redis:" in value for value in fields.values())


def test_the_database_has_names_only(web: httpx.Client, bus: redis.Redis, store: Store) -> None:
    register(bus, web, "old", signed=False)
    body = {"script": "train.py", "nproc": 1, "env": {"TOKEN": "open-sesame"}}
    web.post("/api/v1/runs", json=body).raise_for_status()
    with store.read() as connection:
        assert connection.execute(sa.select(schema.runs.c.env)).scalar_one() == ["TOKEN"]


def test_a_launch_for_an_agent_without_a_session_is_not_sealed(
    web: httpx.Client, bus: redis.Redis
) -> None:
    register(bus, web, "old", signed=False)
    body = {"script": "train.py", "nproc": 1, "env": {"A": "b"}}
    web.post("/api/v1/runs", json=body).raise_for_status()
    launch = launched(bus, "old", None)
    env = {"A": "b", "PACELINE_FIRST_POLICY": '{"paceline":{}}'}
    assert (launch.env, launch.sealed) == (env, b"")


def test_a_session_of_a_run(web: httpx.Client, store: Store, bus: redis.Redis) -> None:
    body = {"script": "train.py", "nproc": 1, "launch": False, "node": "here"}
    run = web.post("/api/v1/runs", json=body).raise_for_status().json()["id"]
    session = web.post(f"/api/v1/runs/{run}/session").raise_for_status().json()
    with connect(session["bus"]) as rank:
        assert rank.ping()
    key = bytes.fromhex(session["key"])
    web.post(f"/api/v1/runs/{run}/stop", headers=ANY).raise_for_status()
    heard: list[Any] = [decode_signed(f, control(run), key)[1] for _, f in bus.xrange(control(run))]
    expected = Kill("stopped over the API", first_attempt=0)
    assert heard == [expected], "`paceline run` reads no commands of the node"
    answer = web.post(f"/api/v1/runs/{run}/session")
    assert answer.status_code == 409, "it has ended"


def test_a_session_does_not_silence_a_run_that_has_begun_without(
    web: httpx.Client, store: Store, bus: redis.Redis
) -> None:
    add_run(store, "r", node="old", state="running")
    answer = web.post("/api/v1/runs/r/session")
    assert answer.status_code == 409
    assert "without credentials of its own" in answer.json()["detail"]
    publish(bus, TELEMETRY, StepBatch([record(0, 0)]), "r")
    until(lambda: bus.xlen(live("r")) == 1, "its telemetry to be taken")


def test_a_stop_of_a_run_that_trains_is_signed(
    web: httpx.Client, store: Store, bus: redis.Redis
) -> None:
    add_run(store, "r", state="running", first_attempt=3)
    web.post("/api/v1/runs/r/stop", headers=ANY).raise_for_status()
    ((_, fields),) = bus.xrange(control("r"))
    key = Keys(meta.secret(store)).of_run("r")
    assert decode_signed(fields, control("r"), key)[1] == StopTraining("stopped over the API", 3)


@pytest.mark.parametrize(
    ("path", "status"),
    [("/nodes/-x/session", 422), ("/nodes/a%20b/session", 422), ("/runs/nowhere/session", 404)],
)
def test_no_credentials_for_anything_else(web: httpx.Client, path: str, status: int) -> None:
    answer = web.post(f"/api/v1{path}")
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
