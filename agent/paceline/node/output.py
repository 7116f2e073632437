"""Copying of rank 0's output to the terminal in which an operator started a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from paceline.node import rundir

_log = logging.getLogger(__name__)


Writer = Callable[[IO[bytes]], Callable[[bytes], None]]


def copying(stream: IO[bytes]) -> Callable[[bytes], None]:
    """Return a function that writes to a stream and flushes it."""

    def copy(data: bytes) -> None:
        stream.write(data)
        stream.flush()

    return copy


class Output:
    """A copier of rank 0's output to the output of this process, if rank 0 is on this node.

    `writer` takes a standard stream of this process, and returns a function that writes to it;
    None: `copying`.
    """

    def __init__(self, directory: Path, writer: Writer | None = None) -> None:
        writer = writer or copying
        self._copies = [
            _Copy(directory, "stdout", writer(sys.stdout.buffer)),
            _Copy(directory, "stderr", writer(sys.stderr.buffer)),
        ]

    def pump(self, attempt: int) -> None:
        """Copy the output that was written since the last call."""
        for copy in self._copies:
            copy.pump(attempt)


class _Copy:
    def __init__(self, directory: Path, stream: str, write: Callable[[bytes], None]) -> None:
        self._directory = directory
        self._stream = stream
        self._write = write
        self._attempt = -1
        self._file: IO[bytes] | None = None
        self._broken = False

    def pump(self, attempt: int) -> None:
        self._copy()
        if attempt != self._attempt or self._file is None:
            path = rundir.rank_log(self._directory, attempt, 0, self._stream)
            if path.exists():
                if self._file is not None:
                    self._file.close()
                self._file = path.open("rb")
                self._attempt = attempt
                self._copy()

    def _copy(self) -> None:
        if self._file is None or self._broken or not (new := self._file.read()):
            return
        try:
            self._write(new)
        # A full disk, or a reader that is gone, must not end training.
        except OSError as error:
            self._broken = True
            _log.warning("rank 0's output is no longer shown here, only in its log: %s", error)
