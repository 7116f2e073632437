"""Every record arrives or is counted, in order, and training never waits for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import torch

from paceline.node import spool as spool_module
from paceline.node.spool import Spool
from paceline.train import report as telemetry
from paceline.train.report import Emitter
from paceline.train.sink import Sink
from paceline.wire import (
    Adopted,
    Evaluation,
    Hello,
    HelloPart,
    Message,
    MetricBatch,
    RunState,
    State,
    StepBatch,
    StepRecord,
)
from paceline_backend.server.embedded import EmbeddedBus
from support import sessions
from support.ranks import Ranks
from support.records import in_parts
from support.reports import RUN, hello, in_spool, on_bus, step_record, steps_of
from support.waiting import DEADLINE_S, until


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path / "spool", "rank0", 1 << 20)
    yield made
    made.close()


def test_records_are_joined_and_messages_keep_their_place(
    bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "FLUSH_S", 3600)
    emitter = Emitter(Sink(RUN, bus_url, None), lambda: 7)
    state = RunState(State.RUNNING, 0.0, "n")
    for seq in range(5):
        emitter.record(step_record(seq))
    emitter.send(state)
    emitter.record(step_record(5))
    emitter.close()
    messages = on_bus(bus_url)
    assert steps_of(messages) == list(range(6))
    before = messages[: messages.index(state)]
    assert steps_of(before) == list(range(5))
    assert len(messages) <= 5, "records travel in batches"
    assert emitter.memory_bytes == 7
    assert emitter.dropped == 0


def test_a_message_does_not_wait_for_the_next_flush(
    bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "FLUSH_S", 3600)
    emitter = Emitter(Sink(RUN, bus_url, None), lambda: 0)
    emitter.record(step_record(0))
    emitter.send(RunState(State.RUNNING, 0.0, "n"))
    until(lambda: len(on_bus(bus_url)) == 2)
    emitter.close()


def test_a_mark_is_passed_once_all_before_it_is_on_the_bus_or_in_the_spool(
    bus_url: str, spool: Spool, tmp_path: Path
) -> None:
    for url in (bus_url, "redis://127.0.0.1:9"):
        emitter = Emitter(Sink(RUN, url, spool), lambda: 0)
        for step in range(5):
            emitter.record(step_record(step))
        assert emitter.mark().wait(DEADLINE_S)
        there = on_bus(url) if url == bus_url else in_spool(tmp_path / "spool")
        assert steps_of(there) == list(range(5))
        emitter.close()


def test_an_outage_goes_to_the_spool_and_what_follows_to_the_bus(
    tmp_path: Path,
    spool: Spool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spool_module, "CHUNK_AGE_S", 3600)
    server = EmbeddedBus(tmp_path / "bus").start()
    emitter = Emitter(Sink(RUN, server.url, spool), lambda: 0)
    emitter.record(step_record(0))
    until(lambda: steps_of(on_bus(server.url)) == [0])
    server.kill()
    for seq in range(1, 50):
        emitter.record(step_record(seq))
    directory = tmp_path / "spool"
    until(lambda: directory.exists() and list(directory.iterdir()))
    with EmbeddedBus(tmp_path / "bus", server.port):
        until(lambda: _arrives(emitter, server.url))
        until(lambda: not list(directory.glob("*.part")))
        emitter.close()
        arrived = steps_of(on_bus(server.url))
    spooled = steps_of(in_spool(directory))
    assert set(range(1, 50)) <= set(spooled)
    assert 99 in arrived
    assert emitter.dropped == 0
    assert caplog.text.count("the bus does not accept telemetry") == 1
    assert caplog.text.count("the bus accepts telemetry again") == 1


def _arrives(emitter: Emitter, url: str) -> bool:
    emitter.record(step_record(99))
    try:
        return 99 in steps_of(on_bus(url))
    except redis.RedisError:
        return False


def test_a_hello_larger_than_the_spool_is_sent_once_the_bus_is_there(tmp_path: Path) -> None:
    server = EmbeddedBus(tmp_path / "bus").start()
    server.kill()
    directory = tmp_path / "spool"
    emitter = Emitter(Sink(RUN, server.url, Spool(directory, "rank0", 10_000)), lambda: 0)
    emitter.send(hello(2_000))
    emitter.record(step_record(0))
    until(lambda: list(directory.glob("*.spool")) or list(directory.glob("*.part")))
    with EmbeddedBus(tmp_path / "bus", server.port):
        until(lambda: _arrives(emitter, server.url))
        emitter.close()
        messages = on_bus(server.url)
    assert messages[0] == hello(2_000)
    assert sum(isinstance(m, Hello) for m in messages) == 1
    assert emitter.dropped == 0
    assert 0 in steps_of(in_spool(directory))


def test_each_part_of_a_large_hello_arrives_once(tmp_path: Path) -> None:
    """Those that the spool takes while the bus is away, and the rest by the bus."""
    server = EmbeddedBus(tmp_path / "bus").start()
    server.kill()
    directory = tmp_path / "spool"
    emitter = Emitter(Sink(RUN, server.url, Spool(directory, "rank0", 300_000)), lambda: 0)
    emitter.send(hello(100_000))
    emitter.record(step_record(0))
    until(lambda: list(directory.glob("*.spool")) or list(directory.glob("*.part")))
    with EmbeddedBus(tmp_path / "bus", server.port):
        until(lambda: _arrives(emitter, server.url))
        emitter.close()
        by_bus = [m for m in on_bus(server.url) if isinstance(m, HelloPart)]
    by_spool = [m for m in in_spool(directory) if isinstance(m, HelloPart)]
    assert by_bus
    assert by_spool
    parts = sorted(by_bus + by_spool, key=lambda part: part.number)
    assert parts == in_parts(hello(100_000))
    assert emitter.dropped == 0


def test_memory_is_bounded_while_the_bus_hangs(
    tmp_path: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that takes connections and never answers."""
    monkeypatch.setattr(telemetry, "QUEUE_LIMIT", 100)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        emitter = Emitter(Sink(RUN, url, spool), lambda: 0)
        emitter.record(step_record(0))
        until(lambda: not emitter._queue)  # the thread is in the dead connection
        for seq in range(1, 1001):
            emitter.record(step_record(seq))
        assert emitter.overflowed >= 900, "recording did not wait for the bus"
        emitter.send(RunState(State.RUNNING, 0.0, "n"))
        assert len(emitter._queue) <= 100, "messages are bounded, too"
        emitter.close()
    kept = steps_of(in_spool(tmp_path / "spool"))
    assert kept == sorted(kept)
    assert len(kept) + emitter.dropped == 1002


def test_closing_ends_in_time_and_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        emitter = Emitter(
            Sink(RUN, f"redis://127.0.0.1:{server.getsockname()[1]}/0", None), lambda: 0
        )
        emitter.record(step_record(0))
        until(lambda: not emitter._queue)
        emitter.close(timeout_s=0.05)
        assert "was not sent" in caplog.text
        emitter.close()
    assert emitter.dropped == 1


# Whole ranks


def complete(messages: list[Message], world: int, steps: int) -> None:
    """Every rank's records are there, without a gap, and the leader's record fits them."""
    records = {(r.rank, r.seq): r for m in messages if isinstance(m, StepBatch) for r in m.records}
    assert sorted(records) == [(rank, seq) for rank in range(world) for seq in range(steps)]
    for (_, seq), r in records.items():
        assert r.step == seq
        assert (r.loss is None) == (r.samples == 0)
        assert r.memory_bytes > 1 << 20
        assert 0 < r.compute_s < r.step_s
    segments = {m.plan.seq: m.plan for m in messages if isinstance(m, Adopted)}
    assert sorted(segments) == list(range(len(segments)))
    counts = [row for seq in sorted(segments) for row in segments[seq].counts]
    assert counts == [
        [records[rank, step].samples for rank in range(world)] for step in range(steps)
    ]
    assert len([m for m in messages if isinstance(m, Hello)]) == 1


def environment(url: str, directory: Path) -> dict[str, str]:
    return {"PACELINE_RUN": RUN, "PACELINE_BUS": url, "PACELINE_SPOOL": str(directory)}


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 2])
def test_every_step_of_every_rank_is_reported_once(
    ranks: Ranks, bus_url: str, tmp_path: Path, workers: int
) -> None:
    loading = {"num_workers": workers}
    ranks.run(
        sessions.train, 23, 2, {"global_batch": 4}, loading, env=environment(bus_url, tmp_path)
    )
    complete(on_bus(bus_url), 2, 12)
    (hello,) = [m for m in on_bus(bus_url) if isinstance(m, Hello)]
    assert hello.lookahead == 2 * workers
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_a_bus_killed_in_mid_run_stops_nothing_and_loses_nothing(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Killed at step 7 of 40; afterwards bus and spool together hold every record."""
    with EmbeddedBus(tmp_path / "bus") as server:
        logs = ranks.run(
            sessions.train, 40, 4, {"global_batch": 4}, {}, None, None,
            sessions.kill_at, 7, server.pid,
            env=environment(server.url, tmp_path / "spool"),
        )  # fmt: skip
        assert all(len(log.batches) == 40 for log in logs)
        server.stop()
        server.start()
        arrived = on_bus(server.url)
    spooled = in_spool(tmp_path / "spool")
    assert len(steps_of(spooled)) >= 2 * 30, "the fault fired"
    complete(arrived + spooled, 2, 40)


@pytest.mark.ranks
def test_a_second_session_in_a_script_trains_and_leaves_the_record_alone(
    ranks: Ranks, bus_url: str, tmp_path: Path
) -> None:
    seen = ranks.run(sessions.two_sessions, (24, 32), env=environment(bus_url, tmp_path))
    complete(on_bus(bus_url), 2, 6)
    for k, count in enumerate((24, 32)):
        assert sorted(i for of_rank in seen for i in of_rank[k]) == list(range(count))


@pytest.mark.ranks
def test_a_resumed_attempt_says_where_it_begins(ranks: Ranks, bus_url: str, tmp_path: Path) -> None:
    options = {"global_batch": 4, "seed": 9}
    before = ranks.run(sessions.train, 23, 2, options, {}, None, 3)
    env = environment(bus_url, tmp_path) | {"TORCHELASTIC_RESTART_COUNT": "2"}
    ranks.run(sessions.train, 23, 2, options, {}, before[0].state, env=env)
    messages = on_bus(bus_url)
    (hello,) = [m for m in messages if isinstance(m, Hello)]
    assert (hello.attempt, hello.epoch, hello.step) == (2, 0, 4)
    assert len(hello.used) == 4 * 16
    records = [r for m in messages if isinstance(m, StepBatch) for r in m.records]
    assert {r.attempt for r in records} == {2}
    assert sorted({r.step for r in records}) == list(range(4, 12))


@pytest.mark.ranks
def test_metrics_and_evaluations_are_reported(ranks: Ranks, bus_url: str, tmp_path: Path) -> None:
    refusals = ranks.run(
        sessions.evaluating, 22, 2, {"global_batch": 4}, env=environment(bus_url, tmp_path)
    )
    assert [each.split(":")[0] for each in refusals[0]] == [
        *("session.evaluated", "samples is -1", "samples is 1.5", "session.evaluated")
    ]
    messages = on_bus(bus_url)
    complete(messages, 2, 12)
    steps = {(r.rank, r.step): r for m in messages if isinstance(m, StepBatch) for r in m.records}
    metrics = [r for m in messages if isinstance(m, MetricBatch) for r in m.records]
    assert {(r.rank, r.step) for r in metrics} == {key for key, r in steps.items() if r.samples}
    assert all(r.weight == steps[r.rank, r.step].samples for r in metrics)
    assert all(r.values["rank"] == r.rank and r.values.keys() == {"rank", "first"} for r in metrics)
    seen = [
        (m.rank, m.step, m.epoch, m.trained, m.samples, m.values)
        for m in messages
        if isinstance(m, Evaluation)
    ]
    assert sorted(seen, key=str) == sorted(
        [
            (0, -1, 0, 0, None, {"accuracy": 0.0}),
            (0, 1, 0, 8, 1, {"within": 0.0}),
            (1, 1, 0, 8, 2, {"within": 1.0}),
            (0, 5, 0, 22, None, {"accuracy": 0.5, "loss": 1.0}),
            (1, 5, 0, 22, 1, {"part": 1.0}),
            (0, 11, 1, 44, None, {"accuracy": 1.5, "loss": 1.0}),
            (1, 11, 1, 44, 1, {"part": 1.0}),
        ],
        key=str,
    )


# Times


def records_of(url: str) -> list[StepRecord]:
    return [r for m in on_bus(url) if isinstance(m, StepBatch) for r in m.records]


@pytest.mark.ranks
def test_compute_time_leaves_out_the_wait_for_others(
    ranks: Ranks, bus_url: str, tmp_path: Path
) -> None:
    """Rank 1 takes 60 ms more at every step: its peer waits, and does not seem to compute."""
    ranks.run(
        sessions.train, 40, 1, {"global_batch": 4}, {}, None, None,
        sessions.wait_at, 1, 0.06,
        env=environment(bus_url, tmp_path),
    )  # fmt: skip
    by_rank = [[r for r in records_of(bus_url) if r.rank == rank] for rank in range(2)]
    fast, slow = by_rank
    steps = list(zip(fast, slow, strict=True))
    assert median([late.compute_s for _, late in steps]) >= 0.06
    assert median([late.compute_s - early.compute_s for early, late in steps]) > 0.03
    assert median([early.sync_s - late.sync_s for early, late in steps]) > 0.03
    assert all(r.compute_s + r.sync_s <= r.step_s for r in fast + slow)


def test_compute_time_of_a_single_process_leaves_out_the_optimiser(
    bus_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(bus_url, tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("paceline.train.environment._taken", {})
    monkeypatch.setattr(torch.optim.SGD, "step", lambda *_: time.sleep(0.05))
    sessions.train(16, 1, {"global_batch": 4})
    records = records_of(bus_url)
    assert len(records) == 4
    assert min(r.step_s for r in records) >= 0.05
    assert all(0 < r.compute_s <= r.step_s - 0.05 for r in records)


@pytest.mark.ranks
@pytest.mark.parametrize("every", [1, 3])
def test_emulated_speeds_rule_the_compute_time(
    ranks: Ranks, bus_url: str, tmp_path: Path, every: int
) -> None:
    """Also where gradients are accumulated, and so not reduced at every step."""
    speeds = '{"a_s": [0.005, 0.015], "b_s": [0.01, 0.01]}'
    env = environment(bus_url, tmp_path) | {"PACELINE_EMULATE": speeds}
    slept = ranks.run(sessions.held_while_accumulating, 24, every, {"global_batch": 4}, "", env=env)
    records = records_of(bus_url)
    assert len(records) == 24
    held_s = [[0.005, 0.015][r.rank] * r.load + 0.01 for r in records]
    assert all(r.compute_s >= seconds for r, seconds in zip(records, held_s, strict=True))
    for rank, seconds in enumerate(slept):
        planned = sum(s for r, s in zip(records, held_s, strict=True) if r.rank == rank)
        assert 0 < seconds <= planned + 1e-9, "nothing is held twice"
    (hello,) = [m for m in on_bus(bus_url) if isinstance(m, Hello)]
    assert hello.emulated == {"a_s": [0.005, 0.015], "b_s": [0.01, 0.01]}


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
