"""The data set whose samples live on nodes."""

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
    """Samples that were not on the node when they were asked for."""

    samples: int = 0
    bytes: int = 0
    waited_s: float = 0.0  # reading them from the source

    def __iadd__(self, other: Misses) -> Misses:
        self.samples += other.samples
        self.bytes += other.bytes
        self.waited_s += other.waited_s
        return self


class Sharded:
    """A map-style data set of which each node keeps a part in a directory of its own.

    Give it to `paceline.Session`, on all ranks alike. A sample that the node has is read from its
    directory. Any other is read from the source, and kept there if there is room::

        data = paceline.data.Sharded(
            paceline.data.Files(paths), directory="/scratch/shard", limit_bytes=200 << 30
        )
        session = paceline.Session(data, sizes=frames, global_batch=64)

    Args:
        source: of all samples; each node reaches it.
        directory: on the node's own disk; the ranks of a node share it. It stays after the
            training, so that the next one on the same data begins with what is there.
        limit_bytes: bytes of samples in the directory at most.
        bandwidth: bytes in a second at which a node fetches ahead what moves to it; None: as fast
            as it goes. What a step needs now is not held back.
        decode: makes a sample of its bytes and its index; None: samples are bytes. With
            ``num_workers`` and processes that are spawned, it must be picklable.

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
        self.keeps = False  # what it reads: from when a session has settled who keeps what
        self._lengths: npt.NDArray[np.int64] | None = None
        self._misses = Misses()

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each sample, [N]; read from the source once."""
        if self._lengths is None:
            self._lengths = sizes_of(self.source)
        return self._lengths

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        data = self.read(index)
        return data if self._decode is None else self._decode(data, index)

    def read(self, index: int) -> bytes:
        """A sample's bytes, from the node's directory or else from the source.

        Raises:
            OSError, PacelineError: the source cannot be read, or has other bytes than it said.
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
        """A sample's bytes from the source.

        Raises:
            OSError, PacelineError: see `read`.
        """
        data, size = self.source.read(index), int(self.lengths[index])
        if len(data) != size:
            raise PacelineError(
                f"source: sample {index} has {len(data)} bytes, but its size is {size}"
            )
        return data

    def take_misses(self) -> Misses:
        """What this process did not find on the node since the last call."""
        taken, self._misses = self._misses, Misses()
        return taken
