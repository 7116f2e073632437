"""Cases for ranks: streams of webdataset, lhotse and Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import paceline
from paceline.data import Stream

BATCH, BUFFER = 8, 32


def read(stream: Stream, number_of: Callable[[Any], int], processes: int = 0) -> list[int]:
    """The numbers of the samples that this rank has in one epoch."""

    def numbers(samples: list[Any]) -> list[int]:
        return [number_of(sample) for sample in samples]

    read_: list[int] = []
    with closing(paceline.Session(stream, global_batch=BATCH)) as session:
        for batch in session.loader(collate_fn=numbers, num_workers=processes):
            read_ += [] if session.batch.empty else batch
    return read_


def id_of(sample: dict[str, Any]) -> int:
    return int(sample["json"]["id"])


def _rows(shards: list[range]) -> Iterator[dict[str, int]]:
    for part in shards:
        for number in part:
            yield {"number": number}


def rows_shuffled_without_seed(shards: int, seed: int | None) -> list[int]:
    """Reads 40 rows of a streamed data set that is shuffled; seed None: without one."""
    import datasets

    each = 40 // shards
    parts = [range(first, first + each) for first in range(0, 40, each)]
    rows = datasets.IterableDataset.from_generator(_rows, gen_kwargs={"shards": parts})
    shuffled = rows.shuffle(seed=seed, buffer_size=10)
    stream = Stream.of_hugging_face(shuffled, size=lambda row: 1.0, buffer=BUFFER)
    return read(stream, lambda row: int(row["number"]))


def cuts_of(shuffle: bool = False) -> Callable[[dict[str, str]], Any]:
    """Opens a shard of lhotse's shar."""
    from lhotse import CutSet

    def open_shard(files: dict[str, str]) -> Any:
        cuts = CutSet.from_shar(fields={name: [path] for name, path in files.items()})
        return cuts.shuffle() if shuffle else cuts

    return open_shard


def read_shar(shards: list[dict[str, str]], processes: int) -> list[tuple[int, int]]:
    """The cuts that this rank has in one epoch: number, and length of the decoded audio."""
    opens = cuts_of()

    def decoded(files: dict[str, str]) -> Iterator[tuple[int, Any]]:
        for cut in opens(files):
            yield int(cut.id), cut.load_audio()[0]

    stream = Stream.shards(shards, decoded, size=lambda sample: len(sample[1]), buffer=BUFFER)
    samples: list[tuple[int, int]] = []
    with closing(paceline.Session(stream, global_batch=BATCH)) as session:
        for batch in session.loader(collate_fn=list, num_workers=processes):
            if not session.batch.empty:
                samples += [(number, len(audio)) for number, audio in batch]
    return samples
