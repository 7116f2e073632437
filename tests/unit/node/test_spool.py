"""What the spool keeps comes out once, whole and in order; what it cannot keep is counted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.node import spool as spool_module
from paceline.node.spool import Spool, drain, dropped

Fields = dict[bytes, bytes]


def entry(number: int, size: int = 0) -> Fields:
    return {b"v": b"1", b"run": b"r", b"data": b"%d:" % number + b"x" * size}


def drained(directory: Path, include_open: bool = False) -> list[Fields]:
    out: list[Fields] = []
    assert drain(directory, out.append, include_open=include_open) == len(out)
    return out


@given(sizes=st.lists(st.integers(0, 400), max_size=30), chunk=st.integers(1, 1000))
def test_all_that_is_appended_comes_out_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], chunk: int
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool_module, "CHUNK_BYTES", chunk)
        spool = Spool(directory, "rank0", 1 << 20)
        entries = [entry(i, size) for i, size in enumerate(sizes)]
        for fields in entries:
            assert spool.append(fields)
        spool.close()
    assert drained(directory) == entries
    assert drained(directory) == []
    assert list(directory.iterdir()) == []


def test_an_old_chunk_is_closed_without_another_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, "rank0", 1 << 20)
    spool.append(entry(1))
    spool.roll()
    assert drained(tmp_path) == []
    monkeypatch.setattr(spool_module, "CHUNK_AGE_S", 0.0)
    spool.roll()
    assert drained(tmp_path) == [entry(1)]


def test_several_writers_share_a_directory_oldest_chunk_first(tmp_path: Path) -> None:
    first, second = Spool(tmp_path, "rank10", 1 << 20), Spool(tmp_path, "rank1", 1 << 20)
    for number, spool in enumerate([first, second, first]):
        spool.append(entry(number))
        spool.close()
    assert drained(tmp_path) == [entry(0), entry(1), entry(2)]


def test_the_bound_holds_and_draining_makes_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "rank0", 1000)
    other = Spool(tmp_path, "rank1", 1000)
    taken = [spool.append(entry(i, 200)) for i in range(10)]
    assert taken == [True] * 4 + [False] * 6
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000
    assert other.append(entry(0, 200)), "another writer has its own bound"
    spool.close()
    other.close()
    assert not spool.append(entry(10, 200))
    assert len(drained(tmp_path)) == 5
    assert spool.append(entry(11, 200))
    spool.close()


def test_a_bound_of_many_chunks_counts_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "CHUNK_BYTES", 300)
    spool = Spool(tmp_path, "rank0", 2000)
    while spool.append(entry(0, 100)):
        pass
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    spool.close()
    assert 1800 < size <= 2000


@pytest.mark.parametrize("cut", [1, 8, 20])
def test_a_torn_last_record_is_left_out_and_logged(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path, "rank0", 1 << 20)
    spool.append(entry(1, 30))
    spool.append(entry(2, 30))
    spool.close()
    (path,) = tmp_path.glob("*.spool")
    path.write_bytes(path.read_bytes()[:-cut])
    with caplog.at_level(logging.WARNING):
        assert drained(tmp_path) == [entry(1, 30)]
    assert (
        "ignoring everything after an incomplete or invalid record in 1 spool files" in caplog.text
    )


def test_a_damaged_record_is_not_sent(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "rank0", 1 << 20)
    spool.append(entry(1, 30))
    spool.close()
    (path,) = tmp_path.glob("*.spool")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert drained(tmp_path) == []


def test_when_sending_fails_nothing_is_lost(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "rank0", 1 << 20)
    for number in range(3):
        spool.append(entry(number))
    spool.close()
    out: list[Fields] = []

    def send(fields: Fields) -> None:
        if fields == entry(1):
            raise ConnectionError("bus away")
        out.append(fields)

    with pytest.raises(ConnectionError):
        drain(tmp_path, send)
    assert drained(tmp_path) == [entry(0), entry(1), entry(2)]


def test_a_missing_directory_holds_nothing(tmp_path: Path) -> None:
    assert drained(tmp_path / "never") == []
    assert dropped(tmp_path / "never") == 0


def test_dropped_records_are_summed_over_writers(tmp_path: Path) -> None:
    Spool(tmp_path, "rank0", 0).note_dropped(3)
    Spool(tmp_path, "rank0", 0).note_dropped(5)
    Spool(tmp_path, "rank1", 0).note_dropped(2)
    assert dropped(tmp_path) == 7
