"""What a rank's loader sees of a stream: the samples in the buffer, by their numbers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from paceline.train.streams.reader import Reader


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

    Raises:
        ValueError: the options ask for processes, which do not share the buffer.
    """
    if options.get("num_workers"):
        raise ValueError(
            f"loader(num_workers={options['num_workers']}): not with a stream, which a thread "
            "reads ahead; leave it out"
        )
    return Buffered(reader), options
