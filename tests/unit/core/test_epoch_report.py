"""Kept reports of epochs, and the line that rank 0 prints."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from paceline.core import epoch_report
from paceline.core.epoch_report import EpochReport, Estimate, keep, named, read, runs, sentence
from paceline.core.errors import InputError, PacelineError

REPORT = EpochReport(
    *(3, 300, 100, True, "paceline", 62.7, 0.02, 0.05, [0.75, 0.25], [3e4, 1e4], 1.0),
    Estimate(92.8, 0.31),
)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "epoch 3 took 62.7 s, of which ranks waited 2 %; 1.48 times as fast as equal batches "
            "(estimate: 92.8 s, 31 % waiting)",
        ),
        ({"equal": None}, "epoch 3 took 62.7 s, of which ranks waited 2 %"),
        (
            {"whole": False, "equal": None, "epoch_s": 4321.0},
            "epoch 3 from step 300 on took 4,321 s, of which ranks waited 2 %",
        ),
    ],
)
def test_the_line(changes: dict[str, object], line: str) -> None:
    assert sentence(msgspec.structs.replace(REPORT, **changes)) == line


def test_reports_are_read_as_they_were_kept(tmp_path: Path) -> None:
    data = tmp_path / "share" / "data"
    path = epoch_report.new_file(data, "/home/a b/train.py")
    second = msgspec.structs.replace(REPORT, epoch=4, equal=None)
    third = msgspec.structs.replace(REPORT, epoch=6)
    keep(path, REPORT)
    keep(path, second)
    # The disk was full in the middle of a line.
    with path.open("a") as file:
        file.write('{"epoch":5,')
    [run] = runs(data)
    assert "-train-" in run
    assert read(data, run) == [REPORT, second]
    keep(path, third)
    assert read(data, run) == [REPORT, second, third]
    assert [each.stat().st_mode & 0o077 for each in (data, path.parent, path)] == [0, 0, 0]


def test_sessions_of_the_same_second_have_files_of_their_own(tmp_path: Path) -> None:
    assert len({epoch_report.new_file(tmp_path, "train.py") for _ in range(20)}) == 20


def test_only_files_of_old_runs_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_report, "MOST_RUNS", 3)
    days = [tmp_path / "local" / f"2026120{day}-120000-train-1.jsonl" for day in range(6)]
    for path in reversed(days):
        keep(path, REPORT)
    assert len(runs(tmp_path)) == 6
    for path in days[1:]:
        os.utime(path, (0, 0))
    # Its first report comes late: by its name it is the oldest run.
    own = tmp_path / "local" / "20261130-120000-train-1.jsonl"
    keep(own, REPORT)
    assert [run[:8] for run in runs(tmp_path)] == [
        *("20261205", "20261204", "20261203", "20261200", "20261130")
    ]


def test_a_file_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_report, "MOST_BYTES", 1000)
    path = epoch_report.new_file(tmp_path, "train.py")
    with pytest.raises(OSError, match="it has reached 1,000 bytes"):
        for _ in range(9):
            keep(path, REPORT)
    assert 500 < path.stat().st_size <= 1000
    [run] = runs(tmp_path)
    assert REPORT in read(tmp_path, run)


def test_a_run_is_named_by_a_beginning(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run without a server is kept"):
        named(tmp_path)
    for name in ("20261201-a-1", "20261201-a-12", "20261202-b-1"):
        keep(tmp_path / "local" / f"{name}.jsonl", REPORT)
    assert named(tmp_path) == "20261202-b-1"
    assert named(tmp_path, "20261201-a-1") == "20261201-a-1"
    with pytest.raises(InputError, match=r"several runs: 20261201-a-12, 20261201-a-1$"):
        named(tmp_path, "20261201")
    with pytest.raises(InputError, match="begins with 2027"):
        named(tmp_path, "2027")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "local"
    folder.mkdir()
    (folder / "x.jsonl").write_text("no JSON\n")
    with pytest.raises(PacelineError, match="cannot be read"):
        read(tmp_path, "x")
