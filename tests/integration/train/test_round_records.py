"""Records of rounds arrive like those of steps, or are counted, whichever thread they come from."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from paceline import wire
from paceline.node.spool import Spool, drain, dropped
from paceline.train import report as telemetry
from paceline.train.parts import Step
from paceline.train.report import Emitter, RoundReporter
from paceline.train.sync.base import Round
from paceline.wire import Message, RoundBatch, RoundRecord, RunState, StepBatch, StepRecord

RUN = "r1"
STEP = Step(1, 40, 3, [1], 1.0, 1.0, 1.0, 1.0, None, 0)
ROUND: dict[str, Any] = {
    "number": 7,
    "world": 4,
    "contributors": 2,
    "staleness": [1, 2, 0],
    "dropped": 5,
    "waited_s": 0.02,
    "reduced_s": 0.003,
    "bytes": 4096,
    "copied_s": 0.001,
}


def round_record(seq: int) -> RoundRecord:
    return RoundRecord(attempt=0, rank=0, seq=seq, ended_at=1.0, segment=3, step=40, **ROUND)


def step_record(seq: int) -> StepRecord:
    return StepRecord(0, 0, seq, seq, 0, 0, 1, 1.0, 0.0, 0.1, 0.0, 0.1, 0.0)


def on_bus(url: str) -> list[Message]:
    with redis.Redis.from_url(url) as client:
        return [wire.decode(fields)[1] for _, fields in client.xrange(wire.TELEMETRY)]


def rounds_of(messages: list[Message]) -> list[RoundRecord]:
    return [one for m in messages if isinstance(m, RoundBatch) for one in m.records]


def test_rounds_and_steps_are_joined_and_pass_no_message(
    bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "BATCH_LIMIT", 2)
    queued = threading.Event()
    emitter = Emitter(RUN, bus_url, None, lambda: int(queued.wait()))  # asked before each flush
    state = RunState("running", 0.0, "n")
    for seq in range(3):
        emitter.record(step_record(seq))
        emitter.record(round_record(seq))
    emitter.send(state)
    emitter.record(round_record(3))
    queued.set()
    emitter.close()
    assert on_bus(bus_url) == [
        StepBatch([step_record(0), step_record(1)]),
        RoundBatch([round_record(0), round_record(1)]),
        StepBatch([step_record(2)]),
        RoundBatch([round_record(2)]),
        state,
        RoundBatch([round_record(3)]),
    ]


def test_a_rank_numbers_the_rounds_that_it_tells(bus_url: str) -> None:
    emitter = Emitter(RUN, bus_url, None, lambda: 0)
    reporter = RoundReporter(emitter, attempt=2, rank=1)
    before = time.time()
    one = Round(**ROUND)
    thread = threading.Thread(target=lambda: [reporter.over(STEP, one) for _ in range(2)])
    thread.start()
    thread.join()
    reporter.over(STEP, one)
    emitter.close()
    found = rounds_of(on_bus(bus_url))
    assert [(one.attempt, one.rank, one.seq) for one in found] == [(2, 1, 0), (2, 1, 1), (2, 1, 2)]
    assert {name: getattr(found[0], name) for name in ROUND} == ROUND
    assert (found[0].segment, found[0].step) == (3, 40)
    assert before <= found[0].ended_at <= found[2].ended_at <= time.time()


def test_a_round_that_lacks_the_newest_figure_is_read() -> None:
    """What a rank of an earlier release tells, or what lay in its spool."""
    told = msgspec.structs.astuple(round_record(0))[:-1]
    data = msgspec.msgpack.encode({"type": "rounds", "records": [told]})
    _, found = wire.decode(wire.encode(RoundBatch([]), RUN) | {b"data": data})
    assert found == RoundBatch([msgspec.structs.replace(round_record(0), copied_s=0.0)])


def test_rounds_that_fit_nowhere_are_counted_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "BATCH_LIMIT", 10)
    emitter = Emitter(RUN, None, Spool(tmp_path, "rank0", 1000), lambda: 0)
    for seq in range(100):
        emitter.record(round_record(seq))
    emitter.close()
    kept: list[Message] = []
    drain(tmp_path, lambda fields: kept.append(wire.decode(fields)[1]), include_open=True)
    assert 0 < len(rounds_of(kept)) < 100
    assert emitter.dropped == dropped(tmp_path) == 100 - len(rounds_of(kept))


class Slow(Emitter):
    """One in which another thread gets its turn between reading the count and writing it."""

    _count = 0

    @property
    def overflowed(self) -> int:  # type: ignore[override]
        value = self._count
        time.sleep(0)
        return value

    @overflowed.setter
    def overflowed(self, value: int) -> None:
        self._count = value


def test_what_two_threads_lose_is_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "QUEUE_LIMIT", 0)
    emitter = Slow(RUN, None, None, lambda: 0)

    def lose() -> None:
        for seq in range(2000):
            emitter.record(round_record(seq))

    threads = [threading.Thread(target=lose) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    emitter.close()
    assert emitter.dropped == 4000
