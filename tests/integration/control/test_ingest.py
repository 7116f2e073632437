"""From the bus into the database: nothing lost, nothing twice, whatever dies meanwhile."""

from __future__ import annotations

import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
import redis
import sqlalchemy as sa

from paceline.node.processes import die_with_parent
from paceline.wire import (
    CHANGES,
    INGEST_GROUP,
    OBSERVED,
    TELEMETRY,
    Evaluation,
    Message,
    MetricBatch,
    NodeState,
    RunChanged,
    RunState,
    State,
    StepBatch,
    StopTraining,
    control,
    encode,
    live,
)
from paceline.wire.bus import connect, publish
from paceline_backend.control import ingest as ingest_module
from paceline_backend.control.consumer import Consumer
from paceline_backend.control.ingest import Ingest
from paceline_backend.control.writers import Writers
from paceline_backend.requests.rejected import REJECTED
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.store import (
    Store,
    StoreUnavailableError,
    new_runs,
    nodes,
    schema,
    telemetry,
)
from support import poison
from support.ingesting import heard, ingesting, reasons, said, settled
from support.records import add_run, adopted, hello, record
from support.waiting import DEADLINE_S, until

INGEST = """
import sys, threading
from paceline_backend.control.ingest import Ingest
from paceline_backend.store import Store
database, bus, name = sys.argv[1:]
Ingest(Store.open(database), bus, name, claim_idle_s=0.5).run(threading.Event())
"""

DYING = """
import os, signal, sys, threading
from paceline_backend.control.ingest import Ingest, telemetry
from paceline_backend.store import Store
database, bus, when, where = sys.argv[1:]
owner, name = {"commit": (telemetry, "write"), "settlement": (Ingest, "_settle")}[where]
real = getattr(owner, name)
def dying(*arguments, **named):
    if when == "after":
        real(*arguments, **named)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, name, dying)
Ingest(Store.open(database), bus, "one").run(threading.Event())
"""


@pytest.fixture
def own_bus(tmp_path: Path) -> Iterator[EmbeddedBus]:
    """A server that a test may kill."""
    with EmbeddedBus(tmp_path / "bus") as server:
        yield server


def send(client: redis.Redis, *messages: Message, run: str = "r") -> None:
    for message in messages:
        publish(client, TELEMETRY, message, run)


def stored(store: Store, table: sa.Table = schema.worker_steps) -> int:
    with store.read() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()


def payloads(client: redis.Redis, stream: str) -> list[bytes]:
    return [fields[b"data"] for _, fields in client.xrange(stream)]


def test_telemetry_is_stored_published_and_deleted(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r")
    messages: list[Message] = [
        hello(world=2),
        adopted(0, 0),
        StepBatch([record(0, 0), record(1, 0)]),
        StepBatch([record(0, 1)]),
    ]
    send(bus, *messages)
    send(bus, NodeState("n", "host", 2, 2**30, [], 5.0, "0"), run="")
    with ingesting(store, bus_url) as ingest:
        until(lambda: settled(bus), "all is acknowledged")
        until(lambda: ingest.stats.lag == 0, "a look at the streams")
    tables = (schema.worker_steps, schema.steps, schema.segments, schema.nodes)
    assert [stored(store, table) for table in tables] == [3, 1, 1, 1]
    assert said(bus, live("r")) == heard(messages)
    stats = ingest.stats
    assert (stats.rows, stats.batches, stats.lag, bus.xlen(REJECTED)) == (3, 1, 0, 0)
    assert stats.last_commit_at is not None
    assert bus.ttl(live("r")) == -1
    assert [fields for _, fields in bus.xrange(CHANGES)] == [{b"r": b"0"}]


def test_controllers_and_pages_hear_of_what_they_show(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """Controllers of what plans rest on, pages of all but metrics."""
    add_run(store, "r")
    add_run(store, "observed", policy=OBSERVED)
    with ingesting(store, bus_url):
        for run in ("r", "observed"):
            publish(bus, TELEMETRY, hello(world=2), run)
            until(lambda: settled(bus), "the Hello")
            publish(bus, TELEMETRY, StepBatch([record(7, 0)]), run)
            until(lambda: settled(bus), "rank 0's step")
            publish(bus, TELEMETRY, MetricBatch([]), run)
            until(lambda: settled(bus), "metrics")
            publish(bus, TELEMETRY, Evaluation(0, 0, 7, 0, 16, 5.0, None, {"a": 0.5}), run)
            until(lambda: settled(bus), "an evaluation")
            publish(bus, TELEMETRY, StepBatch([record(7, 1)]), run)
            until(lambda: settled(bus), "rank 1's step")
    assert said(bus, live("r")) == [RunChanged(), record(7, 0), record(7, 1)]
    assert not bus.exists(live("observed"))
    noted = [fields.get(b"r") for _, fields in bus.xrange(CHANGES)]
    assert [each for each in noted if each is not None][-2:] == [b"", b"7"]


def test_a_live_stream_keeps_a_minute(store: Store, bus: redis.Redis, bus_url: str) -> None:
    add_run(store, "r")
    now, _ = bus.time()
    for number in range(1_000):
        bus.xadd(live("r"), {"old": "x"}, id=f"{1_000 * (now - 70)}-{number + 1}")
    bus.xadd(live("r"), {"new": "x"}, id=f"{1_000 * (now - 40)}-1")
    publish(bus, TELEMETRY, hello(), "r")
    with ingesting(store, bus_url):
        until(lambda: settled(bus), "the Hello")
        # Ingest learns the bus's time when it acknowledges.
        send(bus, StepBatch([record(0, 0)]))
        until(lambda: settled(bus), "a record")
    entries = [fields for _, fields in bus.xrange(live("r"))]
    assert {b"new": b"x"} in entries
    assert len(entries) <= 3 + 100, "the bus trims a hundred together"


def test_streams_of_an_ended_run_expire_also_after_late_messages(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r")
    publish(bus, control("r"), StopTraining("enough", 0), "r")
    send(bus, RunState(State.FINISHED, 5.0, "n", exit_code=0))
    with ingesting(store, bus_url):
        until(lambda: settled(bus), "the end is stored")
        assert 0 < bus.ttl(live("r")) <= 3_600
        assert 0 < bus.ttl(control("r")) <= 3_600
        bus.delete(live("r"))  # as if that time had passed
        send(bus, StepBatch([record(0, 0)]))
        until(lambda: settled(bus), "the late record is stored")
    assert 0 < bus.ttl(live("r")) <= 3_600


def test_streams_of_a_run_that_goes_on_stay(store: Store, bus: redis.Redis, bus_url: str) -> None:
    add_run(store, "r")
    publish(bus, control("r"), StopTraining("enough", 0), "r")
    send(bus, RunState(State.FAILED, 5.0, "n"))
    with ingesting(store, bus_url):
        until(lambda: bus.ttl(live("r")) > 0, "the end")
        with store.write() as connection:
            new, _ = new_runs.stored(connection, "r")
            new_runs.resume(connection, "r", new)
        send(bus, hello(attempt=new.first_attempt))
        until(lambda: bus.ttl(live("r")) == -1, "its streams to stay")
        until(lambda: bus.ttl(control("r")) == -1, "its streams to stay")


def test_no_poison_stops_ingest_and_each_is_rejected(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """Each bad message between two good ones: only the bad ones are rejected."""
    add_run(store, "r")
    send(bus, hello(world=2))
    bad: dict[bytes, str] = {}
    for step, (name, entry) in enumerate(poison.TELEMETRY.items()):
        send(bus, StepBatch([record(step, 0)]), StepBatch([record(step, 1)]))
        fields: Any = entry
        bad[bus.xadd(TELEMETRY, fields)] = name
    assert len(bad) >= 50
    send(bus, adopted(0, 0), NodeState("n", "host", 2, 2**30, [], 5.0, "0"))
    with ingesting(store, bus_url):
        until(lambda: settled(bus), "all is acknowledged")
    rejected = {fields[b"entry"]: fields[b"reason"].decode() for _, fields in bus.xrange(REJECTED)}
    assert {name for number, name in bad.items() if not rejected.get(number)} == set()
    assert rejected.keys() == bad.keys()
    assert max(map(len, rejected.values())) < 10_000
    tables = (schema.worker_steps, schema.steps, schema.rounds, schema.segments, schema.nodes)
    assert [stored(store, table) for table in tables] == [2 * len(bad), len(bad), 0, 1, 1]
    assert len(said(bus, live("r"))) == 2 * len(bad) + 2


def _surprising(monkeypatch: pytest.MonkeyPatch, surprises: Callable[[list[Any]], bool]) -> None:
    """Makes writing raise what nobody expects, whenever `surprises` says so of the messages."""
    real = telemetry.write

    def write(store: Store, messages: Any, **named: Any) -> Any:
        if surprises([message for _, message in messages]):
            raise KeyError("surprise")
        return real(store, messages, **named)

    monkeypatch.setattr(telemetry, "write", write)


def test_a_message_that_makes_writing_fail_unexpectedly_is_rejected_alone(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_run(store, "r")
    bad = StepBatch([record(5, 1)])
    _surprising(monkeypatch, lambda messages: encode(bad) in map(encode, messages))
    send(bus, *[StepBatch([record(step, 0)]) for step in range(9)], bad)
    with ingesting(store, bus_url):
        until(lambda: settled(bus), "all is acknowledged")
    assert stored(store) == 9
    assert [fields[b"reason"] for _, fields in bus.xrange(REJECTED)] == [b"KeyError: 'surprise'"]


def test_an_unexpected_failure_that_is_no_messages_fault_costs_nothing(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    add_run(store, "r")
    failing = iter(range(7))
    _surprising(monkeypatch, lambda _: next(failing, None) is not None)
    send(bus, *[StepBatch([record(step, 0)]) for step in range(9)])
    with ingesting(store, bus_url):
        until(lambda: settled(bus), "all is acknowledged")
    assert (stored(store), bus.xlen(REJECTED)) == (9, 0)
    assert "KeyError: 'surprise'" in caplog.text


def test_a_failure_that_does_not_come_again_costs_nothing(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is alone in its batch, and the database answers."""
    add_run(store, "r")
    failing = iter([True])
    _surprising(monkeypatch, lambda messages: bool(messages) and next(failing, False))
    send(bus, StepBatch([record(0, 0)]))
    with ingesting(store, bus_url):
        until(lambda: settled(bus), "it is acknowledged")
    assert (stored(store), bus.xlen(REJECTED)) == (1, 0)


def test_entries_that_a_dead_consumer_had_read_are_taken_over(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r")
    send(bus, *[StepBatch([record(step, 0)]) for step in range(6)])
    bus.xgroup_create(TELEMETRY, INGEST_GROUP, id="0")
    bus.xreadgroup(INGEST_GROUP, "dead", {TELEMETRY: ">"}, 3)
    bus.xreadgroup(INGEST_GROUP, "one", {TELEMETRY: ">"}, 2)  # itself, before it was restarted
    with ingesting(store, bus_url, "one", claim_idle_s=60):
        until(lambda: stored(store) == 3, "its own and the new entry")
    assert bus.xpending(TELEMETRY, INGEST_GROUP)["pending"] == 3
    with ingesting(store, bus_url, "two", claim_idle_s=0.05):
        until(lambda: settled(bus), "the dead one's entries")
    assert stored(store) == 6


def test_a_heartbeat_that_lay_on_the_bus_says_nothing_about_now(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a node that died during an outage of ours would seem to live after it."""
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy
    for node, age_s in (("dead", 7200), ("alive", 0)):
        fields: Any = encode(NodeState(node, "host", 2, 2**30, [], time.time(), "0"), "")
        bus.xadd(TELEMETRY, fields, id=f"{int(1e3 * (time.time() - age_s))}-0")
    with ingesting(store, bus_url):
        until(lambda: settled(bus), "both are dealt with")
    with store.read() as connection:
        assert [node["id"] for node in nodes.listed(connection)] == ["alive"]
    assert bus.xlen(REJECTED) == 0


def test_two_ingests_share_the_work_and_sum_up_every_step(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """The ranks of a step may be stored by different consumers at the same time."""
    add_run(store, "r", nproc=4)
    send(bus, hello(world=4))
    with ingesting(store, bus_url, "one") as ingest_1, ingesting(store, bus_url, "two") as ingest_2:
        for first in range(0, 600, 20):
            pipeline = bus.pipeline(transaction=False)
            for step in range(first, first + 20):
                for rank in range(4):
                    fields: Any = encode(StepBatch([record(step, rank)]), "r")
                    pipeline.xadd(TELEMETRY, fields)
            pipeline.execute()
        until(lambda: settled(bus), "all is acknowledged")
    assert (stored(store), stored(store, schema.steps)) == (2_400, 600)
    assert ingest_1.stats.rows > 0
    assert ingest_2.stats.rows > 0


@pytest.mark.parametrize(
    ("when", "where"), [("before", "commit"), ("after", "commit"), ("after", "settlement")]
)
def test_killed_at_each_point_of_a_batch(
    store: Store, database_url: str, bus: redis.Redis, bus_url: str, when: str, where: str
) -> None:
    add_run(store, "r")
    send(bus, *[StepBatch([record(step, 0)]) for step in range(20)])
    sent = said(bus, TELEMETRY)
    arguments = [sys.executable, "-c", DYING, database_url, bus_url, when, where]
    assert subprocess.run(arguments, timeout=DEADLINE_S).returncode == -9
    assert stored(store) == (0 if (when, where) == ("before", "commit") else 20)
    assert len(payloads(bus, TELEMETRY)) == (0 if (when, where) == ("after", "settlement") else 20)
    with ingesting(store, bus_url):
        until(lambda: settled(bus), "what the dead one left")
    assert stored(store) == 20
    assert said(bus, live("r")) == sent


def test_killed_again_and_again_while_producing(
    store: Store, database_url: str, bus: redis.Redis, bus_url: str
) -> None:
    """kill -9 at random points: each record stored once, and published as often as sent."""
    rng = random.Random(20)
    add_run(store, "r")
    send(bus, hello(world=2))
    sent: Counter[bytes] = Counter([msgspec.msgpack.encode(RunChanged())])
    rows, steps, killed = 0, 0, 0

    def produce(count: int) -> None:
        nonlocal rows, steps
        batches: list[StepBatch] = []
        for _ in range(count):
            size = rng.randint(1, 5)
            for rank in range(2):
                records = [record(step, rank) for step in range(steps, steps + size)]
                batches += [StepBatch(records)] * rng.choice([1, 1, 1, 2])
            steps += size
            rows += 2 * size
        pipeline = bus.pipeline(transaction=False)
        for batch in batches:
            fields: Any = encode(batch, "r")
            sent.update(map(msgspec.msgpack.encode, batch.records))
            pipeline.xadd(TELEMETRY, fields)
        pipeline.execute()

    for life in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", INGEST, database_url, bus_url, f"life-{life // 2}"],
            preexec_fn=die_with_parent,
        )
        try:
            before = stored(store)
            produce(100)
            until(lambda seen=before: stored(store) > seen, "it works")
            for _ in range(rng.randint(0, 30)):
                produce(5)
            if life == 5:
                until(lambda: settled(bus), "all is acknowledged")
        finally:
            assert process.poll() is None
            process.kill()
            killed += process.wait() == -9
    assert killed == 6
    with store.read() as connection:
        pairs = set(connection.execute(sa.select(schema.worker_steps.c["step", "rank"])).all())
    assert pairs == {(step, rank) for step in range(steps) for rank in range(2)}
    assert (len(pairs), stored(store, schema.steps)) == (rows, steps)
    assert Counter(map(msgspec.msgpack.encode, said(bus, live("r")))) == sent


@pytest.mark.parametrize("keeps", [True, False], ids=["with its data", "without"])
def test_bus_that_is_killed_and_comes_back(
    store: Store, own_bus: EmbeddedBus, caplog: pytest.LogCaptureFixture, keeps: bool
) -> None:
    add_run(store, "r")
    with ingesting(store, own_bus.url), connect(own_bus.url) as client:
        send(client, StepBatch([record(0, 0)]))
        until(lambda: stored(store) == 1, "the first record")
        own_bus.kill()
        if keeps:
            until(lambda: "ingest waits for the bus" in caplog.text, "it noticed")
        else:
            shutil.rmtree(own_bus.directory)
        own_bus.start()
        send(client, StepBatch([record(1, 0)]))
        until(lambda: stored(store) == 2, "the record after the outage")
        until(lambda: settled(client), "it is acknowledged")
        until(lambda: not keeps or "the bus is back" in caplog.text, "it says so")


def test_bus_that_is_away_at_the_start(store: Store, own_bus: EmbeddedBus) -> None:
    add_run(store, "r")
    own_bus.kill()
    with ingesting(store, own_bus.url):
        own_bus.start()
        with connect(own_bus.url) as client:
            send(client, StepBatch([record(0, 0)]))
            until(lambda: stored(store) == 1, "the record")


@contextmanager
def _away(database_url: str) -> Iterator[None]:
    """A database that nobody can write to: SQLite locked, Postgres closed to all."""
    if database_url.startswith("sqlite"):
        lock = sqlite3.connect(str(sa.make_url(database_url).database), isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        yield
        lock.close()
        return
    url = sa.make_url(database_url)
    admin = f"host={url.host} port={url.port} user={url.username} dbname=postgres"
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {url.database} ALLOW_CONNECTIONS false".encode())
        kick = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        connection.execute(kick, [url.database])
        yield
        connection.execute(f"ALTER DATABASE {url.database} ALLOW_CONNECTIONS true".encode())


def test_database_that_is_away_costs_nothing(
    database_url: str, bus: redis.Redis, bus_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    impatient = database_url + ("?timeout=0.05" if database_url.startswith("sqlite") else "")
    with Store.open(impatient) as store:
        add_run(store, "r")
        with ingesting(store, bus_url):
            send(bus, StepBatch([record(0, 0)]))
            until(lambda: settled(bus), "the first record")
            with _away(database_url):
                send(bus, StepBatch([record(1, 0)]))
                until(lambda: f"ingest waits for {store.name}" in caplog.text, "it noticed")
                assert bus.xpending(TELEMETRY, INGEST_GROUP)["pending"] == 1
            send(bus, StepBatch([record(2, 0)]))
            until(lambda: settled(bus), "all is acknowledged")
        assert stored(store) == 3
        assert bus.xlen(REJECTED) == 0


def test_stops_also_while_the_database_is_away(
    database_url: str, bus: redis.Redis, bus_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    impatient = database_url + ("?timeout=0.05" if database_url.startswith("sqlite") else "")
    with Store.open(impatient) as store:
        add_run(store, "r")
        with _away(database_url):
            send(bus, StepBatch([record(0, 0)]))
            with ingesting(store, bus_url):
                until(lambda: f"ingest waits for {store.name}" in caplog.text, "it noticed")
        assert bus.xpending(TELEMETRY, INGEST_GROUP)["pending"] == 1
        with ingesting(store, bus_url):
            until(lambda: stored(store) == 1, "what it left behind")


POISON = b"poison"


def test_what_ingest_fails_at_is_tried_alone_and_quarantined(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason is, as long as bus and database answer. The others are stored."""
    add_run(store, "r")
    send(bus, hello(), *[StepBatch([record(step, rank)]) for step in range(5) for rank in range(2)])
    bus.xadd(TELEMETRY, {**encode(StepBatch([record(5, 0)]), "r"), b"mark": POISON})
    send(bus, *[StepBatch([record(step, rank)]) for step in range(6, 9) for rank in range(2)])
    real, failures = Ingest._settle, []

    def settle(self: Ingest, client: redis.Redis, items: Any, ended: set[str]) -> None:
        if any(item.entry.fields.get(b"mark") and item.reason is None for item in items):
            failures.append(len(items))
            raise redis.TimeoutError("Timeout reading from socket")
        real(self, client, items, ended)

    monkeypatch.setattr(Ingest, "_settle", settle)
    with ingesting(store, bus_url):
        until(lambda: settled(bus), "all is acknowledged")
        assert bus.xlen(REJECTED) == 1
        send(bus, StepBatch([record(9, 0)]), StepBatch([record(9, 1)]))
        until(lambda: settled(bus), "what comes later")
    assert failures[-3:] == [1, 1, 1]
    (reason,) = reasons(bus)
    assert reason.startswith("it was delivered ")
    assert stored(store) == 2 * 9 + 1
    assert not bus.exists("paceline:tried-alone")


def test_a_bus_that_goes_away_makes_no_entry_suspicious(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike a bus that closes the connection at an entry, and answers again at once."""
    add_run(store, "r")
    send(bus, hello(), StepBatch([record(0, 0)]))
    real, failures = Ingest._settle, []

    def settle(self: Ingest, client: redis.Redis, items: Any, ended: set[str]) -> None:
        if len(failures) < 12:
            failures.append(len(items))
            raise redis.ConnectionError("Connection closed by server.")
        real(self, client, items, ended)

    monkeypatch.setattr(Ingest, "_settle", settle)
    monkeypatch.setattr(ingest_module, "_answers", lambda client: False)
    with ingesting(store, bus_url):
        until(lambda: settled(bus), "all is acknowledged")
    assert len(failures) == 12
    assert reasons(bus) == []
    assert stored(store) == 1
    assert not bus.exists("paceline:tried-alone")


def test_a_database_that_is_away_for_long_makes_no_entry_suspicious(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_run(store, "r")
    send(bus, hello(), StepBatch([record(0, 0)]), StepBatch([record(0, 1)]))
    real, tries = telemetry.write, []

    def write(store: Store, messages: Any, **named: Any) -> Any:
        tries.append(len(messages))
        if len(tries) < 6:
            raise StoreUnavailableError("gone")
        return real(store, messages, **named)

    def receive(self: Writers, entries: Any) -> Any:
        if len(tries) < 6:
            raise StoreUnavailableError("gone")
        return real_receive(self, entries)

    real_receive = Writers.receive
    monkeypatch.setattr(Writers, "receive", receive)
    monkeypatch.setattr(telemetry, "write", write)
    counts: Counter[int] = Counter()
    often = Consumer.often

    def counted(self: Consumer, entries: Any, times: int) -> Any:
        counts.update(often(self, entries, 1).values())
        return often(self, entries, times)

    monkeypatch.setattr(Consumer, "often", counted)
    with ingesting(store, bus_url):
        until(lambda: settled(bus), "all is acknowledged")
    assert stored(store) == 2
    assert bus.xlen(REJECTED) == 0
    assert max(counts) <= 2


def test_a_database_that_is_away_counts_as_no_try_of_a_suspicious_entry(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was delivered often, so it is tried alone; only failures of its own reject it."""
    add_run(store, "r")
    send(bus, StepBatch([record(0, 0)]))
    bus.xgroup_create(TELEMETRY, INGEST_GROUP, id="0")
    read: Any = bus.xreadgroup(INGEST_GROUP, "one", {TELEMETRY: ">"})
    [[_, [[number, _]]]] = read.items() if isinstance(read, dict) else read
    bus.xclaim(TELEMETRY, INGEST_GROUP, "one", 0, [number], retrycount=10)
    real, tried_alone = Writers.receive, list[int]()

    def receive(self: Writers, entries: Any) -> Any:
        if entries and len(tried_alone) < 6:
            tried_alone.append(bus.exists("paceline:tried-alone"))
            raise StoreUnavailableError("gone")
        return real(self, entries)

    monkeypatch.setattr(Writers, "receive", receive)
    with ingesting(store, bus_url, "one"):
        until(lambda: settled(bus), "all is acknowledged")
    assert tried_alone == [1] * 6
    assert (stored(store), bus.xlen(REJECTED)) == (1, 0)
    assert not bus.exists("paceline:tried-alone")
