"""What ingest reads, stores and publishes at once: bounded by messages, by bytes and by records."""

from __future__ import annotations

import pytest
import redis

from paceline.wire import INGEST_GROUP, TELEMETRY, Message, RunState, State, StepBatch, live
from paceline.wire.bus import publish
from paceline_backend.control.consumer import _LINGER_S, Consumer, Entry, in_order
from paceline_backend.requests.rejected import REJECTED
from paceline_backend.store import Store
from support.ingesting import heard, ingesting, said, settled
from support.records import add_run, hello, record
from support.waiting import until


def test_records_that_follow_each_other_are_published_together(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """In the order in which they came, also between other messages, and of each run by itself."""
    for run in ("r", "other"):
        add_run(store, run, nproc=300)
    sent: list[Message] = [
        hello(world=300),
        *(StepBatch([record(0, rank)]) for rank in range(250)),
        RunState(State.RUNNING, 5.0, "n"),
        StepBatch([record(1, 0)]),
        *(StepBatch([record(1, rank), record(2, rank)]) for rank in range(1, 3)),
        StepBatch([record(3, rank) for rank in range(120)]),
        StepBatch([record(4, 0)]),
    ]
    publish(bus, TELEMETRY, hello(world=300), "other")
    for number, message in enumerate(sent):
        publish(bus, TELEMETRY, message, "r")
        if number < 3:
            publish(bus, TELEMETRY, StepBatch([record(0, number)]), "other")
    with ingesting(store, bus_url) as ingest:
        until(lambda: settled(bus), "all is acknowledged")
    assert ingest.stats.batches == 1
    assert said(bus, live("r")) == heard(sent)
    assert said(bus, live("other"))[1:] == [record(0, rank) for rank in range(3)]
    assert bus.xlen(live("r")) == bus.xlen(live("other")) == 1


def test_a_batch_grows_until_it_has_many_bytes(bus: redis.Redis) -> None:
    pipeline = bus.pipeline(transaction=False)
    for _ in range(3_000):
        pipeline.xadd("small", {"data": b"x" * 100})
        pipeline.xadd("large", {"data": b"x" * 10_000})
    pipeline.execute()
    for stream, most in (("small", 3_000), ("large", 200)):
        consumer = Consumer(bus, [stream], INGEST_GROUP, "one")
        assert consumer.read(4_000, 0.01) == [], "the group is made"
        assert len(consumer.read(4_000, 0.01, 10 * 2**20)) == min(3_000, most * 5 + 41)
        assert consumer.unread == ({"large"} if stream == "large" else set())


def test_a_batch_waits_for_entries_that_arrive_at_about_the_same_time(
    bus: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = Consumer(bus, ["one", "two"], INGEST_GROUP, "one")
    for _ in range(2):
        assert consumer.read(4_000, 0.01) == [], "the groups are made"
    bus.xadd("one", {"data": b"x"})
    waits: list[float] = []

    def sleep(duration_s: float) -> None:
        waits.append(duration_s)
        bus.xadd("two", {"data": b"x"})

    monkeypatch.setattr("paceline_backend.control.consumer.time.sleep", sleep)
    assert [entry.stream for entry in consumer.read(4_000, 0.01)] == ["one", "two"]
    assert waits == [_LINGER_S]
    assert not consumer.unread


def test_a_stream_of_large_entries_does_not_hold_up_others(bus: redis.Redis) -> None:
    for _ in range(40):
        bus.xadd("large", {"data": b"x" * 50_000})
    for _ in range(2_000):
        bus.xadd("small", {"data": b"x"})
    consumer = Consumer(bus, ["large", "small"], INGEST_GROUP, "one")
    assert consumer.read(4_000, 0.01) == [], "the groups are made"
    streams = [entry.stream for entry in consumer.read(4_000, 0.01, 1_000_000)]
    assert streams.count("small") == 2_000, "its entries are few bytes"
    assert 15 <= streams.count("large") <= 20
    assert consumer.unread


def test_a_batch_of_large_entries_does_not_grow_beyond_its_bytes(bus: redis.Redis) -> None:
    pipeline = bus.pipeline(transaction=False)
    for _ in range(600):
        pipeline.xadd("large", {"data": b"x" * 10_000})
    pipeline.execute()
    consumer = Consumer(bus, ["large"], INGEST_GROUP, "one")
    assert consumer.read(4_000, 0.01) == [], "the group is made"
    assert max(len(consumer.read(4_000, 0.01, 500_000)) for _ in range(12)) <= 50


def test_a_stream_that_ends_while_its_entries_are_claimed_stops_no_reading(
    bus: redis.Redis,
) -> None:
    """It has no group any more, so each further XAUTOCLAIM on it would fail."""
    streams = ["ends", "stays"]
    for stream in streams:
        for _ in range(20):
            bus.xadd(stream, {"data": b"x"})
    dead = Consumer(bus, streams, INGEST_GROUP, "dead")
    assert dead.read(40, 0.01) == [], "the groups are made"
    for entry in [entry for _ in range(20) for entry in dead.read(40, 0.01)]:
        bus.xclaim(entry.stream, INGEST_GROUP, "dead", 0, [entry.number], idle=3_600_000)
    consumer = Consumer(bus, streams, INGEST_GROUP, "one", claim_idle_s=600.0)
    claimed = consumer.read(40, 0.01)
    assert {entry.stream for entry in claimed} == set(streams)
    assert len(claimed) < 20, "the scan of both goes on"
    bus.delete("ends")
    consumer.follow(["stays"])
    numbers = [entry.number for entry in claimed if entry.stream == "stays"]
    while more := consumer.read(40, 0.01):
        assert consumer.repeated
        numbers += [entry.number for entry in more]
    assert len(set(numbers)) == len(numbers) == 20


def test_entries_are_dealt_with_in_order_and_in_parts_of_so_many_bytes() -> None:
    def entry(number: str, size: int, stream: str = "paceline:run:r:telemetry") -> Entry:
        return Entry(stream, number.encode(), {b"data": bytes(size)})

    node = "paceline:node:n:telemetry"
    entries = [entry("7-0", 400, node), entry("2-0", 400), entry("10-0", 400), entry("7-9", 3_000)]
    split = in_order(entries, 1_000)
    assert [[each.number for each in part] for part in split] == [
        [b"2-0"],
        [b"7-9"],
        [b"7-0", b"10-0"],
    ]
    assert split[2][0].stream == node, "of one moment, what a node says comes last"
    assert in_order([], 1_000) == []


def test_large_messages_are_stored_a_few_at_a_time(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their records take many times their bytes in memory."""
    monkeypatch.setattr("paceline_backend.control.ingest._AT_ONCE_BYTES", 30_000)
    add_run(store, "r")
    publish(bus, TELEMETRY, hello(), "r")
    for step in range(0, 1_000, 100):
        publish(bus, TELEMETRY, StepBatch([record(step + k, 0) for k in range(100)]), "r")
    with ingesting(store, bus_url) as ingest:
        until(lambda: settled(bus), "all is acknowledged")
    assert (ingest.stats.rows, bus.xlen(REJECTED)) == (1_000, 0)
    assert ingest.stats.batches == 5
