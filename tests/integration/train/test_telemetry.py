"""Every record arrives or is counted, in order, and training never waits for it."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from paceline import wire
from paceline.node import spool as spool_module
from paceline.node.spool import Spool, drain, dropped
from paceline.train import report as telemetry
from paceline.train.report import Emitter
from paceline.wire import Adopted, Hello, Message, RunState, StepBatch, StepRecord
from paceline_backend.server.embedded import EmbeddedBus
from support import sessions
from support.ranks import Ranks

RUN = "r1"


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def record(seq: int) -> StepRecord:
    return StepRecord(0, 0, seq, seq, 0, 0, 1, 1.0, 0.0, 0.1, 0.0, 0.1, 0.0)


def unpacked(fields: dict[bytes, bytes]) -> Message:
    run, message = wire.decode(fields)
    assert run == RUN
    return message


def on_bus(url: str) -> list[Message]:
    with redis.Redis.from_url(url) as client:
        return [unpacked(fields) for _, fields in client.xrange(wire.TELEMETRY)]


def in_spool(directory: Path) -> list[Message]:
    found: list[Message] = []
    drain(directory, lambda fields: found.append(unpacked(fields)), include_open=True)
    return found


def seqs(messages: list[Message]) -> list[int]:
    return [r.seq for m in messages if isinstance(m, StepBatch) for r in m.records]


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path / "spool", "rank0", 1 << 20)
    yield made
    made.close()


def test_records_are_joined_and_messages_keep_their_place(bus_url: str) -> None:
    emitter = Emitter(RUN, bus_url, None, lambda: 7)
    state = RunState("running", 0.0, "n")
    for seq in range(5):
        emitter.record(record(seq))
    emitter.send(state)
    emitter.record(record(5))
    emitter.close()
    messages = on_bus(bus_url)
    assert seqs(messages) == list(range(6))
    before = messages[: messages.index(state)]
    assert seqs(before) == list(range(5))
    assert len(messages) <= 5, "records travel in batches"
    assert emitter.memory_bytes == 7
    assert emitter.dropped == 0


def test_a_message_does_not_wait_for_the_next_flush(
    bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "FLUSH_S", 3600)
    emitter = Emitter(RUN, bus_url, None, lambda: 0)
    emitter.record(record(0))
    emitter.send(RunState("running", 0.0, "n"))
    until(lambda: len(on_bus(bus_url)) == 2)
    emitter.close()


def test_an_outage_goes_to_the_spool_and_what_follows_to_the_bus(
    tmp_path: Path,
    spool: Spool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spool_module, "CHUNK_AGE_S", 3600)
    server = EmbeddedBus(tmp_path / "bus").start()
    emitter = Emitter(RUN, server.url, spool, lambda: 0)
    emitter.record(record(0))
    until(lambda: seqs(on_bus(server.url)) == [0])
    server.kill()
    for seq in range(1, 50):
        emitter.record(record(seq))
    directory = tmp_path / "spool"
    until(lambda: directory.exists() and list(directory.iterdir()))
    with EmbeddedBus(tmp_path / "bus", server.port):
        until(lambda: _arrives(emitter, server.url))
        until(lambda: not list(directory.glob("*.part")))
        emitter.close()
        arrived = seqs(on_bus(server.url))
    spooled = seqs(in_spool(directory))
    assert set(range(1, 50)) <= set(spooled)
    assert 99 in arrived
    assert emitter.dropped == 0
    assert caplog.text.count("the bus does not take telemetry") == 1
    assert caplog.text.count("the bus takes telemetry again") == 1


def _arrives(emitter: Emitter, url: str) -> bool:
    emitter.record(record(99))
    try:
        return 99 in seqs(on_bus(url))
    except redis.RedisError:
        return False


def test_without_a_bus_all_goes_to_the_spool(tmp_path: Path, spool: Spool) -> None:
    emitter = Emitter(RUN, None, spool, lambda: 0)
    for seq in range(10):
        emitter.record(record(seq))
    emitter.close()
    assert seqs(in_spool(tmp_path / "spool")) == list(range(10))


def test_what_fits_nowhere_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "BATCH_LIMIT", 10)
    directory = tmp_path / "spool"
    spool = Spool(directory, "rank0", 1000)
    emitter = Emitter(RUN, None, spool, lambda: 0)
    for seq in range(100):
        emitter.record(record(seq))
    emitter.close()
    kept = seqs(in_spool(directory))
    assert 0 < len(kept) < 100
    assert emitter.dropped == dropped(directory) == 100 - len(kept)


def test_a_spool_that_cannot_be_written_costs_records_not_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    emitter = Emitter(RUN, None, Spool(tmp_path / "file", "rank0", 1000), lambda: 0)
    emitter.record(record(0))
    emitter.close()
    assert emitter.dropped == 1
    assert "cannot be spooled" in caplog.text


def hello(samples: int) -> Hello:
    sizes = b"\0" * 8 * samples
    return Hello(0, 1, 4, 0, sizes, "samples", False, 1, 0, 0.0, "0", "2", "cpu")


def test_a_hello_larger_than_the_spool_is_sent_once_the_bus_is_there(tmp_path: Path) -> None:
    server = EmbeddedBus(tmp_path / "bus").start()
    server.kill()
    directory = tmp_path / "spool"
    emitter = Emitter(RUN, server.url, Spool(directory, "rank0", 10_000), lambda: 0)
    emitter.send(hello(2_000))
    emitter.record(record(0))
    until(lambda: list(directory.glob("*.spool")) or list(directory.glob("*.part")))
    with EmbeddedBus(tmp_path / "bus", server.port):
        until(lambda: _arrives(emitter, server.url))
        emitter.close()
        messages = on_bus(server.url)
    assert messages[0] == hello(2_000)
    assert sum(isinstance(m, Hello) for m in messages) == 1
    assert emitter.dropped == 0
    assert 0 in seqs(in_spool(directory))


def test_a_hello_that_is_never_sent_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    emitter = Emitter(RUN, None, Spool(tmp_path, "rank0", 10_000), lambda: 0)
    emitter.send(hello(2_000))
    emitter.close()
    assert "description could not be sent" in caplog.text
    assert emitter.dropped == dropped(tmp_path) == 1


def test_a_spool_removed_under_the_writer_costs_its_records_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "CHUNK_AGE_S", 0.3)
    directory = tmp_path / "spool"
    emitter = Emitter(RUN, None, Spool(directory, "rank0", 1 << 20), lambda: 0)
    emitter.record(record(0))
    until(lambda: list(directory.glob("*.part")))
    shutil.rmtree(directory)
    until(lambda: emitter.dropped == 1)
    for seq in range(1, 4):
        emitter.record(record(seq))
    emitter.close()
    assert seqs(in_spool(directory)) == [1, 2, 3]
    assert emitter.dropped == dropped(directory) == 1


def test_memory_is_bounded_while_the_bus_hangs(
    tmp_path: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that takes connections and never answers."""
    monkeypatch.setattr(telemetry, "QUEUE_LIMIT", 100)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        emitter = Emitter(RUN, url, spool, lambda: 0)
        emitter.record(record(0))
        until(lambda: not emitter._queue)  # the thread is in the dead connection
        started = time.perf_counter()
        for seq in range(1, 1001):
            emitter.record(record(seq))
        assert time.perf_counter() - started < 0.5, "recording never waits"
        assert emitter.overflowed >= 900
        emitter.send(RunState("running", 0.0, "n"))
        assert len(emitter._queue) <= 100, "messages are bounded, too"
        emitter.close()
    kept = seqs(in_spool(tmp_path / "spool"))
    assert kept == sorted(kept)
    assert len(kept) + emitter.dropped == 1002


def test_closing_ends_in_time_and_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        emitter = Emitter(RUN, f"redis://127.0.0.1:{server.getsockname()[1]}/0", None, lambda: 0)
        emitter.record(record(0))
        until(lambda: not emitter._queue)
        emitter.close(timeout_s=0.05)
        assert "did not end" in caplog.text
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
    segments = {m.segment.seq: m.segment for m in messages if isinstance(m, Adopted)}
    assert sorted(segments) == list(range(len(segments)))
    counts = [row for seq in sorted(segments) for row in segments[seq].counts]
    assert counts == [
        [records[rank, step].samples for rank in range(world)] for step in range(steps)
    ]
    assert len([m for m in messages if isinstance(m, Hello)]) == 1


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.stop()


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
    assert len(seqs(spooled)) >= 2 * 30, "the fault fired"
    complete(arrived + spooled, 2, 40)


@pytest.mark.ranks
def test_a_second_session_in_a_script_trains_and_leaves_the_record_alone(
    ranks: Ranks, bus_url: str, tmp_path: Path
) -> None:
    seen = ranks.run(sessions.two_sessions, (24, 32), env=environment(bus_url, tmp_path))
    complete(on_bus(bus_url), 2, 6)
    for k, count in enumerate((24, 32)):
        assert sorted(i for of_rank in seen for i in of_rank[k]) == list(range(count))


def test_only_the_first_session_takes_the_run(caplog: pytest.LogCaptureFixture) -> None:
    from paceline.train.environment import Environment

    given = {"PACELINE_RUN": "only-first", "PACELINE_BUS": "redis://nowhere"}
    environment = Environment.read(given)
    assert environment.claim() is environment
    for _ in range(2):
        assert (environment.claim().run, environment.claim().bus) == (None, None)
    restarted = Environment.read(given | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert restarted.claim() is restarted
    assert caplog.text.count("reports nothing") == 1


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
    assert median([r.compute_s for r in slow]) >= 0.06
    assert median([r.compute_s for r in fast]) < 0.03
    assert median([r.sync_s for r in fast]) > 0.03
    assert median([r.sync_s for r in slow]) < 0.03
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
    assert median([r.compute_s for r in records]) < 0.03
    assert min(r.compute_s for r in records) > 0


@pytest.mark.ranks
@pytest.mark.parametrize("every", [1, 3])
def test_emulated_speeds_rule_the_compute_time(
    ranks: Ranks, bus_url: str, tmp_path: Path, every: int
) -> None:
    """Also where gradients are accumulated, and so not reduced at every step."""
    speeds = '{"a_s": [0.005, 0.015], "b_s": [0.01, 0.01]}'
    env = environment(bus_url, tmp_path) | {"PACELINE_EMULATE": speeds}
    ranks.run(sessions.accumulate, 24, every, {"global_batch": 4}, "", env=env)
    records = records_of(bus_url)
    assert len(records) == 24
    excess = [r.compute_s - [0.005, 0.015][r.rank] * r.load - 0.01 for r in records]
    assert min(excess) >= 0
    assert median(excess) < 0.01
    (hello,) = [m for m in on_bus(bus_url) if isinstance(m, Hello)]
    assert hello.emulated == {"a_s": [0.005, 0.015], "b_s": [0.01, 0.01]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fast", "PACELINE_EMULATE"),
        ('{"a_s": [1], "b_s": [0, 0]}', "a_s"),
        ('{"a_s": [1, -1], "b_s": [0, 0]}', "a_s"),
        ('{"a_s": [1, 1], "b_s": [0]}', "b_s"),
        ('{"a_s": [1, 1], "b_s": [0, 0], "c_s": [0]}', "c_s"),
        ('{"a_s": [1, 1], "b_s": [0, 0], "d_s": [0, 0]}', "d_s"),
        ('{"a_s": [1, 1], "b_s": [0, 0], "noise": 2}', "noise = 2"),
        ('{"a_s": [1, 1], "b_s": [0, 0], "slowdowns": [{"ranks": [2], "factor": 3}]}', "ranks are"),
    ],
)
def test_bad_speeds_are_named(text: str, says: str) -> None:
    from paceline.core.emulation import Emulation

    with pytest.raises(ValueError, match=says):
        Emulation.parse(text, 2)


def test_bad_environment_is_named() -> None:
    from paceline.train.environment import Environment

    with pytest.raises(ValueError, match="PACELINE_SPOOL_BYTES is '64M'"):
        Environment.read({"PACELINE_SPOOL_BYTES": "64M"})


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
