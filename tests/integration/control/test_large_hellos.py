"""A Hello of a large data set travels and is stored in parts, and stops nobody else."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import redis
import sqlalchemy as sa

from paceline.train.sink import Sink
from paceline.wire import (
    INGEST_GROUP,
    Hello,
    HelloPart,
    NodeState,
    RunChanged,
    RunState,
    State,
    StepBatch,
    encode,
    live,
    run_telemetry,
)
from paceline.wire.bus import connect, publish
from paceline.wire.parts import MOST_SAMPLES, PART_BYTES, digest, encode_hello, joined
from paceline_backend.requests import sessions
from paceline_backend.requests.rejected import REJECTED
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.store import Store, hellos, runs, schema
from paceline_backend.store.planning import load
from support.ingesting import ingesting, reasons, said, settled
from support.records import add_run, adopted, hello, in_parts, record
from support.waiting import until

STREAM = run_telemetry("r")


def large(samples: int = 100_000, **fields: Any) -> Hello:
    sizes = np.random.default_rng(fields.get("attempt", 0)).uniform(1, 9, samples)
    return hello(sizes=sizes.astype("<f8").tobytes(), **fields)


def send(bus: redis.Redis, *messages: Any) -> None:
    for message in messages:
        publish(bus, STREAM, message, "r")


def settle(store: Store, bus: redis.Redis, bus_url: str) -> None:
    with ingesting(store, bus_url):
        until(lambda: settled(bus, STREAM), "all is acknowledged")


def stored(store: Store) -> Hello | None:
    with store.read() as connection:
        return runs.hello(connection, runs.key_of(connection, "r"))


def parts_stored(store: Store) -> int:
    with store.read() as connection:
        query = sa.select(sa.func.count()).select_from(schema.hello_parts)
        return connection.execute(query).scalar_one()


def test_a_small_hello_is_one_message_and_a_large_one_is_small_entries() -> None:
    assert in_parts(hello()) == [hello()]
    whole = large()
    parts = in_parts(whole)
    assert len(parts) == 7
    assert all(isinstance(p, HelloPart) and len(p.data) <= PART_BYTES for p in parts)
    data = b"".join(p.data for p in parts if isinstance(p, HelloPart))
    assert joined(data, digest(data), 2) == whole
    many = hello(sizes=bytes(8 * (MOST_SAMPLES + 1)))
    with pytest.raises(ValueError, match=f"at most {MOST_SAMPLES:,}: use paceline.data.Stream"):
        encode_hello(many)


def test_parts_come_in_any_order_and_repeatedly(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """Also beside parts of the attempts before and after, and records that came first."""
    key = add_run(store, "r", signed=True, max_restarts=3)
    before, whole, after = (large(attempt=attempt) for attempt in range(3))
    messages = in_parts(whole) * 2 + in_parts(before)[1:] + in_parts(after)[:3]
    random.Random(7).shuffle(messages)
    send(bus, StepBatch([record(0, rank, attempt=1) for rank in range(2)]), *messages)
    settle(store, bus, bus_url)
    assert reasons(bus) == []
    assert stored(store) == whole
    row = runs.get(store, "r")
    assert (row["state"], row["attempt"], row["samples"]) == ("running", 1, 100_000)
    assert RunChanged() in said(bus, live("r"))
    assert parts_stored(store) == 10, "the run's own, and those of a Hello on its way"
    send(bus, *in_parts(before), *in_parts(after)[3:])
    settle(store, bus, bus_url)
    assert stored(store) == after
    assert parts_stored(store) == 7
    send(bus, adopted(0, 0, attempt=2))
    settle(store, bus, bus_url)
    with store.read() as connection:
        loaded = load(connection, key)
    assert loaded is not None
    assert len(loaded[0].sizes) == 100_000


def forged(data: bytes) -> list[HelloPart]:
    cuts = range(0, len(data), PART_BYTES)
    return [
        HelloPart(0, digest(data), n, len(cuts), data[at : at + PART_BYTES])
        for n, at in enumerate(cuts)
    ]


LIES = {
    "an unreadable whole": (forged(b"\xc1" * 300_000), "the parts of a Hello cannot be decoded"),
    "another message": (
        forged(msgspec.msgpack.encode(StepBatch([record(s, 0) for s in range(3_000)]))),
        "Invalid value 'steps'",
    ),
    "more ranks than the run has": (in_parts(large(world=77)), "the run has at most 2 ranks"),
    "sizes that are no numbers": (
        in_parts(hello(sizes=np.full(50_000, np.nan).tobytes())),
        "sizes must contain finite numbers",
    ),
    "another digest": (
        [msgspec.structs.replace(part, hello=b"x" * 16) for part in in_parts(large())],
        "do not match their digest",
    ),
    "another attempt": (
        forged(msgspec.msgpack.encode(large(attempt=1))),
        "form a Hello of attempt 1",
    ),
    "lists of lists": (
        forged(encode(hello(profiles=[[]] * 300_000))[b"data"]),
        "may have at most 67,584",
    ),
    "lists of lists, named twice": (
        forged(
            b"\x83\xa4type\xa5hello\xa5sizes"
            + b"\xdd\x00\x04\x00\x00"
            + b"\x90" * 2**18
            + b"\xa5sizes\xc4\x08"
            + bytes(8)
        ),
        "the parts of a Hello cannot be decoded",
    ),
    "a number that there is not": ([HelloPart(0, b"x" * 16, 5, 5, b"x")], "number is 5"),
    "too many parts": ([HelloPart(0, b"x" * 16, 0, 10**6, b"x")], "of is 1000000"),
    "a short digest": ([HelloPart(0, b"x", 0, 2, b"x")], "hello has 1 bytes"),
    "a large part": ([HelloPart(0, b"x" * 16, 0, 2, bytes(PART_BYTES + 1))], "data has 131,073"),
}


def test_parts_that_make_no_hello_are_rejected(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r", signed=True)
    with ingesting(store, bus_url):
        for lie, (parts, reason) in LIES.items():
            bus.delete(REJECTED)
            send(bus, *parts)
            until(lambda: settled(bus, STREAM), lie)
            assert any(reason in each for each in reasons(bus)), lie
            assert parts_stored(store) == 0, lie
        assert stored(store) is None
        bus.delete(REJECTED)
        send(bus, *in_parts(large()))
        until(lambda: settled(bus, STREAM), "all is acknowledged")
    assert reasons(bus) == []
    assert stored(store) == large()


def test_a_run_that_completes_no_hello_does_not_fill_the_database(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r", signed=True)
    send(bus, *in_parts(large()))
    for number in range(30):
        send(bus, HelloPart(0, number.to_bytes(16, "big"), 0, 2, bytes(PART_BYTES)))
    settle(store, bus, bus_url)
    assert parts_stored(store) <= 7 + 2
    assert stored(store) == large()


def test_parts_of_any_attempt_do_not_fill_the_database(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """Also with the digest of the run's own Hello; and none is left when the run has ended."""
    add_run(store, "r", signed=True, max_restarts=40)
    own = in_parts(large())
    assert isinstance(own[0], HelloPart)
    send(bus, *own)
    for attempt in range(1, 30):
        send(bus, msgspec.structs.replace(own[0], attempt=attempt))
    settle(store, bus, bus_url)
    assert parts_stored(store) <= 7 + 2
    assert stored(store) == large()
    send(bus, RunState(State.FINISHED, 2.0, "", 0, 0))
    settle(store, bus, bus_url)
    assert parts_stored(store) == 7
    assert stored(store) == large()


def test_a_part_of_the_runs_own_hello_has_nothing_read(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when it comes again, nor when it holds something else."""
    add_run(store, "r", signed=True)
    read: list[hellos.HelloKey] = []
    monkeypatch.setattr(hellos, "read", lambda c, named: (read.append(named), READ(c, named))[1])
    parts = in_parts(large())
    send(bus, *parts)
    settle(store, bus, bus_url)
    assert len(read) == 1
    for part in parts[:3]:
        assert isinstance(part, HelloPart)
        send(bus, part, msgspec.structs.replace(part, data=b"x"))
        settle(store, bus, bus_url)
    assert len(read) == 1
    assert stored(store) == large()
    assert reasons(bus) == []


READ = hellos.read


def test_a_part_that_came_first_does_not_stand_for_a_small_hello(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r", signed=True)
    name = digest(encode(hello())[b"data"])
    other = encode(hello(world=77))[b"data"]
    send(bus, HelloPart(0, name, 0, 2, other))
    settle(store, bus, bus_url)
    send(bus, hello())
    settle(store, bus, bus_url)
    assert stored(store) == hello()


def test_unknown_keys_of_a_small_hello_are_not_stored(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r", signed=True)
    fields = encode(hello(), "r")
    message = msgspec.msgpack.decode(fields[b"data"]) | {"unknown": "x" * 100_000}
    bus.xadd(STREAM, {**fields, b"data": msgspec.msgpack.encode(message)})
    settle(store, bus, bus_url)
    assert reasons(bus) == []
    assert stored(store) == hello()
    with store.read() as connection:
        data = connection.execute(sa.select(schema.hello_parts.c.data)).scalar_one()
    assert data == encode(hello())[b"data"]


def test_parts_that_were_not_checked_are_left_out(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r", signed=True)
    send(bus, hello())
    settle(store, bus, bus_url)
    assert stored(store) == hello()
    with store.write() as connection:
        other = encode(hello(world=77))[b"data"]
        connection.execute(sa.update(schema.hello_parts).values(data=other))
    assert stored(store) is None


def test_others_are_ingested_while_a_hello_is_put_together(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part's entry stays until then, so that whoever takes over begins again."""
    add_run(store, "r", signed=True)
    add_run(store, "other", signed=True)
    go_on = threading.Event()

    def slow(connection: sa.Connection, named: hellos.HelloKey) -> bytes:
        go_on.wait(30)
        return READ(connection, named)

    monkeypatch.setattr(hellos, "read", slow)
    send(bus, *in_parts(large()), RunState(State.FINISHED, 2.0, "", 0, 0))
    publish(bus, run_telemetry("other"), hello(), "other")
    with ingesting(store, bus_url):
        until(lambda: settled(bus, run_telemetry("other")), "the other's Hello")
        until(lambda: bus.xlen(STREAM) == 2, "the last part, and the end behind it")
        assert stored(store) is None
    monkeypatch.setattr(hellos, "read", READ)
    go_on.set()
    settle(store, bus, bus_url)  # another ingest
    assert stored(store) == large()
    assert runs.get(store, "r")["state"] == "finished"
    assert RunChanged() in said(bus, live("r"))


def test_who_follows_is_told_though_ingest_ended_after_the_commit(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r", signed=True)
    parts = in_parts(large())
    send(bus, *parts)
    settle(store, bus, bus_url)
    bus.delete(live("r"))
    send(bus, parts[-1])
    settle(store, bus, bus_url)
    assert said(bus, live("r")) == [], "nothing changed"
    send(bus, parts[-1])
    bus.xreadgroup(INGEST_GROUP, "one", {STREAM: ">"})  # and dies
    settle(store, bus, bus_url)
    assert said(bus, live("r")) == [RunChanged()]


def test_a_hello_that_ends_ingest_is_rejected_for_good(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """Its parts are deleted, too: otherwise each further part would end ingest again."""
    add_run(store, "r", signed=True)
    *most, last = in_parts(large())
    send(bus, *most)
    settle(store, bus, bus_url)
    assert parts_stored(store) == 6
    send(bus, last)
    [(_, [(number, _)])] = bus.xreadgroup(INGEST_GROUP, "one", {STREAM: ">"})
    for _ in range(5):
        bus.xclaim(STREAM, INGEST_GROUP, "one", 0, [number])
    bus.hset("paceline:tried-alone", f"{STREAM} {number.decode()}", 3)
    settle(store, bus, bus_url)
    assert "each time ingest failed" in reasons(bus)[0]
    assert parts_stored(store) == 0


LARGE = {
    "a Hello": hello(profiles=[[]] * 1_200_000),
    "a plan": msgspec.structs.replace(
        adopted(0, 0),
        plan=msgspec.structs.replace(adopted(0, 0).plan, memory={"x": [[]] * 2**21}),
    ),
    "a node": NodeState("n", "n", 1, 1, [], 1.0, "1", [""] * 2**21),
}


@pytest.mark.parametrize("what", LARGE)
def test_lists_that_would_take_all_memory_are_not_decoded(
    store: Store, bus: redis.Redis, bus_url: str, what: str
) -> None:
    add_run(store, "r", signed=True)
    send(bus, LARGE[what])
    settle(store, bus, bus_url)
    assert "outside arrays of samples: the limit is 1,048,576" in reasons(bus)[0]


INGEST = """
import sys, threading
from paceline_backend.control.ingest import Ingest
from paceline_backend.store import Store
database, bus = sys.argv[1:]
stop = threading.Event()
thread = threading.Thread(target=Ingest(Store.open(database), bus, "one").run, args=[stop])
thread.start()
sys.stdin.read()
stop.set()
thread.join()
(peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
print(int(peak.split()[1]) // 1024)
"""


@pytest.mark.long
def test_the_largest_hello_is_borne(tmp_path: Path) -> None:
    """By the bus with its limits, by the time-outs, by ingest's memory, and by another run."""
    numbers = np.random.default_rng(7)
    whole = hello(
        sizes=numbers.uniform(1, 500, MOST_SAMPLES).astype("<f8").tobytes(),
        used=np.arange(MOST_SAMPLES // 2, dtype="<u4").tobytes(),
    )
    url = f"sqlite:///{tmp_path}/paceline.db"
    with EmbeddedBus(tmp_path / "bus") as server, Store.open(url) as store:
        key = add_run(store, "r", signed=True)
        add_run(store, "other", signed=True)
        with connect(server.url) as bus:
            command = [sys.executable, "-c", INGEST, url, server.url]
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as ingest:
                publish(bus, run_telemetry("other"), hello(), "other")
                sink = Sink("r", sessions.of_run(store, server.url, "r").bus, None, STREAM)
                sender = threading.Thread(target=sink.deliver, args=[whole])
                sender.start()
                step = 0
                while sender.is_alive() or bus.xlen(STREAM):
                    batch = StepBatch([record(step, rank) for rank in range(2)])
                    publish(bus, run_telemetry("other"), batch, "other")
                    step += 1
                    sender.join(0.05)
                until(lambda: settled(bus, run_telemetry("other")), "the other run's rows")
                sink.end()
                sink.close(0)
                peak_mib = int(ingest.communicate("")[0])
            assert reasons(bus) == []
            assert int(bus.memory_usage(live("r")) or 0) < 2**20
        assert sink.lost == 0
        with store.read() as connection:
            rows = sa.select(sa.func.count()).select_from(schema.worker_steps)
            assert connection.execute(rows).scalar_one() == 2 * step
            loaded = load(connection, key)
    assert loaded is not None
    assert len(loaded[0].sizes) == MOST_SAMPLES
    assert peak_mib < 768
