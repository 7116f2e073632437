"""Sources of samples: files, or ranges of large files, on a file system or over HTTP."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from paceline.core.errors import PacelineError

# `_Http` imports httpx when it makes a client, because few scripts read over HTTP.
if TYPE_CHECKING:
    import httpx

# Maximum number of attempts at an HTTP read, and seconds before the second attempt. Each later
# wait is twice as long as the wait before it.
_READ_TRIES = 4
_RETRY_S = 0.25
_TIMEOUT_S = 30.0
_TEMPORARY = (429, 500, 502, 503, 504)


@runtime_checkable
class Source(Protocol):
    """Source of all samples, as bytes. Any rank may read any sample, in any thread or process."""

    def __len__(self) -> int:
        """Return the number of samples, N."""
        ...

    def size(self, index: int) -> int:
        """Return a sample's length in bytes, at most 2³² − 1.

        Each new session calls this method once for every sample.
        """
        ...

    def read(self, index: int) -> bytes:
        """Return a sample's bytes; raise an OSError if they cannot be read."""
        ...


class Files:
    """Source whose samples are files on a local or a shared file system.

    `paths` has the path of each sample, [N].
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
    """Source in one large file: sample i has the file's bytes offsets[i] to offsets[i + 1] − 1.

    Args:
        place: a path, or a URL (http or https) whose server supports range requests.
        offsets: the start of each sample, ascending, and the end of the last one, [N + 1].
        headers: headers of HTTP requests, such as ``Authorization``.

    Raises:
        ValueError: an offset is negative, the offsets do not ascend, or there is no sample.
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
            raise ValueError(
                "offsets: give the start of each sample, ascending, and the end of the last one"
            )
        remote = self._place.startswith(("http://", "https://"))
        self._http = _Http(self._place, dict(headers or {})) if remote else None

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
    """Reader of byte ranges of one URL; the threads of a process share its connections."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._url = url
        # With compression, the requested range would be a range of the compressed file.
        self._headers = {"Accept-Encoding": "identity", **headers}
        self._client: httpx.Client | None = None
        # The process that made the client; a forked process makes its own.
        self._process = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_client": None}

    def __del__(self) -> None:
        if self._client is not None:
            self._client.close()

    def read(self, start: int, size: int) -> bytes:
        """Read `size` bytes of the file, from byte `start`.

        Raises:
            PacelineError: the server does not support range requests, or refuses the request.
            OSError: the server cannot be reached, or has a temporary error at each attempt.
        """
        import httpx

        for attempt in range(_READ_TRIES):
            try:
                return self._read(start, size)
            except (httpx.TransportError, _TemporaryError) as error:
                if attempt == _READ_TRIES - 1:
                    raise OSError(f"{self._url}: {error}") from error
            time.sleep(_RETRY_S * 2**attempt)
        raise AssertionError

    def _read(self, start: int, size: int) -> bytes:
        wanted = {**self._headers, "Range": f"bytes={start}-{start + size - 1}"}
        with self._connected().stream("GET", self._url, headers=wanted) as answer:
            status = answer.status_code
            if status == HTTPStatus.PARTIAL_CONTENT:
                data = answer.read()
                if len(data) != size:
                    raise _TemporaryError(f"received {len(data)} of {size} bytes")
                return data
        if status in _TEMPORARY:
            raise _TemporaryError(f"the server returned {status}")
        plain = status == HTTPStatus.OK
        why = "does not support range requests" if plain else "refuses the request"
        raise PacelineError(f"{self._url}: the server {why} (status {status})")

    def _connected(self) -> httpx.Client:
        import httpx

        if self._client is None or self._process != os.getpid():
            self._client = httpx.Client(timeout=_TIMEOUT_S, follow_redirects=True)
            self._process = os.getpid()
        return self._client


class _TemporaryError(Exception):
    """Temporary error of a server: another attempt may succeed."""


def sizes_of(source: Source) -> npt.NDArray[np.int64]:
    """Return each sample's number of bytes, [N].

    Raise a ValueError if there are no samples, or if one has an invalid size.
    """
    sizes = np.fromiter((source.size(index) for index in range(len(source))), np.int64, len(source))
    if not len(sizes):
        raise ValueError("source: it has no samples")
    if (wrong := np.flatnonzero((sizes < 0) | (sizes >= 2**32))).size:
        index = int(wrong[0])
        raise ValueError(f"source: sample {index} has {sizes[index]} bytes; the maximum is 4 GiB")
    return sizes
