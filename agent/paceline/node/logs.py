"""Reading and shortening a run's logs, in the run's directory on its node.

Scripts can write to that directory, too. So functions in this module follow no links, do not wait
for pipes, and read a bounded number of files.

Ranks write to their logs directly, so that no reader can slow a rank down. The launcher limits the
size of a growing log (`shorten`): it returns the disk space of the log's middle to the file system.
The remaining bytes keep their offsets, so a reader that continues from an offset sees only a gap.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import get_args

from paceline.node import rundir
from paceline.node.rundir import LauncherStatus, Record
from paceline.wire.asking import MOST_LOGS, LogFile, LogPart, NotThere, Output, ReadLog

# A log that is shortened keeps `KEPT_FIRST` bytes at its start and `KEPT_LAST` at its end. Until it
# is shortened again, it may have up to twice `KEPT_LAST` bytes at its end.
KEPT_FIRST, KEPT_LAST = 1 << 20, 64 << 20
# Modes of Linux's fallocate.
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_BLOCK_BYTES = 4096
# Maximum number of bytes of a UTF-8 character.
_CHARACTER = 4

_MOST_ENTRIES = 10_000
_NUMBER = re.compile(r"(|attempt_)(0|[1-9][0-9]{0,8})")
_OUTPUTS: tuple[Output, ...] = get_args(Output)


def listed(directory: Path, from_attempt: int) -> list[LogFile]:
    """Return a run's logs on this node: the launcher's log, then ranks' logs, newest attempt first.

    Attempts before `from_attempt` are left out. Raise an OSError if the directory cannot be read.
    """
    return list(islice(_files(directory, from_attempt), MOST_LOGS))


def _files(directory: Path, from_attempt: int) -> Iterator[LogFile]:
    # `may_grow` is read before the size, so that the size is final if `may_grow` is False.
    may_grow = _may_grow(directory, None)
    if (seen := _stat(directory / "launcher.log")) is not None:
        yield LogFile(None, None, None, seen.st_size, seen.st_mtime, may_grow)
    for attempt in attempts(directory):
        if attempt < from_attempt:
            return
        may_grow = _may_grow(directory, attempt)
        for rank in sorted(numbers(directory / "logs" / f"attempt_{attempt}", "")):
            for output in _OUTPUTS:
                seen = _stat(rundir.rank_log(directory, attempt, rank, output))
                if seen is not None:
                    yield LogFile(rank, output, attempt, seen.st_size, seen.st_mtime, may_grow)


def part(directory: Path, wanted: ReadLog) -> LogPart | NotThere:
    """Return a part of a log, of at most `wanted.limit` bytes.

    An offset beyond the log's end gives an empty part. A part whose start is counted from the log's
    end does not begin within a UTF-8 character. Raise an OSError if the log cannot be read.
    """
    attempt = None if wanted.rank is None else _chosen(directory, wanted)
    if wanted.rank is None:
        path = directory / "launcher.log"
    elif attempt is None:
        return NotThere(f"it has no {wanted.output} of rank {wanted.rank}")
    else:
        path = rundir.rank_log(directory, attempt, wanted.rank, wanted.output)
    # `may_grow` is read before the log, so that the log is complete if `may_grow` is False.
    may_grow = _may_grow(directory, attempt)
    try:
        handle = opened(directory, path)
    except FileNotFoundError:
        return NotThere(f"it has no {path.relative_to(directory)}")
    try:
        size = os.fstat(handle).st_size
        offset, data = _read(handle, size, wanted)
    finally:
        os.close(handle)
    return LogPart(attempt, offset, data, size, may_grow)


def shorten(path: Path) -> None:
    """Free the disk space of a long log's middle; the rank may write to the log meanwhile.

    Raise an OSError if the log cannot be written.
    """
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        seen = os.fstat(handle)
        if not stat.S_ISREG(seen.st_mode) or seen.st_blocks * 512 <= KEPT_FIRST + 2 * KEPT_LAST:
            return
        end = (seen.st_size - KEPT_LAST) // _BLOCK_BYTES * _BLOCK_BYTES
        try:
            _free(handle, KEPT_FIRST, end - KEPT_FIRST)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # The middle cannot be freed, so free everything. The rank's next write keeps its
            # offset in the file.
            os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def _free(handle: int, offset: int, length: int) -> None:
    """Release the disk space of a part of a file; the part then reads as zeros.

    If the system or the file system does not support this, raise an OSError with EOPNOTSUPP or
    ENOSYS.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate64"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    mode = _PUNCH_HOLE | _KEEP_SIZE
    if libc.fallocate64(handle, mode, ctypes.c_int64(offset), ctypes.c_int64(length)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _kept(handle: int, offset: int, size: int) -> tuple[int, int]:
    """Return start and end of the first range without a gap, at or after an offset."""
    try:
        begin = os.lseek(handle, offset, os.SEEK_DATA)
        end = min(size, os.lseek(handle, begin, os.SEEK_HOLE))
    # ENXIO: only a gap is left up to the file's end. Other errors: the file system reports no gaps.
    except OSError as error:
        return (size, size) if error.errno == errno.ENXIO else (offset, size)
    if end < size and end - begin < _CHARACTER:
        # The range may be the start of a UTF-8 character whose other bytes are gone. A reader would
        # wait for them forever, so skip the range.
        return _kept(handle, end, size)
    return begin, end


def _read(handle: int, size: int, wanted: ReadLog) -> tuple[int, bytes]:
    from_end = wanted.lines is not None or wanted.offset < 0
    back = wanted.limit if wanted.lines is not None else -wanted.offset
    asked = max(0, size - back) if from_end else min(wanted.offset, size)
    offset, end = _kept(handle, asked, size)
    data = os.pread(handle, min(wanted.limit, end - offset), offset)
    if offset == asked and not from_end:
        return offset, data
    # After a gap, a block may begin with bytes that were freed or never written: they are zeros.
    begin = len(data) - len(data.lstrip(b"\0")) if offset != asked else 0
    begin += _character(data[begin:]) if offset else 0
    if wanted.lines is not None:
        begin = _last_lines(data, wanted.lines, begin)
    return offset + begin, data[begin:]


def _last_lines(data: bytes, lines: int, begin: int) -> int:
    position = len(data) - data.endswith(b"\n")
    for _ in range(lines):
        position = data.rfind(b"\n", 0, position)
        if position < 0:
            return begin
    return max(begin, position + 1)


def _character(data: bytes) -> int:
    """Return the position of the first complete UTF-8 character; at most 3 bytes may precede it."""
    return next((i for i, byte in enumerate(data[:3]) if byte & 0xC0 != 0x80), min(3, len(data)))


def _chosen(directory: Path, wanted: ReadLog) -> int | None:
    if wanted.attempt is not None:
        return wanted.attempt
    assert wanted.rank is not None
    for attempt in attempts(directory):
        if _stat(rundir.rank_log(directory, attempt, wanted.rank, wanted.output)) is not None:
            return attempt
    return None


def _may_grow(directory: Path, attempt: int | None) -> bool:
    """Return True if processes of an attempt may still run; `attempt` None: of any attempt."""
    record = rundir.read(directory / "run.json", Record)
    if record is None or (record.states and record.states[-1].state.final):
        return False
    if attempt is None:
        return True
    status = rundir.read(directory / "launcher.json", LauncherStatus)
    return status is None or attempt >= status.attempt


def attempts(directory: Path) -> list[int]:
    """Return the attempts that ran on this node, the newest first."""
    return sorted(numbers(directory / "logs", "attempt_"), reverse=True)


def numbers(folder: Path, prefix: str) -> Iterator[int]:
    """Yield N for each entry of a folder whose name is `prefix` followed by a number N."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in islice(entries, _MOST_ENTRIES):
            if (number := _NUMBER.fullmatch(entry.name)) and number[1] == prefix:
                yield int(number[2])


def _stat(path: Path) -> os.stat_result | None:
    try:
        seen = path.lstat()
    except OSError:
        return None
    return seen if stat.S_ISREG(seen.st_mode) else None


def opened(directory: Path, path: Path) -> int:
    """Open a regular file below a directory, without following links; return the descriptor.

    Raises:
        FileNotFoundError: there is no file, or it is not a regular file.
        OSError: the file cannot be read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(directory, flags)
    for name in path.relative_to(directory).parts:
        try:
            inner = os.open(name, flags, dir_fd=handle)
        # ELOOP: the name is a link. ENXIO: it is a socket.
        except OSError as error:
            if isinstance(error, PermissionError):
                raise
            raise FileNotFoundError(name) from error
        finally:
            os.close(handle)
        handle = inner
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileNotFoundError(path)
    return handle
