"""Streams of the packages that users bring: webdataset, lhotse, Hugging Face."""

from __future__ import annotations

import io
import json
import logging
import random
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

import paceline
from paceline.data import Stream
from support.marks import some_long
from support.ranks import RankError, Ranks
from support.stream_sources import (
    cuts_of,
    id_of,
    read,
    read_shar,
    rows_shuffled_without_seed,
)

BUFFER = 64


# lhotse leaves the files that it opens to the garbage collector.
files_are_left_open = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def written(path: Path, numbers: Iterable[int], mode: str = "w", broken: int = -1) -> str:
    """A tar file with a sample of JSON for each number; that of `broken` is no JSON."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for number in numbers:
            text = b"{" if number == broken else json.dumps({"id": number}).encode()
            entry = tarfile.TarInfo(f"part/{number:04}.json")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))
    return str(path)


@pytest.fixture
def files_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Closes the shards that webdataset opens in this process and leaves open."""
    cache = pytest.importorskip("webdataset.cache")
    with ExitStack() as files:

        def opened(path: str, mode: str) -> IO[bytes]:
            return files.enter_context(Path(path).open(mode))

        monkeypatch.setattr(cache, "open", opened, raising=False)
        yield


def opening(**options: Any) -> Callable[[str], Any]:
    webdataset = pytest.importorskip("webdataset")

    def open_shard(url: str) -> Any:
        return webdataset.WebDataset(
            url, shardshuffle=False, nodesplitter=None, workersplitter=None, **options
        ).decode()

    return open_shard


def stream_of(shards: list[Any], open_shard: Callable[[Any], Any]) -> Stream:
    return Stream.shards(shards, open_shard, size=lambda sample: 1.0, buffer=BUFFER)


@pytest.mark.usefixtures("files_closed")
def test_shards_of_webdataset_may_be_compressed_empty_or_of_any_length(tmp_path: Path) -> None:
    urls = [
        written(tmp_path / "empty.tar", []),
        written(tmp_path / "packed.tar.gz", range(20), "w:gz"),
        written(tmp_path / "short.tar", [20]),
        written(tmp_path / "long.tar", range(21, 150)),
    ]
    assert sorted(read(stream_of(urls, opening(empty_check=False)), id_of)) == list(range(150))


@pytest.mark.usefixtures("files_closed")
@pytest.mark.parametrize("processes", some_long([2, 0]))
def test_a_shard_that_cannot_be_read_is_named(tmp_path: Path, processes: int) -> None:
    urls = [written(tmp_path / f"{n}.tar", range(n * 10, n * 10 + 10), broken=12) for n in range(3)]
    words = r"(?s)rank 0 cannot read the stream: .*shard '[^']*/1\.tar', after 2 samples: Decoding"
    with pytest.raises(paceline.PacelineError, match=words):
        read(stream_of(urls, opening()), id_of, processes)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_shard_that_is_shuffled_where_it_is_opened_is_warned_of(
    caplog: pytest.LogCaptureFixture, processes: int
) -> None:
    """Parts of a shard are read in several goes, each with the numbers of its own order."""

    def shuffled(number: int) -> list[int]:
        return random.sample(range(number * 50, number * 50 + 50), 50)

    numbers = read(stream_of([0, 1], shuffled), int, processes)
    assert len(numbers) == 100 > len(set(numbers)), "samples are lost"
    assert "yields its samples in another order when opened again" in caplog.text
    assert caplog.text.count("leave shuffling and splitting") == 1


def test_what_is_augmented_at_random_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def augmented(number: int) -> Iterator[tuple[int, float]]:
        for sample in range(number * 50, number * 50 + 50):
            yield sample, random.random()

    numbers = read(stream_of([0, 1], augmented), lambda sample: int(sample[0]))
    assert sorted(numbers) == list(range(100))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("processes", [0, 1])
def test_samples_reach_the_loop_as_the_source_yields_them(processes: int) -> None:
    """A loader's processes make tensors of arrays by default."""

    def arrays(number: int) -> list[Any]:
        return [np.full(2, sample) for sample in range(number * 20, number * 20 + 20)]

    with closing(paceline.Session(stream_of([0, 1], arrays), global_batch=8)) as session:
        loader = session.loader(collate_fn=lambda samples: samples, num_workers=processes)
        kinds = {type(sample) for batch in loader for sample in batch}
    assert kinds == {np.ndarray}


def test_shards_of_several_files_are_told_apart() -> None:
    def kind(shards: list[Any]) -> str:
        return stream_of(shards, list).kind

    first, second = ({"cuts": f"c.{n}.gz", "recording": Path(f"r.{n}.tar")} for n in (0, 1))
    assert kind([first, second]) != kind([second, first])
    assert kind([("a", 1), ("b", 2)]) != kind([("a", 2), ("b", 1)])
    assert kind([first]) == kind([dict(reversed(first.items()))])
    assert kind([{"cuts": object()}]) == "stream of 1 shards"


@pytest.mark.ranks
def test_a_shuffle_of_hugging_face_without_a_seed_is_refused(ranks: Ranks) -> None:
    pytest.importorskip("datasets")
    for shards in (1, 2):  # read whole on each rank, and claimed
        with pytest.raises(RankError, match=r"shuffled by random numbers .*give shuffle a seed"):
            ranks.run(rows_shuffled_without_seed, shards, None)
        ran = ranks.run(rows_shuffled_without_seed, shards, 7)
        assert sorted(chain(*ran)) == list(range(40))


@pytest.fixture(scope="module")
def shar(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Shards of lhotse: 90 cuts of 0.05 to 0.25 s, in shards of 20."""
    lhotse = pytest.importorskip("lhotse")
    shar = pytest.importorskip("lhotse.shar")
    soundfile = pytest.importorskip("soundfile")
    folder = tmp_path_factory.mktemp("shar")
    with shar.SharWriter(folder, fields={"recording": "wav"}, shard_size=20) as writer:
        for number in range(90):
            wave = np.full(400 + 400 * (number % 5), 0.1, np.float32)
            path = folder / f"{number}.wav"
            soundfile.write(path, wave, 8000)
            cut = lhotse.Recording.from_file(path).to_cut()
            cut.id = str(number)
            writer.write(cut)
    fields = ("cuts", "recording")
    files = zip(*(sorted(map(str, folder.glob(f"{name}.0*"))) for name in fields), strict=True)
    return [dict(zip(fields, paths, strict=True)) for paths in files]


@pytest.mark.ranks
@pytest.mark.parametrize("processes", [0, 2])
def test_cuts_of_lhotse_are_trained_once(
    ranks: Ranks, shar: list[dict[str, str]], processes: int
) -> None:
    assert len(shar) == 5
    ran = ranks.run(read_shar, shar, processes, timeout_s=120)
    assert sorted(number for rank in ran for number, _ in rank) == list(range(90))
    for number, samples in chain(*ran):
        assert samples == 400 + 400 * (number % 5)


@files_are_left_open
def test_cuts_of_lhotse_that_are_shuffled_are_warned_of(
    shar: list[dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    stream = Stream.shards(shar, cuts_of(shuffle=True), size=lambda cut: cut.duration, buffer=64)
    assert len(set(read(stream, lambda cut: int(cut.id)))) < 90
    assert "in another order when opened again" in caplog.text
