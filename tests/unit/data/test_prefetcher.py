"""A node's prefetcher: what it fetches, in which order and bounds, and what it removes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from paceline.data import Sharded
from paceline.data.directory import Directory
from paceline.data.prefetcher import Moved, NodeShard, Prefetcher
from support.waiting import DEADLINE_S, until


class Counted:
    def __init__(self, samples: int = 20, size: int = 10) -> None:
        self.samples, self.bytes = samples, size
        self.read_: list[int] = []
        self.away = False

    def __len__(self) -> int:
        return self.samples

    def size(self, index: int) -> int:
        return self.bytes

    def read(self, index: int) -> bytes:
        if self.away:
            raise OSError("no network")
        self.read_.append(index)
        return bytes([index]) * self.bytes


def packed(*samples: int) -> bytes:
    return np.array(samples, "<u4").tobytes()


@contextmanager
def keeping(
    source: Counted, folder: Path, limit: int = 200, bandwidth: float | None = None
) -> Iterator[tuple[Prefetcher, Sharded]]:
    data = Sharded(source, directory=folder, limit_bytes=limit, bandwidth=bandwidth)
    held = data.directory.claim(data.lengths)
    data.keeps = True
    prefetcher = Prefetcher(data, held, filler=0)
    try:
        assert prefetcher.wait_idle(DEADLINE_S)
        yield prefetcher, data
    finally:
        prefetcher.close()


def test_it_fetches_what_steps_need_and_then_what_the_next_epoch_needs(tmp_path: Path) -> None:
    source = Counted()
    with keeping(source, tmp_path) as (prefetcher, data):
        assert source.read_ == [0], "the filler"
        prefetcher.take(NodeShard(0, packed(3, 4, 5)))
        assert prefetcher.wait_idle(DEADLINE_S)
        assert source.read_ == [0, 5, 4, 3], "ranks begin at the segment's beginning"
        prefetcher.take(NodeShard(0, packed(6), packed(3, 5, 6, 8, 9)))
        assert prefetcher.wait_idle(DEADLINE_S)
        assert source.read_[4:] == [6, 8, 9]
        assert data.directory.samples() == [0, 3, 4, 5, 6, 8, 9]
        moved = prefetcher.moved(1)
        assert (moved.planned_bytes, moved.bytes, moved.samples) == (20, 20, 2)
        assert prefetcher.moved(0) == Moved()


def test_nothing_that_is_still_needed_is_removed(tmp_path: Path) -> None:
    source = Counted()
    with keeping(source, tmp_path, limit=60) as (prefetcher, data):
        prefetcher.take(NodeShard(0, packed(1, 2, 3, 4, 5)))
        assert prefetcher.wait_idle(DEADLINE_S)
        assert data.directory.samples() == [0, 1, 2, 3, 4, 5], "full"
        prefetcher.take(NodeShard(0, b"", packed(1, 2, 3, 4, 5)))
        # In the next epoch 1 and 2 are trained here for the last time.
        prefetcher.take(NodeShard(1, packed(3), packed(3, 4, 5, 6, 7)))
        assert prefetcher.wait_idle(DEADLINE_S)
        assert data.directory.samples() == [0, 1, 2, 3, 4, 5], "1 and 2 are still to be trained"
        prefetcher.take(NodeShard(1, packed(1)))
        prefetcher.take(NodeShard(1, packed(4)))
        prefetcher.take(NodeShard(1, packed(5)))
        assert prefetcher.wait_idle(DEADLINE_S)
        assert data.directory.samples() == [0, 2, 3, 4, 5, 6], "1 has been trained"
        prefetcher.take(NodeShard(2, packed(6)))
        assert prefetcher.wait_idle(DEADLINE_S)
        assert data.directory.samples() == [0, 3, 4, 5, 6, 7]
        assert prefetcher.moved(2).bytes == 20


def test_what_had_no_room_before_is_fetched_and_is_no_move(tmp_path: Path) -> None:
    source = Counted()
    with keeping(source, tmp_path, limit=40) as (prefetcher, data):
        prefetcher.take(NodeShard(0, packed(1, 2, 3, 4)))
        assert prefetcher.wait_idle(DEADLINE_S)
        assert data.directory.samples() == [0, 2, 3, 4]
        prefetcher.take(NodeShard(0, b"", packed(1, 2, 3, 5)))
        prefetcher.take(NodeShard(0, b""))
        prefetcher.take(NodeShard(0, b"", packed(1, 2, 3, 5)))
        prefetcher.take(NodeShard(1, b""))
        assert prefetcher.wait_idle(DEADLINE_S)
        assert data.directory.samples() == [0, 1, 2, 3], "4 has left"
        assert prefetcher.moved(1) == Moved(planned_bytes=10)


def test_the_bandwidth_bounds_what_is_fetched_ahead(tmp_path: Path) -> None:
    source = Counted(size=1000)
    with keeping(source, tmp_path, limit=20_000, bandwidth=20_000) as (prefetcher, _):
        prefetcher.take(NodeShard(0, packed(1, 2, 3, 4)))
        assert prefetcher.wait_idle(DEADLINE_S)
        prefetcher.take(NodeShard(0, b"", packed(*range(1, 20))))
        until(lambda: prefetcher.moved(1).bytes == 15_000)
        # The first is fetched at once; each further one waits for the one before.
        assert prefetcher.moved(1).seconds >= 14 * 1000 / 20_000


def test_a_source_that_is_away_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.prefetcher._RETRY_S", 0.001)
    source = Counted()
    with keeping(source, tmp_path) as (prefetcher, data):
        source.away = True
        prefetcher.take(NodeShard(0, packed(1), packed(1, 2, 3)))
        until(lambda: "samples cannot be prefetched" in caplog.text)
        source.away = False
        until(lambda: prefetcher.moved(1).samples >= 2)
        assert {2, 3} <= set(data.directory.samples())
        assert caplog.text.count("samples cannot be prefetched") == 1
        assert "samples are prefetched again" in caplog.text


def test_a_rank_reads_itself_what_is_not_there(tmp_path: Path) -> None:
    source = Counted()
    with keeping(source, tmp_path) as (prefetcher, data):
        assert data[7] == bytes([7]) * 10
        assert data[7] == bytes([7]) * 10
        misses = data.take_misses()
        assert (misses.samples, misses.bytes) == (1, 10)
        assert data.take_misses().samples == 0
        assert source.read_.count(7) == 1
        prefetcher.take(NodeShard(0, b"", packed(7, 8)))
        assert prefetcher.wait_idle(DEADLINE_S)
        assert prefetcher.moved(1).bytes == prefetcher.moved(1).planned_bytes == 10, (
            "7 was there already"
        )


def test_a_full_directory_is_listed_once_for_each_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[list[int]] = []
    samples = Directory.samples

    def noted(directory: Directory) -> list[int]:
        listed.append(samples(directory))
        return listed[-1]

    monkeypatch.setattr(Directory, "samples", noted)
    with keeping(Counted(), tmp_path, limit=50) as (prefetcher, data):
        prefetcher.take(NodeShard(0, packed(*range(1, 20))))
        assert prefetcher.wait_idle(DEADLINE_S)
        assert listed == [[0, 16, 17, 18, 19]]
        prefetcher.take(NodeShard(0, b"", packed(1, 2, 3, 4)))
        assert prefetcher.wait_idle(DEADLINE_S)
        assert listed[1:] == listed[:1], "16 to 19 are perhaps still to be read"
        prefetcher.take(NodeShard(0, b""))  # they leave for 1 to 4
        assert prefetcher.wait_idle(DEADLINE_S)
        assert listed[2:] == listed[:1]
        assert samples(data.directory) == [0, 1, 2, 3, 4]


def test_what_found_no_room_when_it_had_come_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may take the room meanwhile, or the disk may be full."""
    with keeping(Counted(), tmp_path) as (prefetcher, data):
        put = data.directory.put
        monkeypatch.setattr(data.directory, "put", lambda index, data: False)
        prefetcher.take(NodeShard(0, b"", packed(1, 2)))
        assert prefetcher.wait_idle(DEADLINE_S)
        monkeypatch.setattr(data.directory, "put", put)
        prefetcher.take(NodeShard(0, b""))
        assert prefetcher.wait_idle(DEADLINE_S)
        assert data.directory.samples() == [0, 1, 2]
        assert prefetcher.moved(1).samples == 2
