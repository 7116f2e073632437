"""What ingest asks of a message before anything else sees it."""

from __future__ import annotations

from typing import Any

import pytest
import redis
import sqlalchemy as sa

from paceline.wire import TELEMETRY, Fallback, Message, NodeState, RoundBatch, StepBatch, encode
from paceline.wire.bus import publish
from paceline_backend.control import checks, writers
from paceline_backend.requests import rejected
from paceline_backend.store import Store, schema, telemetry
from support import poison
from support.ingesting import ingest_all, ingesting, reasons, settled
from support.records import a_round, add_run, adopted, hello, record
from support.waiting import until

WIDE = adopted(0, 0, counts=[[1, 1, 1]])


def send(bus: redis.Redis, *messages: Message, run: str = "r") -> None:
    for message in messages:
        publish(bus, TELEMETRY, message, run)


def placed(store: Store) -> list[tuple[int, int, int]]:
    """Attempt, step and rank of what is stored."""
    c = schema.worker_steps.c
    with store.read() as connection:
        rows = connection.execute(sa.select(c.attempt, c.step, c.rank).order_by(c.step, c.rank))
        return [(row[0], row[1], row[2]) for row in rows]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (StepBatch([record(0, 0), record(1, 2)]), "rank 2 is out of range: attempt 0 has 2 ranks"),
        (StepBatch([record(0, 1, attempt=2)]), "StepBatch.attempt is 2"),
        (StepBatch([record(0, 1, compute_s=-1.0)]), "at least 0"),
        (RoundBatch([a_round(0, rank=2)]), "rank 2 is out of range"),
        (RoundBatch([a_round(0, attempt=9)]), "RoundBatch.attempt is 9"),
        (RoundBatch([a_round(0, waited_s=-1.0)]), "at least 0"),
        (hello(world=3), "Hello.world is 3: the run has at most 2 ranks"),
        (hello(attempt=2), "its last attempt is 1; resume the run"),
        (hello(started_at=-1.0), "Hello.started_at is -1.0"),
        (adopted(0, 0, attempt=2), "Adopted.attempt is 2"),
        (adopted(0, 0, at=-1.0), "Adopted.adopted_at is -1.0"),
        (WIDE, "counts of 3 ranks; the run has at most 2"),
        (Fallback(2, 0, "why"), "Fallback.attempt is 2"),
        (NodeState("n", "host", 2, 2**30, [], -5.0, "0"), "NodeState.at is -5.0"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_what_a_run_cannot_say_is_rejected_also_before_its_hello(
    store: Store, bus: redis.Redis, bus_url: str, bad: Message, reason: str
) -> None:
    add_run(store, "r", nproc=2, max_restarts=1)
    send(bus, bad, StepBatch([record(3, 1, attempt=1)]))
    ingest_all(store, bus_url)
    [said] = reasons(bus)
    assert reason in said
    assert placed(store) == [(1, 3, 1)]
    with store.read() as connection:
        assert connection.scalar(sa.select(schema.runs.c.hello)) is None


def test_a_data_set_has_a_greatest_size(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "MOST_SAMPLES", 31)
    add_run(store, "r")
    send(bus, hello())  # 32 samples
    ingest_all(store, bus_url)
    assert reasons(bus) == ["run r: Hello.sizes has 32 entries: a data set has at most 31 samples"]


@pytest.mark.parametrize("batch", [StepBatch, RoundBatch])
def test_a_message_has_a_greatest_number_of_records(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch, batch: Any
) -> None:
    """Those of one step of all ranks at least."""
    monkeypatch.setattr(checks, "_MOST_RECORDS", 2)
    add_run(store, "r", nproc=3)
    row = record(0, 0) if batch is StepBatch else a_round(0)
    send(bus, batch([row] * 3), batch([row] * 4))
    ingest_all(store, bus_url)
    [said] = reasons(bus)
    assert said.endswith(".records has 4 entries: a message of this run has at most 3")


def test_messages_of_too_many_bytes_are_not_decoded(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "LARGEST_ARGUMENT", len(encode(hello())[b"data"]))
    add_run(store, "r")
    long = StepBatch([record(step, 0) for step in range(1, 50)])
    send(bus, hello(), StepBatch([record(0, 0)]), long)
    ingest_all(store, bus_url)
    [said] = reasons(bus)
    assert said.startswith("the message has ")
    assert placed(store) == [(0, 0, 0)]


def test_each_record_is_checked_against_its_own_attempt(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """An attempt with fewer ranks does not shrink the one before it."""
    add_run(store, "r", nproc=4, max_restarts=1)
    send(bus, hello(world=4), hello(world=2, attempt=1, step=8))
    late = [StepBatch([record(7, rank)]) for rank in (3, 4)]
    now = [StepBatch([record(8, rank, attempt=1)]) for rank in (1, 2)]
    send(bus, *late, *now)
    ingest_all(store, bus_url)
    assert placed(store) == [(0, 7, 3), (1, 8, 1)]
    assert [reason.partition(" out of range: ")[2] for reason in reasons(bus)] == [
        "attempt 0 has 4 ranks",
        "attempt 1 has 2 ranks",
    ]


def test_an_attempt_that_was_allowed_meanwhile_is_taken(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r")
    with ingesting(store, bus_url):
        send(bus, StepBatch([record(0, 0, attempt=1)]))
        until(lambda: bus.xlen(rejected.REJECTED) == 1, "it is refused")
        with store.write() as connection:
            connection.execute(sa.update(schema.runs).values(max_restarts=1))
        send(bus, StepBatch([record(0, 0, attempt=1)]))
        until(lambda: settled(bus), "all is acknowledged")
    assert placed(store) == [(1, 0, 0)]


def test_runs_that_are_known_stay_known_beside_thousands_of_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_KNOWN", 2)
    asked, batch = checks.Checks(store), StepBatch([record(0, 0)])
    for run in ("second", "third", "fourth"):
        add_run(store, run)
    add_run(store, "r")
    for run in ("second", "third", "fourth"):
        assert asked.reasons([("r", batch), (run, batch)]) == [None, None]


def test_a_simulated_run_fails_as_often_as_its_scenario_says(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    add_run(store, "r", backend="simulated")
    send(bus, hello(attempt=7), StepBatch([record(0, 0, attempt=7)]))
    ingest_all(store, bus_url)
    assert (placed(store), reasons(bus)) == ([(7, 0, 0)], [])


def test_many_bad_messages_cost_few_transactions(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of bad messages must not take the time of good ones."""
    add_run(store, "r")
    batches = []
    real = telemetry.write

    def write(store: Store, messages: Any, **named: Any) -> Any:
        batches.append(len(messages))
        return real(store, messages, **named)

    monkeypatch.setattr(telemetry, "write", write)
    bad = [poison.in_step(load=poison.NAN), poison.in_step(rank=9)]
    for step in range(60):
        send(bus, StepBatch([record(step, 0)]))
        for data in bad:
            fields: Any = poison.fields(data)
            bus.xadd(TELEMETRY, fields)
    ingest_all(store, bus_url)
    assert len(placed(store)) == 60
    assert bus.xlen(rejected.REJECTED) == 120
    assert batches == [120, 60]


def test_hellos_of_thousands_of_unknown_runs_fills_neither_log_nor_memory(
    store: Store, bus: redis.Redis, bus_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1_500):
        send(bus, hello(), run=f"ghost-{number}")
    with ingesting(store, bus_url):
        until(lambda: settled(bus), "all is acknowledged")
    assert rejected.counts(bus) == (rejected.MOST_OF_WRITER, 1_500)
    assert sum("unknown run" in text for text in caplog.messages) == 1_000
