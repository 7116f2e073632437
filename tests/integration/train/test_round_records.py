"""Records of rounds arrive like those of steps, or are counted, whichever thread they come from."""

from __future__ import annotations

import threading
import time

import pytest

from paceline.train import report as telemetry
from paceline.train.plan_shard import LocalStep
from paceline.train.report import Emitter, RoundReporter
from paceline.train.sink import Sink
from paceline.train.sync.base import Round
from paceline.wire import RoundBatch, RunState, State, StepBatch
from support.reports import ROUND, RUN, on_bus, round_record, rounds_of, step_record

STEP = LocalStep(1, 40, 3, [1], 1.0, 1.0, 1.0, 1.0, None, 0)


def test_rounds_and_steps_are_joined_and_pass_no_message(
    bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "BATCH_LIMIT", 2)
    queued = threading.Event()
    emitter = Emitter(
        Sink(RUN, bus_url, None), lambda: int(queued.wait())
    )  # asked before each flush
    state = RunState(State.RUNNING, 0.0, "n")
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
    emitter = Emitter(Sink(RUN, bus_url, None), lambda: 0)
    reporter = RoundReporter(emitter, attempt=2, rank=1)
    before = time.time()
    round_ = Round(**ROUND)
    thread = threading.Thread(target=lambda: [reporter.accept(STEP, round_) for _ in range(2)])
    thread.start()
    thread.join()
    reporter.accept(STEP, round_)
    emitter.close()
    records = rounds_of(on_bus(bus_url))
    assert [(record.attempt, record.rank, record.seq) for record in records] == [
        (2, 1, 0),
        (2, 1, 1),
        (2, 1, 2),
    ]
    assert {name: getattr(records[0], name) for name in ROUND} == ROUND
    assert (records[0].segment, records[0].step) == (3, 40)
    assert before <= records[0].ended_at <= records[2].ended_at <= time.time()
