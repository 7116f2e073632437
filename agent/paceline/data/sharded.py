"""`Sharded`, the data set whose samples are stored on nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.errors import PacelineError
from paceline.data.directory import Directory
from paceline.data.sources import Source, sizes_of


@dataclass
class Misses:
    """Count of samples that were not on the node when a rank read them."""

    samples: int = 0
    bytes: int = 0
    waited_s: float = 0.0

    def __iadd__(self, other: Misses) -> Misses:
        self.samples += other.samples
        self.bytes += other.bytes
        self.waited_s += other.waited_s
        return self


class Sharded:
    """Map-style data set of which each node stores a shard in its own directory.

    Give the data set to `paceline.Session`, with the same arguments on all ranks. A sample that is
    in the node's directory is read from there. Other samples are read from the source, and stored
    in the directory if there is room::

        data = paceline.data.Sharded(
            paceline.data.Files(paths), directory="/scratch/shard", limit_bytes=200 << 30
        )
        session = paceline.Session(data, sizes=frames, global_batch=64)

    Args:
        source: source of all samples, reachable from each node.
        directory: a directory on the node's own disk; the ranks of a node share it. The directory
            remains after the training, so that the next training on the same data can use its
            samples.
        limit_bytes: the maximum number of bytes of the samples in the directory.
        bandwidth: limit for prefetching on each node, in bytes per second; None: no limit. The
            limit does not apply to samples that a step needs now.
        decode: converts a sample's bytes and its index to a sample; None: samples are bytes. With
            ``num_workers`` and spawned processes, it must be picklable.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        OSError: the directory cannot be made.
    """

    def __init__(
        self,
        source: Source,
        *,
        directory: str | os.PathLike[str],
        limit_bytes: int,
        bandwidth: float | None = None,
        decode: Callable[[bytes, int], Any] | None = None,
    ) -> None:
        if not isinstance(source, Source):
            raise TypeError(f"source={source!r}: it needs __len__, size(index) and read(index)")
        if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int):
            raise TypeError(f"limit_bytes={limit_bytes!r}: give a whole number of bytes")
        if limit_bytes <= 0:
            raise ValueError(f"limit_bytes={limit_bytes}: it must be above 0")
        if bandwidth is not None and not bandwidth > 0:
            raise ValueError(f"bandwidth={bandwidth}: it must be above 0 bytes a second, or None")
        self.source = source
        self.directory = Directory(Path(directory).absolute(), limit_bytes)
        self.bandwidth = bandwidth
        self._decode = decode
        # True if samples that are read from the source are also stored in the directory. The
        # session sets this attribute after the directories of all nodes are claimed and checked.
        self.keeps = False
        self._lengths: npt.NDArray[np.int64] | None = None
        self._misses = Misses()

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of bytes of each sample, [N]; only the first call reads the source."""
        if self._lengths is None:
            self._lengths = sizes_of(self.source)
        return self._lengths

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        data = self.read(index)
        return data if self._decode is None else self._decode(data, index)

    def read(self, index: int) -> bytes:
        """Return a sample's bytes, from the node's directory or else from the source.

        Raises:
            OSError, PacelineError: the source cannot be read, or a sample's size is wrong.
        """
        size = int(self.lengths[index])
        data = self.directory.read(index, size)
        if data is not None:
            return data
        began = time.perf_counter()
        data = self.fetch(index)
        self._misses += Misses(1, size, time.perf_counter() - began)
        if self.keeps:
            self.directory.put(index, data)
        return data

    def fetch(self, index: int) -> bytes:
        """Return a sample's bytes from the source; it raises the same errors as `read`."""
        data, size = self.source.read(index), int(self.lengths[index])
        if len(data) != size:
            raise PacelineError(
                f"source: sample {index} has {len(data)} bytes, but its size is {size}"
            )
        return data

    def take_misses(self) -> Misses:
        """Return and reset the count of samples that this process did not find on the node."""
        taken, self._misses = self._misses, Misses()
        return taken
