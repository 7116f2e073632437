"""A node's directory: never more than its limit, whoever adds, and nothing half written."""

from __future__ import annotations

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import PacelineError
from paceline.data.directory import Directory

LENGTHS = np.array([10, 20, 30, 40])


def data_of(index: int) -> bytes:
    return bytes([index]) * int(LENGTHS[index])


def on_disk(directory: Directory) -> int:
    return sum(path.stat().st_size for path in directory.path.glob("[0-9]*/*"))


def test_a_sample_reads_back(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "shard", 100)
    assert directory.claim(LENGTHS) == []
    assert directory.put(2, data_of(2))
    assert directory.has(2) and directory.read(2, 30) == data_of(2)
    assert directory.read(1, 20) is None
    assert directory.read(2, 31) is None, "another length is no sample"
    assert directory.put(2, data_of(2)) and directory.used_bytes == 30
    directory.remove(2)
    directory.remove(2)
    assert (directory.used_bytes, directory.samples()) == (0, [])


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30), st.integers(1, 120))
def test_it_never_holds_more_than_its_limit(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bool]], limit: int
) -> None:
    directory = Directory(tmp_path_factory.mktemp("shard"), limit)
    directory.claim(LENGTHS)
    kept: set[int] = set()
    for index, add in changes:
        if add:
            fits = index in kept or sum(LENGTHS[i] for i in kept) + LENGTHS[index] <= limit
            assert directory.put(index, data_of(index)) == fits
            kept |= {index} if fits else set()
        else:
            directory.remove(index)
            kept.discard(index)
        assert directory.samples() == sorted(kept)
        assert directory.used_bytes == on_disk(directory) <= limit
    directory.release()


def test_many_at_once_keep_the_limit(tmp_path: Path) -> None:
    lengths = np.full(200, 7)
    directory = Directory(tmp_path, 700)
    directory.claim(lengths)
    with ThreadPoolExecutor(8) as pool:
        put = list(pool.map(lambda i: directory.put(i % 200, b"x" * 7), range(1600)))
    assert directory.used_bytes == on_disk(directory) == 700
    assert len(directory.samples()) == 100 and any(put) and not all(put)


def test_a_process_forked_under_the_lock_does_not_keep_it(tmp_path: Path) -> None:
    directory = Directory(tmp_path, 100)
    with directory._locked() as descriptor:
        inherited = os.dup(descriptor)  # the same open file, as a forked process has it
    with (tmp_path / "used").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(inherited)


def test_the_bytes_in_use_are_a_number_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Directory(tmp_path, 100)
    directory.claim(LENGTHS)
    directory.put(3, data_of(3))
    seen: list[str] = []

    def full(*_: object) -> int:
        seen.append((tmp_path / "used").read_text())
        raise OSError("no space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr(os, "pwrite", full)
        directory.put(0, data_of(0))
    assert [int(text) for text in seen] == [40]
    assert directory.used_bytes == 40
    directory.remove(3)
    assert directory.used_bytes == 0, "fewer digits than before"


def test_what_a_killed_process_left_is_mended(tmp_path: Path) -> None:
    directory = Directory(tmp_path, 100)
    directory.claim(LENGTHS)
    for index in range(3):
        directory.put(index, data_of(index))
    (tmp_path / "0" / ".3-99-1").write_bytes(b"half")
    (tmp_path / "0" / "1").write_bytes(b"cut")
    (tmp_path / "used").write_text("100")
    directory.release()
    again = Directory(tmp_path, 100)
    assert again.claim(LENGTHS) == [0, 2]
    assert again.used_bytes == on_disk(again) == 40
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["0", "2"]


def test_a_lower_limit_removes_what_is_beyond_it(tmp_path: Path) -> None:
    directory = Directory(tmp_path, 100)
    directory.claim(LENGTHS)
    for index in range(4):
        directory.put(index, data_of(index))
    directory.release()
    again = Directory(tmp_path, 35)
    assert again.claim(LENGTHS) == [0, 1]
    assert again.used_bytes == on_disk(again) == 30


def test_samples_of_other_data_are_refused(tmp_path: Path) -> None:
    directory = Directory(tmp_path, 100)
    directory.claim(LENGTHS)
    directory.release()
    with pytest.raises(PacelineError, match="it has samples of other data: empty it"):
        Directory(tmp_path, 100).claim(LENGTHS + 1)
