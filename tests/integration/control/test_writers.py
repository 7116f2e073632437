"""Ingest knows who wrote from the stream, reads streams fairly, and believes each of its own."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from paceline.wire import (
    INGEST_GROUP,
    TELEMETRY,
    Message,
    NodeState,
    RunState,
    State,
    StepBatch,
    encode,
    live,
    node_telemetry,
    run_telemetry,
)
from paceline.wire.bus import connect, publish
from paceline_backend.control.consumer import Consumer, Entry
from paceline_backend.requests import sessions, streams
from paceline_backend.requests.rejected import REJECTED
from paceline_backend.store import Store, nodes, runs, schema
from support.ingesting import ingesting, reasons, said
from support.leading import ingest, working
from support.records import add_run, hello, record
from support.waiting import until


@pytest.fixture(autouse=True)
def _ends_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the last records are dealt with, however long a busy machine takes."""
    monkeypatch.setattr("paceline_backend.control.ingest._HOLD_S", 3600.0)


def state(node: str, **fields: Any) -> NodeState:
    return NodeState(node, "host", 1, 1, [], 100.0, "0", **fields)


def settle(store: Store, bus: redis.Redis) -> None:
    until(lambda: streams.waiting(bus, store) == 0, "everything to be settled")


def steps_of(store: Store, key: int) -> int:
    query = sa.select(sa.func.count()).where(schema.worker_steps.c.run == key)
    with store.read() as connection:
        return int(connection.execute(query).scalar_one())


def test_a_run_reports_on_its_own_stream(store: Store, bus: redis.Redis, bus_url: str) -> None:
    key = add_run(store, "r")
    session = sessions.of_run(store, bus_url, "r")
    with working(ingest(store, bus_url)), connect(session.bus) as rank:
        publish(rank, run_telemetry("r"), hello(), "r")
        publish(rank, run_telemetry("r"), StepBatch([record(0, 0), record(0, 1)]), "r")
        until(lambda: steps_of(store, key) == 2, "the records to be stored")
    assert reasons(bus) == []


def nodes_of(store: Store) -> list[tuple[str, bool]]:
    with store.read() as connection:
        return [(node["id"], node["signed"]) for node in nodes.listed(connection)]


def test_a_node_reports_on_its_own_stream(store: Store, bus: redis.Redis, bus_url: str) -> None:
    add_run(store, "r", node="here", signed=True)
    session = sessions.of_node(store, bus_url, "here")
    with store.read() as connection:
        assert nodes.listed(connection) == [], "its agent has not spoken"
    with working(ingest(store, bus_url)), connect(session.bus) as agent:
        publish(agent, node_telemetry("here"), state("here"))
        publish(agent, node_telemetry("here"), RunState(State.STARTING, 1.0, "here"), "r")
        until(lambda: runs.get(store, "r")["state"] == "starting", "the state to be stored")
    assert nodes_of(store) == [("here", True)], "a session is not taken back"
    assert reasons(bus) == []


LIES: dict[str, tuple[str, Message, str, str]] = {
    "another run": (run_telemetry("r"), StepBatch([]), "other", "run r may not report about run"),
    "a node, by a run": (run_telemetry("r"), state("here"), "", "may not report about nodes"),
    "another node": (node_telemetry("here"), state("there"), "", "may not report about node"),
    "another node's run": (
        node_telemetry("here"),
        RunState(State.FAILED, 1.0, "here"),
        "other",
        "which is not on this node",
    ),
    "a run with a session, without it": (
        TELEMETRY,
        RunState(State.FAILED, 1.0, "here"),
        "other",
        "must report on its own streams",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_nobody_speaks_for_others(lie: str, store: Store, bus: redis.Redis, bus_url: str) -> None:
    stream, message, run, reason = LIES[lie]
    for name, node in (("r", "here"), ("other", "there")):
        add_run(store, name, node=node)
        sessions.of_run(store, bus_url, name)
    for node in ("here", "there"):
        sessions.of_node(store, bus_url, node)
    publish(bus, stream, message, run)
    with working(ingest(store, bus_url)):
        until(lambda: bus.xlen(REJECTED) == 1, "the message to be rejected")
    assert reason in reasons(bus)[0]
    assert runs.get(store, "other")["state"] == "pending"


def test_agents_and_ranks_without_a_session_report_on_one_stream(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r", node="old")
    with working(ingest(store, bus_url)):
        publish(bus, TELEMETRY, state("old"))
        publish(bus, TELEMETRY, hello(), "r")
        settle(store, bus)
    assert runs.get(store, "r")["state"] == "running"
    assert nodes_of(store) == [("old", False)]
    assert reasons(bus) == []


def test_nobody_speaks_for_a_node_with_a_session(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """Else launches for it would not be sealed any more; also while its agent is away."""
    sessions.of_node(store, bus_url, "here")
    publish(bus, TELEMETRY, state("here"))
    with working(ingest(store, bus_url)):
        until(lambda: bus.xlen(REJECTED) == 1, "the message to be rejected")
    assert "must report on its own stream" in reasons(bus)[0]
    assert nodes_of(store) == []


def test_a_flooded_stream_does_not_hold_up_others(bus: redis.Redis) -> None:
    for _ in range(2_000):
        bus.xadd("flooded", {"v": "1"})
    bus.xadd("quiet", {"v": "1"})
    consumer = Consumer(bus, ["flooded", "quiet"], INGEST_GROUP, "one")
    assert consumer.read(100, 0.01) == [], "the groups are made"
    read = consumer.read(100, 0.01)
    assert [entry.stream for entry in read].count("quiet") == 1
    assert len(read) <= 100
    assert consumer.unread == {"flooded"}


def test_a_batch_is_full_also_with_many_streams(bus: redis.Redis) -> None:
    for _ in range(200):
        bus.xadd("busy", {"v": "1"})
    consumer = Consumer(bus, ["busy", *(f"idle-{k}" for k in range(20))], INGEST_GROUP, "one")
    consumer.read(100, 0.01)
    assert len(consumer.read(100, 0.01)) == 100
    assert len(consumer.read(200, 0.01)) == 100
    assert consumer.unread == set()


def test_entries_of_a_stream_that_came_later_are_read_too(bus: redis.Redis) -> None:
    consumer = Consumer(bus, ["first"], INGEST_GROUP, "one")
    consumer.read(10, 0.01)
    bus.xadd("second", {"v": "1"})
    consumer.follow(["first", "second"])
    read = [entry for _ in range(3) for entry in consumer.read(10, 0.01)]
    assert [entry.stream for entry in read] == ["second"]


def test_a_stream_that_is_gone_while_it_is_claimed_stops_nothing(bus: redis.Redis) -> None:
    for stream in ("gone", "stays"):
        for _ in range(30):
            bus.xadd(stream, {"a": "b"})
    dead = Consumer(bus, ["gone", "stays"], INGEST_GROUP, "dead")
    assert [len(dead.read(60, 0.01)) for _ in range(2)] == [0, 60]
    consumer = Consumer(bus, ["gone", "stays"], INGEST_GROUP, "one", claim_idle_s=0)
    assert {entry.stream for entry in consumer.read(20, 0.01)} == {"gone", "stays"}
    bus.delete("gone")
    consumer.follow(["stays"])
    assert {entry.stream for entry in consumer.read(20, 0.01)} == {"stays"}


def test_the_lag_is_of_all_streams(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of streams of which the last batch had nothing."""
    monkeypatch.setattr("paceline_backend.control.writers.REFRESH_S", 0.0)
    for name in ("r", "other"):
        add_run(store, name)
        sessions.of_run(store, bus_url, name)
    bus.xgroup_create(run_telemetry("other"), INGEST_GROUP, id="0", mkstream=True)
    for step in range(7):
        publish(bus, run_telemetry("other"), StepBatch([record(step, 0)]), "other")
    bus.xreadgroup(INGEST_GROUP, "stuck", {run_telemetry("other"): ">"})
    with ingesting(store, bus_url, claim_idle_s=60) as worker:
        until(lambda: worker.stats.lag == 7, "what another worker holds")
        publish(bus, run_telemetry("r"), hello(), "r")
        until(lambda: worker.stats.batches == 1, "a batch of one stream")
        until(lambda: worker.stats.lag == 7, "the others' entries again")


def test_an_idle_ingest_reads_a_new_stream_once_something_has_changed(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline_backend.control.ingest._IDLE_AFTER_S", -1.0)
    monkeypatch.setattr("paceline_backend.control.ingest._FOLLOW_S", 3600.0)
    add_run(store, "r")
    with ingesting(store, bus_url) as worker:
        publish(bus, TELEMETRY, state("here"))
        until(lambda: worker.stats.batches == 1, "what is on the streams so far")
        sessions.of_run(store, bus_url, "r")
        publish(bus, run_telemetry("r"), hello(), "r")
        streams.wake(bus)
        until(lambda: worker.stats.batches == 2, "what is on the new stream")


def long_run(store: Store, bus: redis.Redis, bus_url: str, steps: int) -> None:
    """A run whose end its agent tells on another stream while much of the run's own waits."""
    add_run(store, "r", node="here")
    sessions.of_run(store, bus_url, "r")
    sessions.of_node(store, bus_url, "here")
    publish(bus, run_telemetry("r"), hello(), "r")
    pipeline = bus.pipeline(transaction=False)
    for step in range(steps):
        fields: dict[Any, Any] = dict(encode(StepBatch([record(step, 0)]), "r"))
        pipeline.xadd(run_telemetry("r"), fields)
    pipeline.execute()
    publish(bus, node_telemetry("here"), RunState(State.FINISHED, 1.0, "here"), "r")


def assert_ended_once(bus: redis.Redis, messages: int) -> None:
    ends = [isinstance(each, RunState) for each in said(bus, live("r"))]
    assert ends == [False] * (messages - 1) + [True]


def test_a_run_ends_after_its_last_record(store: Store, bus: redis.Redis, bus_url: str) -> None:
    long_run(store, bus, bus_url, 1_500)
    with working(ingest(store, bus_url)):
        settle(store, bus)
    assert_ended_once(bus, 1_502)


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_an_end_that_is_held_for_long_is_not_claimed_again(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    pause_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the worker itself: it would tell the end twice, and before the last records."""
    keep = Consumer.keep

    def paused(consumer: Consumer, entries: Iterable[Entry]) -> set[tuple[str, bytes]]:
        kept = keep(consumer, entries)
        time.sleep(pause_s)  # as on a machine with much to do
        return kept

    monkeypatch.setattr(Consumer, "keep", paused)
    long_run(store, bus, bus_url, 4_000)
    bus.xgroup_create(node_telemetry("here"), INGEST_GROUP, id="0")
    with ingesting(store, bus_url, claim_idle_s=0.01):
        settle(store, bus)
    assert_ended_once(bus, 4_002)


def test_a_successor_takes_over_the_end_that_a_dead_worker_held(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """The end comes last all the same, and once."""
    long_run(store, bus, bus_url, 1_500)
    for stream, count in ((run_telemetry("r"), 20), (node_telemetry("here"), 1)):
        bus.xgroup_create(stream, INGEST_GROUP, id="0")
        bus.xreadgroup(INGEST_GROUP, "dead", {stream: ">"}, count)
    with ingesting(store, bus_url, "successor", claim_idle_s=0.05):
        settle(store, bus)
    assert_ended_once(bus, 1_502)
    assert bus.xpending(node_telemetry("here"), INGEST_GROUP)["pending"] == 0


def test_an_end_waits_for_records_that_a_dead_worker_had_read(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    long_run(store, bus, bus_url, 20)
    bus.xgroup_create(run_telemetry("r"), INGEST_GROUP, id="0")
    bus.xreadgroup(INGEST_GROUP, "dead", {run_telemetry("r"): ">"}, 100)
    with ingesting(store, bus_url, "successor", claim_idle_s=0.5):
        settle(store, bus)
    assert_ended_once(bus, 22)


def test_a_worker_that_comes_back_ends_a_run_last(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """What it had read before comes first, the end that it held among it."""
    long_run(store, bus, bus_url, 1_500)
    bus.xgroup_create(node_telemetry("here"), INGEST_GROUP, id="0")
    bus.xreadgroup(INGEST_GROUP, "one", {node_telemetry("here"): ">"}, 1)
    with ingesting(store, bus_url, "one", claim_idle_s=60):
        settle(store, bus)
    assert_ended_once(bus, 1_502)


def test_an_end_that_another_worker_dealt_with_is_forgotten(bus: redis.Redis) -> None:
    """While this one was stuck."""
    for name in ("one", "two"):
        bus.xadd(name, {"data": b"x"})
    stuck = Consumer(bus, ["one", "two"], INGEST_GROUP, "stuck")
    stuck.read(10, 0.01)  # makes the groups
    entries = stuck.read(10, 0.01)
    other = Consumer(bus, ["one"], INGEST_GROUP, "other", claim_idle_s=0)
    (taken,) = other.read(10, 0.01)
    bus.xack("one", INGEST_GROUP, taken.number)
    bus.xdel("one", taken.number)
    assert stuck.keep(entries) == {entry[:2] for entry in entries if entry.stream == "two"}
