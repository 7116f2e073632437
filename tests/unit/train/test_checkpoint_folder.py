"""Directories of checkpoints: which one counts, which stay, and what a killed process leaves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from paceline.train.checkpoint.saver import Folder


class KilledError(BaseException):
    """Stands for the end of the process."""


def made(folder: Folder, steps: int) -> None:
    folder.unfinished(steps).mkdir()
    (folder.unfinished(steps) / "data").write_text(str(steps))
    folder.finish(steps)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "runs" / "a", keep=2)
    made.make()
    return made


def test_the_newest_counts_by_its_number(folder: Folder) -> None:
    assert folder.newest() is None
    for steps in (9, 1_000_000_000, 10):
        made(folder, steps)
    assert folder.newest() == 1_000_000_000


def test_as_many_as_wanted_stay_and_nothing_else_is_touched(folder: Folder) -> None:
    (folder.path / "step-1").mkdir()
    (folder.path / "notes.txt").touch()
    for steps in range(1, 6):
        made(folder, steps)
    assert folder.steps() == [4, 5]
    names = {entry.name for entry in folder.path.iterdir()}
    assert names == {"step-1", "notes.txt", "step-000000004", "step-000000005"}


def test_a_checkpoint_of_the_same_step_is_replaced(folder: Folder) -> None:
    made(folder, 4)
    folder.unfinished(4).mkdir()
    (folder.unfinished(4) / "data").write_text("new")
    folder.finish(4)
    assert (folder.whole(4) / "data").read_text() == "new"


@pytest.mark.parametrize("call", range(10))
def test_a_process_killed_at_any_call_leaves_a_whole_checkpoint(
    folder: Folder, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two saves, each with five calls that change the disk: the oldest checkpoint is deleted."""
    calls = iter(range(100))
    for steps in (1, 2):
        made(folder, steps)

    def counted(module: object, name: str) -> None:
        real = getattr(module, name)

        def change(*args: object, **options: object) -> object:
            if next(calls) == call:
                raise KilledError
            return real(*args, **options)

        monkeypatch.setattr(module, name, change)

    counted(os, "fsync")
    counted(Path, "rename")
    counted(shutil, "rmtree")
    with pytest.raises(KilledError):
        for steps in (3, 4):
            made(folder, steps)
    monkeypatch.undo()
    again = Folder(folder.path, keep=2)
    again.make()
    newest = again.newest()
    assert newest is not None and newest >= 2
    for steps in again.steps():
        assert (again.whole(steps) / "data").read_text() == str(steps)
    assert not list(folder.path.glob(".*"))
