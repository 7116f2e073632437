"""The samples that a node keeps: files in one directory, within a bound, shared by processes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.core.errors import PacelineError

_FOLDER = 1000  # samples of a folder
_HIDDEN = "."  # begins the name of what is being written
_WIDTH = 20  # characters of the bytes in use


class Directory:
    """A node's samples on its disk: never more than `limit_bytes` of them.

    Every process of the node reads and adds. One of them, which has called `claim`, removes. A
    sample is written under a hidden name and renamed, so whoever sees it sees all of it. The file
    ``used`` has the bytes in use. It is raised before a sample is written, so that a process that
    is killed leaves too high a number, which the next `claim` corrects.

    Args:
        path: of the node's own, for one training at a time.
        limit_bytes: of all samples together.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.limit_bytes = limit_bytes
        self._claimed: int | None = None  # descriptor of the file that says so

    def claim(self, sizes: npt.NDArray[np.int64]) -> list[int]:
        """Takes the directory for this process; the samples that it has, ascending.

        What was half written is removed, as is what has another size than its sample.

        Args:
            sizes: bytes of each sample, [N].

        Raises:
            PacelineError: another training uses it, or it has samples of other data.
            OSError: it cannot be written.
        """
        descriptor = os.open(self.path / "claimed", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Of this process alone: a data loading process that outlives it holds up nobody.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise PacelineError(
                f"directory {self.path}: another training, or another node, uses it: "
                "give each node and each training a directory of its own"
            ) from None
        self._claimed = descriptor
        self._check_data(sizes)
        return self._count(sizes)

    def release(self) -> None:
        """Gives the directory back."""
        if self._claimed is not None:
            os.close(self._claimed)
            self._claimed = None

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        with self._locked() as descriptor:
            return _read(descriptor)

    def has(self, index: int) -> bool:
        """Whether a sample is there."""
        return self._file(index).exists()

    def read(self, index: int, size: int) -> bytes | None:
        """A sample's bytes; None: it is not there, or not as long as it must be."""
        try:
            data = self._file(index).read_bytes()
        except FileNotFoundError:
            return None
        return data if len(data) == size else None

    def put(self, index: int, data: bytes) -> bool:
        """Adds a sample; False: there is no room, or no disk space."""
        file = self._file(index)
        if file.exists() or not self._take(len(data)):
            return file.exists()
        hidden = file.with_name(f"{_HIDDEN}{index}-{os.getpid()}-{threading.get_ident()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            hidden.write_bytes(data)
            with self._locked():
                there = file.exists()  # another process was sooner
                hidden.replace(file)
        except OSError:  # the disk is full, for one
            hidden.unlink(missing_ok=True)
            self._take(-len(data))
            return False
        if there:
            self._take(-len(data))
        return True

    def remove(self, index: int) -> None:
        """Removes a sample, if it is there. Whoever is reading it reads on."""
        file = self._file(index)
        try:
            size = file.stat().st_size
            file.unlink()
        except FileNotFoundError:
            return
        self._take(-size)

    def samples(self) -> list[int]:
        """The samples that are there, ascending."""
        return sorted(int(file.name) for file in self._files() if file.name.isdecimal())

    def _file(self, index: int) -> Path:
        return self.path / str(index // _FOLDER) / str(index)

    def _files(self) -> Iterator[Path]:
        for folder in self.path.iterdir():
            if folder.name.isdecimal() and folder.is_dir():
                yield from folder.iterdir()

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Holds the lock on the bytes in use, whose file it gives."""
        descriptor = os.open(self.path / "used", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            # Closing is not enough: a process forked meanwhile has the descriptor, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _take(self, size: int) -> bool:
        """Counts bytes as in use, or as free again; False: there is no room for them."""
        with self._locked() as descriptor:
            used = _read(descriptor) + size
            if size > 0 and used > self.limit_bytes:
                return False
            _write(descriptor, max(used, 0))
        return True

    def _check_data(self, sizes: npt.NDArray[np.int64]) -> None:
        digest = hashlib.sha256(sizes.astype("<i8").tobytes()).hexdigest()
        known = {"samples": len(sizes), "sizes": digest}
        file = self.path / "data.json"
        if not file.exists():
            file.write_text(json.dumps(known))
        elif json.loads(file.read_text()) != known:
            raise PacelineError(
                f"directory {self.path}: it has samples of other data: empty it, or give another"
            )

    def _count(self, sizes: npt.NDArray[np.int64]) -> list[int]:
        """Removes what is broken, and what is beyond the limit; the samples that stay."""
        used, kept = 0, []
        for file in sorted(self._files()):
            size = file.stat().st_size
            index = int(file.name) if file.name.isdecimal() else -1
            right = 0 <= index < len(sizes) and size == sizes[index]
            if right and used + size <= self.limit_bytes:
                used += size
                kept.append(index)
            else:
                file.unlink()
        with self._locked() as descriptor:
            _write(descriptor, used)
        return sorted(kept)


def _read(descriptor: int) -> int:
    return int(os.pread(descriptor, _WIDTH, 0) or 0)


def _write(descriptor: int, used: int) -> None:
    # Always as wide, in one piece: whoever is killed or finds no disk space leaves a number.
    os.pwrite(descriptor, str(used).rjust(_WIDTH).encode(), 0)
