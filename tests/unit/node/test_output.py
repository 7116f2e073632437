"""Showing what rank 0 prints must not end a training."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.node import output, rundir
from paceline.node.output import _Copy


class Full(io.BytesIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = rundir.rank_log(tmp_path, 0, 0, "stdout")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"one\n")
    return path


@contextmanager
def copying(directory: Path, to: io.BytesIO) -> Iterator[_Copy]:
    copy = _Copy(directory, "stdout", output.copying(to))
    yield copy
    assert copy._file is not None
    copy._file.close()


def test_new_output_is_copied(tmp_path: Path, log: Path) -> None:
    to = io.BytesIO()
    with copying(tmp_path, to) as copy:
        copy.pump(0)
        with log.open("ab") as file:
            file.write(b"two\n")
        copy.pump(0)
    assert to.getvalue() == b"one\ntwo\n"


def test_output_that_nobody_takes_is_told_once(
    tmp_path: Path, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with copying(tmp_path, Full()) as copy, caplog.at_level(logging.WARNING):
        copy.pump(0)
        log.write_bytes(b"one\ntwo\n")
        copy.pump(0)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "rank 0's output is no longer shown here, only in its log"
    ]
