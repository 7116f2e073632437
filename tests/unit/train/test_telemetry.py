"""Records without a bus: all go to the spool or are counted."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from paceline.node import spool as spool_module
from paceline.node.spool import Spool, dropped
from paceline.train import report as telemetry
from paceline.train.plan_shard import LocalStep
from paceline.train.report import Emitter, Reporter
from paceline.train.sink import Sink
from paceline.train.timing import CpuClock, RunningStep
from paceline.wire import Evaluation, MetricBatch, MetricRecord, RunState, State, StepBatch
from support.reports import RUN, hello, in_spool, step_record, steps_of
from support.waiting import until


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path / "spool", "rank0", 1 << 20)
    yield made
    made.close()


def test_what_fits_nowhere_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "BATCH_LIMIT", 10)
    directory = tmp_path / "spool"
    spool = Spool(directory, "rank0", 1000)
    emitter = Emitter(Sink(RUN, None, spool), lambda: 0)
    for seq in range(100):
        emitter.record(step_record(seq))
    emitter.close()
    kept = steps_of(in_spool(directory))
    assert 0 < len(kept) < 100
    assert emitter.dropped == dropped(directory) == 100 - len(kept)


def test_a_spool_that_cannot_be_written_costs_records_not_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    emitter = Emitter(Sink(RUN, None, Spool(tmp_path / "file", "rank0", 1000)), lambda: 0)
    emitter.record(step_record(0))
    emitter.close()
    assert emitter.dropped == 1
    assert "cannot be written to the spool" in caplog.text


def test_a_hello_that_is_never_sent_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    emitter = Emitter(Sink(RUN, None, Spool(tmp_path, "rank0", 10_000)), lambda: 0)
    emitter.send(hello(2_000))
    emitter.close()
    assert "description could not be sent" in caplog.text
    assert emitter.dropped == dropped(tmp_path) == 1


def test_a_spool_removed_under_the_writer_costs_its_records_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "CHUNK_AGE_S", 0.3)
    directory = tmp_path / "spool"
    emitter = Emitter(Sink(RUN, None, Spool(directory, "rank0", 1 << 20)), lambda: 0)
    emitter.record(step_record(0))
    until(lambda: list(directory.glob("*.part")))
    shutil.rmtree(directory)
    until(lambda: emitter.dropped == 1)
    for seq in range(1, 4):
        emitter.record(step_record(seq))
    emitter.close()
    assert steps_of(in_spool(directory)) == [1, 2, 3]
    assert emitter.dropped == dropped(directory) == 1


def environment(url: str, directory: Path) -> dict[str, str]:
    return {"PACELINE_RUN": RUN, "PACELINE_BUS": url, "PACELINE_SPOOL": str(directory)}


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


def test_bad_environment_is_named() -> None:
    from paceline.train.environment import Environment

    with pytest.raises(ValueError, match="PACELINE_SPOOL_BYTES is '64M'"):
        Environment.read({"PACELINE_SPOOL_BYTES": "64M"})


def test_a_message_larger_than_the_spool_keeps_no_other_back(tmp_path: Path) -> None:
    large = RunState(State.RUNNING, 0.0, "n", message="x" * 20_000)
    emitter = Emitter(Sink(RUN, None, Spool(tmp_path, "rank0", 10_000)), lambda: 0)
    emitter.send(large)
    for seq in range(10):
        emitter.record(step_record(seq))
    until(lambda: sum(path.stat().st_size for path in tmp_path.iterdir()))
    emitter.close()
    assert steps_of(in_spool(tmp_path)) == list(range(10))
    assert emitter.dropped == dropped(tmp_path) == 1


def finished(number: int) -> RunningStep:
    running = RunningStep(
        LocalStep(0, number, 0, [0], 1.0, 1.0, 1.0, 1.0, None, 0), CpuClock(), 0, None
    )
    running.body_done()
    running.finish()
    return running


def test_metrics_are_sent_before_the_record_of_their_step(tmp_path: Path, spool: Spool) -> None:
    """Also behind a step without metrics, in one flush."""
    emitter = Emitter(Sink(RUN, None, spool), lambda: 0)
    records = [step_record(0), MetricRecord(0, 0, 1, 1.0, {"rate": 0.5}), step_record(1)]

    def feed() -> None:
        while records:
            emitter.record(records.pop(0))

    emitter.feed = feed
    emitter.close()
    kinds = [type(message) for message in in_spool(tmp_path / "spool")]
    assert kinds == [StepBatch, MetricBatch, StepBatch]


def test_records_are_made_in_the_emitters_thread(tmp_path: Path, spool: Spool) -> None:
    emitter = Emitter(Sink(RUN, None, spool), lambda: 0)
    reporter, read_in = Reporter(emitter, 0, 0), set()
    real = RunningStep.read
    with mock.patch.object(
        RunningStep, "read", lambda step: read_in.add(threading.current_thread()) or real(step)
    ):
        for number in range(20):
            reporter.accept(finished(number))
        until(lambda: emitter.mark().wait(1) and not reporter._finished)
    assert threading.current_thread() not in read_in
    reporter.evaluated(Evaluation(0, 0, 20, 0, 20, 1.0, None, {"accuracy": 0.5}))
    reporter.accept(finished(20))
    reporter.flush()
    emitter.close()
    sent = in_spool(tmp_path / "spool")
    assert steps_of(sent) == list(range(21))
    kinds = [type(message) for message in sent]
    last = len(kinds) - 1 - kinds[::-1].index(StepBatch)
    assert kinds.index(Evaluation) < last and kinds.index(StepBatch) < kinds.index(Evaluation)


def test_steps_do_not_pile_up_behind_a_thread_that_is_held_up() -> None:
    class Blocked:
        memory_bytes = 0
        taken = 0

        def record(self, record: object) -> None:
            self.taken += 1

    emitter: Any = Blocked()
    reporter = Reporter(emitter, 0, 0)
    for number in range(2_500):
        reporter.accept(finished(number))
        assert len(reporter._finished) <= 1_000
    assert emitter.taken >= 1_500


def test_the_script_hears_of_a_step_that_cannot_be_read(tmp_path: Path, spool: Spool) -> None:
    emitter = Emitter(Sink(RUN, None, spool), lambda: 0)
    reporter, bad = Reporter(emitter, 0, 0), finished(0)
    bad._loss = "none"  # type: ignore[assignment]
    reporter.accept(bad)
    until(lambda: reporter._failed is not None)
    with pytest.raises(ValueError, match="could not convert"):
        reporter.accept(finished(1))
    reporter.flush()
    emitter.close()
    assert len(steps_of(in_spool(tmp_path / "spool"))) == 1
