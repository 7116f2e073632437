"""Where samples come from: files, ranges, and a real HTTP server."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import PacelineError
from paceline.data import Files, Ranges, Sharded, Source
from paceline.data import sources as module
from support.http_files import served

DATA = bytes(range(256)) * 4
OFFSETS = [0, 10, 10, 300, 1024]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.0)


def test_each_file_is_a_sample(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() * 5)
    source = Files([tmp_path / "a", str(tmp_path / "b")])
    assert isinstance(source, Source)
    assert (len(source), source.size(1), source.read(1)) == (2, 5, b"bbbbb")


def test_ranges_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA)
    source = Ranges(tmp_path / "data", np.array(OFFSETS))
    assert [source.read(i) for i in range(4)] == [DATA[:10], b"", DATA[10:300], DATA[300:]]
    assert module.sizes_of(source).tolist() == [10, 0, 290, 724]


@pytest.mark.parametrize("offsets", [[0], [5, 3], [-1, 4], [0, 4, 2]])
def test_offsets_that_do_not_ascend_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets: give the start of each sample"):
        Ranges("data", offsets)


def test_ranges_over_http() -> None:
    with served(DATA) as server:
        source = Ranges(server.url, OFFSETS)
        source = pickle.loads(pickle.dumps(source))  # as to a data loading process
        assert [source.read(i) for i in range(4)] == [DATA[:10], b"", DATA[10:300], DATA[300:]]
        assert server.reads == {(0, 10): 1, (10, 300): 1, (300, 1024): 1}
        threads = [threading.Thread(target=source.read, args=(3,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.reads[300, 1024] == 9


def test_a_server_that_stumbles_is_asked_again() -> None:
    with served(DATA) as server:
        source = Ranges(server.url, OFFSETS)
        server.refused = 2
        assert source.read(0) == DATA[:10]
        server.refused = 100
        with pytest.raises(OSError, match="the server returned 503"):
            source.read(0)


def test_a_server_without_ranges_is_told() -> None:
    with served(DATA) as server:
        server.ranges = False
        with pytest.raises(PacelineError, match="does not support range requests"):
            Ranges(server.url, OFFSETS).read(0)


def test_a_server_that_is_away_is_an_error() -> None:
    with served(DATA) as server:
        source = Ranges(server.url, OFFSETS)
    with pytest.raises(OSError, match=r"data\.bin"):
        source.read(0)


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    source = Ranges("data", OFFSETS)
    with pytest.raises(TypeError, match="source=3"):
        Sharded(3, directory=tmp_path, limit_bytes=10)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"limit_bytes=1\.5"):
        Sharded(source, directory=tmp_path, limit_bytes=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limit_bytes=0"):
        Sharded(source, directory=tmp_path, limit_bytes=0)
    with pytest.raises(ValueError, match="bandwidth=-1"):
        Sharded(source, directory=tmp_path, limit_bytes=10, bandwidth=-1)


def test_a_source_with_other_bytes_than_it_said_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA[:100])
    data = Sharded(Ranges(tmp_path / "data", OFFSETS), directory=tmp_path / "s", limit_bytes=10)
    with pytest.raises(PacelineError, match="sample 2 has 90 bytes, but its size is 290"):
        data[2]
