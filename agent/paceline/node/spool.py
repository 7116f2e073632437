"""Telemetry that the bus did not accept, in bounded files on the node until it can be sent.

A writer appends to a ``.part`` file and renames the closed file to ``.spool``, so ``.spool`` files
are always complete. Each file is a chunk of the spool. Each of its records consists of a length, a
CRC-32 and MessagePack bytes. Writes are not buffered in the process, so records survive the end of
the process, but not a power failure.

The training script can write to the directory, too. So readers validate everything in it.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

logger = logging.getLogger(__name__)

# Size and age at which a writer closes a chunk.
CHUNK_BYTES = 1 << 20
CHUNK_AGE_S = 1.0
# Maximum number of bytes that are read from a chunk. It is larger than `CHUNK_BYTES`, because a
# chunk may have a single larger record.
MOST_CHUNK_BYTES = 1 << 30
MOST_DROPPED = 2**53

_HEAD = struct.Struct("<II")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[bytes, bytes])


class Spool:
    """One writer's bounded spool. Not thread-safe.

    Args:
        directory: shared by the writers of a run; created with the first record.
        name: name of this writer, unique in the directory; letters, digits and dashes.
        limit_bytes: maximum size of this writer's files that are not drained yet.
    """

    def __init__(self, directory: Path, name: str, limit_bytes: int) -> None:
        self._directory = directory
        self._name = name
        self._limit_bytes = limit_bytes
        self._file: BinaryIO | None = None
        self._part = Path()
        self._opened_at = 0.0
        self._open_bytes = 0
        self._open_records = 0
        self._closed_bytes = 0
        # Number of records in chunks whose files were deleted before this writer had closed them.
        self.lost = 0

    def append(self, fields: dict[bytes, bytes], records: int = 1) -> bool:
        """Store the fields of a bus entry; return False if the disk or the spool is full.

        `records` is the number of telemetry records in the entry; they are added to `lost` if the
        chunk is deleted before it is closed. Raise an OSError if the directory cannot be written.
        """
        body = _encoder.encode(fields)
        record = _HEAD.pack(len(body), zlib.crc32(body)) + body
        self.roll(len(record))
        if not self._fits(len(record)):
            return False
        if self._file is None:
            self._directory.mkdir(0o700, parents=True, exist_ok=True)
            self._part = self._directory / f"{time.time_ns():020d}.{self._name}.part"
            self._part.touch(0o600, exist_ok=False)
            self._file = self._part.open("ab", buffering=0)
            self._opened_at, self._open_bytes, self._open_records = time.monotonic(), 0, 0
        # A short write means that the disk is full.
        if self._file.write(record) < len(record):
            try:
                self._file.truncate(self._open_bytes)
            # Records after an incomplete record would not be read, so begin a new chunk.
            finally:
                self.close()
            return False
        self._open_bytes += len(record)
        self._open_records += records
        return True

    def _fits(self, size: int) -> bool:
        if self._closed_bytes + self._open_bytes + size <= self._limit_bytes:
            return True
        # Count the closed chunks again, because some may have been drained since the last count.
        self._closed_bytes = 0
        for path in self._directory.glob(f"*.{self._name}.spool"):
            try:
                self._closed_bytes += path.stat().st_size
            # The chunk was drained after the directory was listed.
            except FileNotFoundError:
                continue
        return self._closed_bytes + self._open_bytes + size <= self._limit_bytes

    def roll(self, coming: int = 0) -> None:
        """Close the open chunk if it is old, or too large with `coming` more bytes."""
        old = time.monotonic() - self._opened_at >= CHUNK_AGE_S
        if self._file is not None and (old or self._open_bytes + coming > CHUNK_BYTES):
            self.close()

    def close(self) -> None:
        """Close the open chunk, so that it can be drained. The next `append` opens another.

        A chunk that cannot be renamed is drained after its writer has ended. A chunk whose file was
        deleted is counted in `lost`.
        """
        if self._file is None:
            return
        self._file.close()
        self._file = None
        self._closed_bytes += self._open_bytes
        self._open_bytes = 0
        try:
            self._part.rename(self._part.with_suffix(".spool"))
        except FileNotFoundError as error:
            logger.warning("spooled telemetry was removed before it was sent: %s", error)
            self.lost += self._open_records
        except OSError as error:
            logger.warning(
                "spooled telemetry stays on this node until the run has ended: %s", error
            )

    def note_dropped(self, records: int) -> None:
        """Store the total number of records that this writer has lost; `dropped` reads it."""
        self._directory.mkdir(0o700, parents=True, exist_ok=True)
        part = self._directory / f"{self._name}.dropped.new"
        part.write_text(str(records))
        part.replace(self._directory / f"{self._name}.dropped")


def dropped(directory: Path) -> int:
    """Return the number of records that a directory's writers have lost; see `note_dropped`."""
    count = 0
    for path in directory.glob("*.dropped"):
        try:
            count += int(_read(path) or 0)
        # The sum leaves out the records lost by the writer of the unreadable file.
        except (OSError, ValueError) as error:
            logger.error("ignoring the number of dropped records in %s: %s", path, error)
    return min(max(count, 0), MOST_DROPPED)


def chunks(
    directory: Path, *, include_open: bool = False
) -> Iterator[tuple[Path, list[dict[bytes, bytes]]]]:
    """Yield the file and the entries of each chunk, oldest chunk first.

    The caller deletes each file once it is sent. The rest of a file after an incomplete or invalid
    record is left out, and a warning is logged. Set `include_open` only if the writers have ended.
    The directory may be missing.
    """
    paths = list(directory.glob("*.spool"))
    if include_open:
        paths += directory.glob("*.part")
    torn = 0
    for path in sorted(path for path in paths if path.is_symlink() or not path.is_dir()):
        whole, rest = _records(_read(path))
        torn += rest > 0
        yield path, whole
    if torn:
        logger.warning(
            "ignoring everything after an incomplete or invalid record in %d spool files", torn
        )


def drain(
    directory: Path,
    send: Callable[[dict[bytes, bytes]], None],
    *,
    include_open: bool = False,
) -> int:
    """Send all spooled entries, oldest chunk first; return their number.

    Each chunk is deleted after it is sent. If the process is killed or `send` raises an error, the
    next call sends the whole chunk again. Incomplete records and `include_open` have the same
    effects as in `chunks`. Links, pipes and devices among the files are deleted.
    """
    sent = 0
    for path, entries in chunks(directory, include_open=include_open):
        for fields in entries:
            send(fields)
        sent += len(entries)
        path.unlink()
    return sent


def _read(path: Path) -> bytes:
    """Read a regular file; return nothing for a pipe or a device, which might never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        # The path is a link, or a socket.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return b""
        raise
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MOST_CHUNK_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def _records(data: bytes) -> tuple[list[dict[bytes, bytes]], int]:
    """Return the complete records at the start of a chunk, and the number of bytes after them."""
    whole = []
    start = 0
    while start + _HEAD.size <= len(data):
        size, checksum = _HEAD.unpack_from(data, start)
        body = data[start + _HEAD.size : start + _HEAD.size + size]
        if len(body) < size or zlib.crc32(body) != checksum:
            break
        try:
            whole.append(_decoder.decode(body))
        # Another program wrote this record: scripts can write here, too.
        except msgspec.DecodeError:
            break
        start += _HEAD.size + size
    return whole, len(data) - start
