"""Rank 0's planning process: an error in the reports of epochs does not end planning."""

from __future__ import annotations

from multiprocessing import Pipe
from pathlib import Path

import pytest

from paceline.core import epoch_report
from paceline.core.epoch_report import EpochReport
from paceline.planning import process
from paceline.planning.epochs import Epochs
from paceline.planning.feedback import Window
from paceline.planning.history import History
from paceline.planning.process import Reported, ReportsEnded
from support.records import hello

REPORT = EpochReport(0, 0, 9, True, "paceline", 1.0, 0.0, 0.0, [0.5, 0.5], [1.0, 1.0], 1.0)


@pytest.fixture
def epochs() -> Epochs:
    begun = hello(2)
    return Epochs(begun, History(begun), Window(2, begun.attempt), "paceline")


def test_an_error_ends_the_reports_and_is_sent(
    epochs: Epochs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("no steps")

    monkeypatch.setattr(epochs, "add", fail)
    here, rank = Pipe()
    assert process._report(rank, epochs, tmp_path, None, over=False) is epochs
    assert process._report(rank, epochs, tmp_path, [], over=False) is None
    assert here.recv() == ReportsEnded("ZeroDivisionError: no steps")
    assert not here.poll()


def test_the_end_is_sent_after_the_last_report(
    epochs: Epochs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "finished", lambda: iter([REPORT]))
    monkeypatch.setattr(epoch_report, "MOST_BYTES", 1)
    here, rank = Pipe()
    path = tmp_path / "local" / "run.jsonl"
    assert process._report(rank, epochs, path, None, over=True) is None
    reported = here.recv()
    assert isinstance(reported, Reported)
    assert reported.problem == f"{path} cannot be written: it has reached 1 bytes"
    assert here.recv() == ReportsEnded()
