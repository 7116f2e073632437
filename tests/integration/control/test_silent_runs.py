"""Runs that nobody speaks for are failed; a run whose word is on its way is not."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from paceline.wire import (
    TELEMETRY,
    Message,
    NodeState,
    RunChanged,
    RunState,
    State,
    StepBatch,
    control,
    decode,
    encode,
    live,
    node_telemetry,
    run_telemetry,
)
from paceline.wire.bus import connect
from paceline_backend.control.silent_runs import SILENT_S
from paceline_backend.requests import sessions
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.store import Store, runs, schema, telemetry
from support.looks import Looks
from support.records import add_run, hello, record

SIGN = RunState(State.RUNNING, 5.0, "n")


@pytest.fixture
def looks(store: Store, bus_url: str) -> Looks:
    return Looks(store, bus_url)


def waiting(bus_url: str, age_s: float) -> None:
    """A sign of life of run r has lain on the bus for so long."""
    fields: Any = encode(SIGN, "r")
    with connect(bus_url) as client:
        client.xadd(TELEMETRY, fields, id=f"{int(1e3 * (time.time() - age_s))}-0")


def test_whatever_comes_of_a_run_is_a_sign_of_life(store: Store, looks: Looks) -> None:
    """Its node's agent says nothing about it."""
    signs: dict[str, list[Message]] = {
        "gone": [],
        "supervised": [RunState(State.STARTING, 5.0, "n")],
        "introduced": [hello()],
        "training": [StepBatch([record(0, 0)])],
        "ended": [RunState(State.FINISHED, 5.0, "n")],
    }
    for name in signs:
        add_run(store, name, node="n", state="running")
    add_run(store, "never-launched", node="n")
    assert looks.after(0) == looks.after(SILENT_S - 1) == []
    telemetry.write(store, [("", NodeState("n", "n", 1, 1, [], time.time(), "0"))])
    telemetry.write(store, [(name, sign) for name, of_run in signs.items() for sign in of_run])
    add_run(store, "new", node="n")
    assert looks.after(1) == ["gone", "never-launched"]
    assert looks.after(0) == []
    assert runs.get(store, "gone")["message"] == "no telemetry for 30 s: lost contact with n"
    assert runs.get(store, "never-launched")["message"] == "no agent started it within 30 s"
    assert looks.after(SILENT_S) == ["supervised", "introduced", "training", "new"]


def test_who_watches_or_plans_a_lost_run_is_told(store: Store, looks: Looks, bus_url: str) -> None:
    add_run(store, "r", state="running")
    watched = (live("r"), control("r"))
    with redis.Redis.from_url(bus_url) as bus:
        for stream in watched:
            bus.xadd(stream, {"any": "thing"})
        assert [looks.after(0), looks.after(SILENT_S)] == [[], ["r"]]
        assert decode(bus.xrevrange(live("r"), count=1)[0][1]) == ("r", RunChanged())
        assert [0 < bus.ttl(stream) <= 3_600 for stream in watched] == [True, True]


def test_a_locked_database_fails_no_run(tmp_path: Path, bus_url: str) -> None:
    """Nothing is stored for 40 s, and the first look afterwards is quicker than ingest."""
    path = tmp_path / "paceline.db"
    with Store.open(f"sqlite:///{path}?timeout=0.05") as store:
        looks = Looks(store, bus_url)
        add_run(store, "r", state="running", seen_at=time.time() - 40)
        assert looks.after(0) == []
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        waiting(bus_url, 38)
        assert [looks.after(5) for _ in range(8)] == [[]] * 8
        other.execute("ROLLBACK")
        other.close()
        assert looks.after(5) == []
        telemetry.write(store, [("r", SIGN)])
        with connect(bus_url) as client:
            client.delete(TELEMETRY)
        assert [looks.after(5) for _ in range(6)] == [[]] * 6, "30 s begin with the first good look"
        assert looks.after(5) == ["r"]


def test_a_run_holds_up_the_check_for_itself_alone(
    store: Store, looks: Looks, bus_url: str
) -> None:
    """Its script may write much, and give any number to what it writes."""
    for run in ("much", "slow", "forger", "other"):
        add_run(store, run, state="running", signed=True)
    with connect(bus_url) as client:
        pipeline = client.pipeline(transaction=False)
        for _ in range(1_001):
            pipeline.xadd(run_telemetry("much"), {"data": "x"})
        pipeline.execute()
        client.xadd(run_telemetry("slow"), {"data": "x"}, id=f"{int(1e3 * (time.time() - 20))}-0")
        client.xadd(run_telemetry("forger"), {"data": "x"}, id="1-1")
        assert looks.after(0) == []
        assert looks.after(SILENT_S) == ["forger", "other"]
        client.delete(run_telemetry("much"), run_telemetry("slow"))
        assert looks.after(SILENT_S - 1) == [], "30 s begin with the first good look"
        assert looks.after(SILENT_S) == ["much", "slow"]


def test_what_waits_of_a_node_may_be_of_its_runs(store: Store, looks: Looks, bus_url: str) -> None:
    add_run(store, "here", node="here", state="running", signed=True)
    add_run(store, "there", node="there", state="running")
    for node in ("here", "there"):
        sessions.of_node(store, bus_url, node)
    assert looks.after(0) == []
    with connect(bus_url) as client:
        for stream in (node_telemetry("here"), TELEMETRY):
            client.xadd(stream, {"data": "x"}, id=f"{int(1e3 * (time.time() - 20))}-0")
        assert looks.after(SILENT_S) == []
        client.delete(TELEMETRY)
        assert looks.after(SILENT_S) == ["there"]


def test_a_bus_that_takes_nothing_fails_no_run(store: Store, tmp_path: Path) -> None:
    """It answers all the while: a look writes to see that signs of life can arrive."""
    with EmbeddedBus(tmp_path / "bus") as bus, connect(bus.url) as client:
        looks = Looks(store, bus.url)
        add_run(store, "r", state="running")
        assert looks.after(0) == []
        client.config_set("maxmemory", 1)
        for _ in range(8):
            with pytest.raises(redis.RedisError):
                looks.after(5)
        client.config_set("maxmemory", 0)
        assert [looks.after(5) for _ in range(6)] == [[]] * 6
        assert looks.after(5) == ["r"]


def test_time_in_which_the_server_did_not_listen_is_no_silence(store: Store, looks: Looks) -> None:
    """It was suspended, with its bus: no message waits there, and none was stored."""
    add_run(store, "r", state="running")
    assert looks.after(0) == looks.suspended(60) == looks.suspended(60) == looks.after(15) == []
    assert looks.after(5) == ["r"], "30 s in which it listened"


def test_a_clock_that_is_set_back_fails_no_run(store: Store, looks: Looks) -> None:
    add_run(store, "r", state="running", seen_at=time.time() + 3600)
    assert looks.after(0) == []
    telemetry.write(store, [("r", SIGN)])
    assert looks.after(SILENT_S) == []


def test_a_word_that_comes_at_the_last_moment_counts(store: Store) -> None:
    add_run(store, "r", state="running")
    with store.read() as connection:
        (silent,) = runs.unfinished(connection)
    telemetry.write(store, [("r", SIGN)])
    with store.write() as connection:
        assert not runs.end_silent(connection, silent, "silent")
    assert runs.get(store, "r")["state"] == "running"


def test_an_assumed_end_gives_way_to_a_sign_of_life(store: Store, looks: Looks) -> None:
    add_run(store, "r", state="running")
    assert [looks.after(0), looks.after(SILENT_S)] == [[], ["r"]]
    telemetry.write(store, [("r", SIGN)])
    assert runs.get(store, "r")["state"] == "running"
    with store.read() as connection:
        assert connection.execute(sa.select(schema.runs.c.lost)).scalar() is False
