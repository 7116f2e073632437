"""A disk that is really full."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

_FILLING = "filling"


class SmallDisk:
    """A file system in memory; a context manager. Skips the test where nobody may mount one.

    Args:
        path: where it is mounted; made.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._size = size

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.path / _FILLING).open("ab", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)

    def empty(self) -> None:
        (self.path / _FILLING).unlink()

    def __enter__(self) -> SmallDisk:
        self.path.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={self._size}", "none", str(self.path)]
        mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)
