"""Records of rounds without a bus: read, spooled or counted."""

from __future__ import annotations

import threading
import time

import pytest

from paceline.train import report as telemetry
from paceline.train.report import Emitter
from paceline.train.sink import Sink
from support.reports import RUN, round_record


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
    emitter = Slow(Sink(RUN, None, None), lambda: 0)

    def lose() -> None:
        for seq in range(500):
            emitter.record(round_record(seq))

    threads = [threading.Thread(target=lose) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    emitter.close()
    assert emitter.dropped == 1000
