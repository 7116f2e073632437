"""What a rank's loader sees of a stream: the samples in the buffer, by their numbers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from paceline.train.streams.processes import OPTIONS
from paceline.train.streams.reader import Reader

_READERS = {*OPTIONS, "persistent_workers"}


class Buffered(Dataset[Any]):
    """A rank's buffer as a map-style data set, from which each sample is taken once."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, number: int) -> Any:
        return self._reader.take([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return self._reader.take(numbers)


def buffered(reader: Reader, options: dict[str, Any]) -> tuple[Buffered, dict[str, Any]]:
    """The data set of a loader of a stream, and the loader's options.

    What is asked of processes is for the reader: the loader itself takes samples from the buffer.
    """
    reader.options = {name: options[name] for name in OPTIONS if name in options}
    return Buffered(reader), {n: v for n, v in options.items() if n not in _READERS}
