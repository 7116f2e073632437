"""Directory of a node's samples: files of a limited total size, shared by the node's processes."""

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

# Number of samples per folder.
_FOLDER = 1000
# First character in the names of files that are being written.
_HIDDEN = "."
# Width of the number in the file ``used``, in characters.
_NUMBER_WIDTH = 20


class Directory:
    """Samples that a node stores on its disk: at most `limit_bytes` bytes.

    Every process of the node may read and add samples. Only the process that has called `claim` may
    remove samples. A sample is written under a hidden name and renamed, so other processes see
    either no file or a complete one. The file ``used`` contains the number of bytes in use, which
    is raised before a sample is written. So after a process was killed, the number may be too high,
    until the next `claim` corrects it.

    No other node may use `path`, and only one training may use it at a time.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.limit_bytes = limit_bytes
        # Descriptor of the locked file ``claimed``; None: this process has no claim.
        self._claimed: int | None = None

    def claim(self, sizes: npt.NDArray[np.int64]) -> list[int]:
        """Claim the directory for this process; return the indices of its samples, ascending.

        `sizes` [N] has the number of bytes of each sample. Files with another number of bytes, and
        samples beyond the directory's limit, are removed.

        Raises:
            PacelineError: another training uses the directory, or its samples are from other data.
            OSError: the directory cannot be written.
        """
        descriptor = os.open(self.path / "claimed", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # This kind of lock belongs to one process and is not inherited. So a forked data
            # loading process that outlives this process does not block the next claim.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise PacelineError(
                f"directory {self.path}: another training, or another node, uses it: give each "
                "node and each training its own directory"
            ) from None
        self._claimed = descriptor
        self._check_data(sizes)
        return self._count(sizes)

    def release(self) -> None:
        """Release the claim."""
        if self._claimed is not None:
            os.close(self._claimed)
            self._claimed = None

    @property
    def used_bytes(self) -> int:
        """Return the number of bytes in use."""
        with self._locked() as descriptor:
            return _read(descriptor)

    def has(self, index: int) -> bool:
        """Return whether the directory has the sample `index`."""
        return self._file(index).exists()

    def read(self, index: int, size: int) -> bytes | None:
        """Return a sample's bytes; None if the sample is missing or has the wrong length."""
        try:
            data = self._file(index).read_bytes()
        except FileNotFoundError:
            return None
        return data if len(data) == size else None

    def put(self, index: int, data: bytes) -> bool:
        """Add a sample; return False if it exceeds the limit or cannot be written."""
        file = self._file(index)
        if file.exists() or not self._take(len(data)):
            return file.exists()
        hidden = file.with_name(f"{_HIDDEN}{index}-{os.getpid()}-{threading.get_ident()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            hidden.write_bytes(data)
            with self._locked():
                # Another process may have added the sample meanwhile.
                there = file.exists()
                hidden.replace(file)
        except OSError:
            hidden.unlink(missing_ok=True)
            self._take(-len(data))
            return False
        if there:
            self._take(-len(data))
        return True

    def remove(self, index: int) -> None:
        """Remove a sample if it exists; processes that are reading it are not disturbed."""
        file = self._file(index)
        try:
            size = file.stat().st_size
            file.unlink()
        except FileNotFoundError:
            return
        self._take(-size)

    def samples(self) -> list[int]:
        """Return the indices of the samples in the directory, ascending."""
        return sorted(int(file.name) for file in self._files() if file.name.isdecimal())

    def _file(self, index: int) -> Path:
        return self.path / str(index // _FOLDER) / str(index)

    def _files(self) -> Iterator[Path]:
        for folder in self.path.iterdir():
            if folder.name.isdecimal() and folder.is_dir():
                yield from folder.iterdir()

    @contextmanager
    def _locked(self) -> Iterator[int]:
        descriptor = os.open(self.path / "used", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            # Closing alone would not release the lock if a process was forked meanwhile, because
            # the child has a copy of the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _take(self, size: int) -> bool:
        """Add `size` (may be negative) to the bytes in use, or return False if that is too many."""
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
                f"directory {self.path}: it has samples of other data: empty it, or give another "
                "directory"
            )

    def _count(self, sizes: npt.NDArray[np.int64]) -> list[int]:
        """Remove broken samples and samples beyond the limit; return the indices of the rest."""
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
    return int(os.pread(descriptor, _NUMBER_WIDTH, 0) or 0)


def _write(descriptor: int, used: int) -> None:
    # The number always has the same width and is written in one call. So the file has a valid
    # number even after a process was killed or the disk was full.
    os.pwrite(descriptor, str(used).rjust(_NUMBER_WIDTH).encode(), 0)
