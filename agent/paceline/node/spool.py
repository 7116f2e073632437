"""Telemetry that the bus did not take, in bounded files on the node until somebody can send it.

A writer appends to a ``.part`` file and renames it to ``.spool`` when it is closed, so a reader of
``.spool`` files never meets one in the making. A record is its length, its CRC-32 and its
MessagePack bytes. Writes go straight to the kernel: they survive the process, not a power cut.
"""

from __future__ import annotations

import logging
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
CHUNK_AGE_S = 1.0

_HEAD = struct.Struct("<II")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[bytes, bytes])


class Spool:
    """One writer's bounded spool. For one thread.

    Args:
        directory: shared by the writers of a run; made when first needed.
        name: of this writer, unique in the directory, letters, digits and dashes.
        limit_bytes: bound on the bytes of this writer that wait to be drained.
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
        self.lost = 0  # records in chunks that were gone when they were to be closed

    def append(self, fields: dict[bytes, bytes], records: int = 1) -> bool:
        """Keeps the fields of a bus entry; False without room for it, on the disk or in the bound.

        Args:
            fields: of the entry.
            records: that it holds, for `lost`.

        Raises:
            OSError: the directory cannot be written.
        """
        body = _encoder.encode(fields)
        record = _HEAD.pack(len(body), zlib.crc32(body)) + body
        self.roll(len(record))
        if not self._fits(len(record)):
            return False
        if self._file is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._part = self._directory / f"{time.time_ns():020d}.{self._name}.part"
            self._file = self._part.open("xb", buffering=0)
            self._opened_at, self._open_bytes, self._open_records = time.monotonic(), 0, 0
        if self._file.write(record) < len(record):  # the disk is full
            try:
                self._file.truncate(self._open_bytes)
            finally:  # what follows a torn record would not be read
                self.close()
            return False
        self._open_bytes += len(record)
        self._open_records += records
        return True

    def _fits(self, size: int) -> bool:
        if self._closed_bytes + self._open_bytes + size <= self._limit_bytes:
            return True
        self._closed_bytes = 0  # some may have been drained since
        for path in self._directory.glob(f"*.{self._name}.spool"):
            try:
                self._closed_bytes += path.stat().st_size
            except FileNotFoundError:  # drained between listing and looking
                continue
        return self._closed_bytes + self._open_bytes + size <= self._limit_bytes

    def roll(self, coming: int = 0) -> None:
        """Closes the open chunk if it is old, or would outgrow a chunk with `coming` more bytes."""
        old = time.monotonic() - self._opened_at >= CHUNK_AGE_S
        if self._file is not None and (old or self._open_bytes + coming > CHUNK_BYTES):
            self.close()

    def close(self) -> None:
        """Closes the open chunk, so that it can be drained. The next `append` opens another.

        One that cannot be renamed is drained when its writer is gone; one that is gone is `lost`.
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
            logger.warning("spooled telemetry cannot be sent before the run ends: %s", error)

    def note_dropped(self, records: int) -> None:
        """Tells `dropped` how many records this writer has lost so far."""
        self._directory.mkdir(parents=True, exist_ok=True)
        part = self._directory / f"{self._name}.dropped.new"
        part.write_text(str(records))
        part.replace(self._directory / f"{self._name}.dropped")


def dropped(directory: Path) -> int:
    """Records that the writers of a directory have lost, because their spools were full."""
    count = 0
    for path in directory.glob("*.dropped"):
        try:
            count += int(path.read_text())
        except (OSError, ValueError) as error:  # no reason to tell nothing of the run
            logger.error("%s is left out: %s", path, error)
    return count


def drain(
    directory: Path,
    send: Callable[[dict[bytes, bytes]], None],
    *,
    include_open: bool = False,
) -> int:
    """Sends what is spooled, oldest chunk first, and deletes each chunk once all of it is sent.

    Killed half-way, or when `send` raises, it sends the chunk again next time. A record torn by a
    crash ends its chunk: it is logged and left out.

    Args:
        directory: of the writers; may be missing.
        send: takes the fields of one bus entry.
        include_open: also the open chunks; only when the writers are gone.

    Returns:
        Number of entries sent.

    Raises:
        whatever `send` raises.
    """
    paths = list(directory.glob("*.spool"))
    if include_open:
        paths += directory.glob("*.part")
    sent = torn = 0
    for path in sorted(paths):
        whole, rest = _records(path.read_bytes())
        for fields in whole:
            send(fields)
        sent += len(whole)
        torn += rest > 0
        path.unlink()
    if torn:
        logger.warning("%d spooled records were torn by a crash and left out", torn)
    return sent


def _records(data: bytes) -> tuple[list[dict[bytes, bytes]], int]:
    """The whole records at the beginning of a chunk, and how many bytes follow them."""
    whole = []
    start = 0
    while start + _HEAD.size <= len(data):
        size, checksum = _HEAD.unpack_from(data, start)
        body = data[start + _HEAD.size : start + _HEAD.size + size]
        if len(body) < size or zlib.crc32(body) != checksum:
            break
        whole.append(_decoder.decode(body))
        start += _HEAD.size + size
    return whole, len(data) - start
