"""Records of rounds without a bus: read, spooled or counted."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from paceline import wire
from paceline.node.spool import Spool, drain, dropped
from paceline.train import report as telemetry
from paceline.train.report import Emitter
from paceline.wire import Message
from support.reports import RUN, round_record, rounds_of


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
