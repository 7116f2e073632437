"""Where samples come from: files, or ranges of large files, on a file system or over HTTP."""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import SplitResult, urlsplit

import numpy as np
import numpy.typing as npt

from paceline.core.errors import PacelineError

_TRIES = 4  # of a read over HTTP
_AGAIN_S = 0.25  # before the second; each further one waits twice as long
_TIMEOUT_S = 30.0


@runtime_checkable
class Source(Protocol):
    """All samples, as bytes. Any rank may read any of them, from any thread and any process."""

    def __len__(self) -> int:
        """N."""
        ...

    def size(self, index: int) -> int:
        """Bytes of a sample, at most 2³² − 1. Called once for each sample when a session begins."""
        ...

    def read(self, index: int) -> bytes:
        """A sample's bytes.

        Raises:
            OSError: it cannot be read.
        """
        ...


class Files:
    """Each sample is a file, on a local or a shared file system.

    Args:
        paths: of the samples, [N].
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self._paths = [os.fspath(path) for path in paths]

    def __len__(self) -> int:
        return len(self._paths)

    def size(self, index: int) -> int:
        """See `Source.size`."""
        return Path(self._paths[index]).stat().st_size

    def read(self, index: int) -> bytes:
        """See `Source.read`."""
        return Path(self._paths[index]).read_bytes()


class Ranges:
    """Sample i is bytes offsets[i] … offsets[i + 1] of one large file.

    Args:
        place: a path, or a URL (http or https) whose server answers range requests.
        offsets: where samples begin, ascending, and where the last one ends, [N + 1].
        headers: of HTTP requests, such as ``Authorization``.

    Raises:
        ValueError: the offsets do not ascend from 0 or more, or there is no sample.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        offsets: Sequence[int] | npt.NDArray[np.int64],
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._place = os.fspath(place)
        self._offsets = np.asarray(offsets, np.int64)
        if len(self._offsets) < 2 or self._offsets[0] < 0 or (np.diff(self._offsets) < 0).any():
            raise ValueError("offsets: give where each sample begins, ascending, and the end")
        url = urlsplit(self._place)
        self._http = _Http(url, dict(headers or {})) if url.scheme in ("http", "https") else None

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def size(self, index: int) -> int:
        """See `Source.size`."""
        return int(self._offsets[index + 1] - self._offsets[index])

    def read(self, index: int) -> bytes:
        """See `Source.read`."""
        start, size = int(self._offsets[index]), self.size(index)
        if not size:
            return b""
        if self._http is not None:
            return self._http.read(start, size)
        with Path(self._place).open("rb") as file:
            file.seek(start)
            return file.read(size)


class _Http:
    """Range reads of one URL; each thread of each process keeps a connection of its own."""

    def __init__(self, url: SplitResult, headers: dict[str, str]) -> None:
        self._url = url
        self._headers = headers
        self._mine = _Connections()

    def __getstate__(self) -> tuple[SplitResult, dict[str, str]]:
        return self._url, self._headers

    def __setstate__(self, state: tuple[SplitResult, dict[str, str]]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def read(self, start: int, size: int) -> bytes:
        """Bytes of the file.

        Raises:
            PacelineError: the server does not answer range requests, or refuses this one.
            OSError: the server cannot be reached.
        """
        for attempt in range(_TRIES):
            try:
                return self._read(start, size)
            except (OSError, http.client.HTTPException) as error:
                self._mine.drop()
                if attempt == _TRIES - 1:
                    raise OSError(f"{self._url.geturl()}: {error}") from error
            time.sleep(_AGAIN_S * 2**attempt)
        raise AssertionError

    def _read(self, start: int, size: int) -> bytes:
        connection = self._mine.get(self._url)
        path = self._url.path or "/"
        target = f"{path}?{self._url.query}" if self._url.query else path
        wanted = {"Range": f"bytes={start}-{start + size - 1}"}
        connection.request("GET", target, headers={**self._headers, **wanted})
        answer = connection.getresponse()
        if answer.status == 206:
            data = answer.read()
            if len(data) != size:
                raise http.client.HTTPException(f"{len(data)} bytes came of {size}")
            return data
        self._mine.drop()
        if answer.status in (429, 500, 502, 503, 504):
            raise http.client.HTTPException(f"the server answers {answer.status}")
        why = "does not answer range requests" if answer.status == 200 else "refuses the request"
        raise PacelineError(f"{self._url.geturl()}: the server {why} (status {answer.status})")


class _Open:
    """A connection of one thread of one process; closed when the thread ends."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.process = os.getpid()
        self.connection = connection

    def __del__(self) -> None:
        self.connection.close()


class _Connections(threading.local):
    """This thread's connection; a forked process makes its own."""

    def __init__(self) -> None:
        self._of: _Open | None = None

    def get(self, url: SplitResult) -> http.client.HTTPConnection:
        if self._of is None or self._of.process != os.getpid():
            kind = (
                http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
            )
            assert url.hostname is not None
            self._of = _Open(kind(url.hostname, url.port, timeout=_TIMEOUT_S))
        return self._of.connection

    def drop(self) -> None:
        if self._of is not None:
            self._of.connection.close()
        self._of = None


def sizes_of(source: Source) -> npt.NDArray[np.int64]:
    """The bytes of each sample, [N].

    Raises:
        ValueError: there is no sample, or one has too many bytes; the message names it.
    """
    sizes = np.fromiter((source.size(index) for index in range(len(source))), np.int64, len(source))
    if not len(sizes):
        raise ValueError("source: it has no samples")
    if (wrong := np.flatnonzero((sizes < 0) | (sizes >= 2**32))).size:
        index = int(wrong[0])
        raise ValueError(f"source: sample {index} has {sizes[index]} bytes; at most 4 GiB fit")
    return sizes
