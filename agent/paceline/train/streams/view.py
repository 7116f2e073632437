"""A rank's view of a stream for its loader: the samples in the buffer, by their numbers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from paceline.train.streams.processes import OPTIONS
from paceline.train.streams.reader import StreamReader

_READERS = {*OPTIONS, "persistent_workers"}


class Buffered(Dataset[Any]):
    """A rank's buffer as a map-style data set, which yields each sample once."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader

    def __getitem__(self, number: int) -> Any:
        return self._reader.take([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return self._reader.take(numbers)


def buffered(reader: StreamReader, options: dict[str, Any]) -> tuple[Buffered, dict[str, Any]]:
    """Return the data set of a stream's loader, and the loader's options.

    Options about processes go to the reader, because the loader only takes samples from the buffer.
    """
    reader.options = {name: options[name] for name in OPTIONS if name in options}
    return Buffered(reader), {n: v for n, v in options.items() if n not in _READERS}
