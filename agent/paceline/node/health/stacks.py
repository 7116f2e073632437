"""The Python stacks of a run's ranks, also of ranks that hang.

A rank with a `paceline.Session` announces in ``stacks.json``, beside its logs, which signal makes
it write its stacks to ``stacks.txt`` (`paceline.train.stacks`). The agent sends this signal with
`dump`, and reads the stacks a moment later with `read`, so no function in this module waits.

A signal that a process does not catch may end the process. Scripts can write to the run's
directory, too. So the agent does not trust ``stacks.json``: it checks in /proc that the process is
the rank, and that the process catches the signal.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path, PurePath

import msgspec

from paceline.node import logs, rundir
from paceline.node.rundir import Record
from paceline.wire.asking import (
    MOST_LOG_BYTES,
    MOST_STACKS,
    Dump,
    Dumps,
    NotThere,
    Stacks,
    StackTrace,
)

# File names beside a rank's logs.
ANNOUNCED, WRITTEN = "stacks.json", "stacks.txt"

_MOST_ANNOUNCED = 16_384
# Maximum size in bytes of a file of stacks; a larger file is emptied.
_MOST_WRITTEN = 1 << 20
# Maximum number of characters of a frame's text. Without it, a script could choose names of files
# and functions of any length.
_MOST_FRAME = 300
_MOST_READ = 65_536
# States in /proc/PID/status of a process that handles no signals, in words.
_STATES = {
    "T": "its process is suspended (SIGSTOP)",
    "t": "its process is stopped by a debugger",
    "D": "its process is blocked in the kernel, for example by a disk, and handles no signals",
    "Z": "its process has ended",
    "X": "its process has ended",
}
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\S+) in (.*)')


class Announcement(msgspec.Struct, frozen=True):
    """A rank's announcement of how its stacks can be requested."""

    pid: int
    signal: int
    # `threading.Thread.ident` of the main thread.
    main: int
    # Folders of libraries, whose code is not the user's own.
    libraries: list[str]


class _NoStacksError(Exception):
    """The reason why a rank's stacks cannot be read."""


def dump(directory: Path, run: str, rank: int | None = None) -> Dumps | NotThere:
    """Request the stacks of the newest attempt's ranks on this node, without waiting for them.

    `rank` None: all ranks on this node, at most `MOST_STACKS`. Raise an OSError if the run's
    directory cannot be read.
    """
    record = rundir.read(directory / "run.json", Record)
    if record is None or (record.states and record.states[-1].state.final):
        return NotThere("the run has ended on this node")
    attempt = next(iter(logs.attempts(directory)), None)
    folder = directory / "logs" / f"attempt_{attempt}"
    ranks = sorted(logs.numbers(folder, "")) if attempt is not None else []
    if rank is not None:
        ranks = [rank] if rank in ranks else []
    if not ranks or attempt is None:
        who = "rank of the run" if rank is None else f"rank {rank}"
        return NotThere(f"no {who} is on this node")
    return Dumps(attempt, [_asked(directory, run, attempt, r) for r in ranks[:MOST_STACKS]])


def _asked(directory: Path, run: str, attempt: int, rank: int) -> Dump:
    try:
        announced = announcement(directory, attempt, rank)
        offset = _emptied(directory, attempt, rank)
        with _Process(run, attempt, rank, announced.pid) as process:
            process.ask(announced.signal)
    except _NoStacksError as error:
        return Dump(rank, 0, str(error))
    except (OSError, ValueError) as error:
        return Dump(rank, 0, f"its process cannot be signalled: {error}")
    return Dump(rank, offset, "")


def announcement(directory: Path, attempt: int, rank: int) -> Announcement:
    """Return a rank's announcement of how its stacks can be requested.

    Raise a _NoStacksError if there is no valid announcement, and an OSError if its file cannot be
    read.
    """
    try:
        handle = logs.opened(directory, _folder(directory, attempt, rank) / ANNOUNCED)
    except FileNotFoundError:
        why = "it cannot write stacks: its script has not created a paceline.Session (yet)"
        raise _NoStacksError(why) from None
    try:
        return msgspec.json.decode(os.pread(handle, _MOST_ANNOUNCED, 0), type=Announcement)
    except msgspec.DecodeError as error:
        raise _NoStacksError(f"its {ANNOUNCED} cannot be read: {error}") from error
    finally:
        os.close(handle)


def read(directory: Path, attempt: int, since: list[tuple[int, int]]) -> Stacks:
    """Return the stacks that ranks have written since `dump` requested them.

    `since` has a pair for each rank: the rank, and the length of its file when `dump` was called.
    """
    since = since[:MOST_STACKS]
    most = min(_MOST_READ, MOST_LOG_BYTES // max(1, len(since)))
    return Stacks([_stack(directory, attempt, rank, offset, most) for rank, offset in since])


def _stack(directory: Path, attempt: int, rank: int, offset: int, most: int) -> StackTrace:
    try:
        handle = logs.opened(directory, _folder(directory, attempt, rank) / WRITTEN)
        try:
            text = os.pread(handle, _MOST_WRITTEN, offset).decode(errors="replace")
        finally:
            os.close(handle)
        announced = announcement(directory, attempt, rank)
    except (OSError, _NoStacksError) as error:
        return StackTrace(rank, "", "", f"its stacks cannot be read: {error}")
    if not text:
        return StackTrace(rank, "", "", _STATES.get(_state(announced.pid), ""))
    # The main thread's stack is the last one, so the end of a long text is kept.
    data = text.encode()
    if len(data) > most:
        data = "…".encode() + data[len(data) - most :].partition(b"\n")[2]
    kept = data.decode(errors="ignore")
    return StackTrace(rank, kept, frame_of(text, announced)[:_MOST_FRAME], "")


def frame_of(text: str, announced: Announcement) -> str:
    """Return the innermost frame of the user's code, ``train.py:14 in forward``; empty if none.

    The main thread's frame takes precedence over the other threads' frames.
    """
    threads: list[tuple[bool, list[str]]] = []
    for line in text.splitlines():
        if (header := _THREAD.match(line)) is not None:
            threads.append((int(header[1], 16) == announced.main, []))
        elif threads and (frame := _FRAME.fullmatch(line)) is not None:
            file, number, function = frame.groups()
            if not _is_librarys(file, announced.libraries):
                threads[-1][1].append(f"{PurePath(file).name}:{number} in {function}")
    threads.sort(key=lambda thread: not thread[0])
    return next((frames[0] for _, frames in threads if frames), "")


def _is_librarys(file: str, libraries: list[str]) -> bool:
    installed = any(f"/{name}/" in file for name in ("site-packages", "dist-packages"))
    return installed or file.startswith(("<", *libraries))


def _folder(directory: Path, attempt: int, rank: int) -> Path:
    return rundir.rank_log(directory, attempt, rank, "stderr").parent


def _emptied(directory: Path, attempt: int, rank: int) -> int:
    """Empty a rank's file of stacks if it is too long; return the length of the file."""
    handle = logs.opened(directory, _folder(directory, attempt, rank) / WRITTEN)
    try:
        size = os.fstat(handle).st_size
        if size > _MOST_WRITTEN // 2:
            os.truncate(f"/proc/self/fd/{handle}", 0)
            return 0
        return size
    finally:
        os.close(handle)


class _Process:
    """The process of a rank, opened so that a signal cannot reach another process with its PID.

    A context manager. The constructor raises a _NoStacksError if the process is not this rank.
    """

    def __init__(self, run: str, attempt: int, rank: int, pid: int) -> None:
        self._pid = pid
        ended = _NoStacksError(_STATES["Z"])
        if pid < 1:
            raise ended
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            raise ended from None
        try:
            variables = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        except FileNotFoundError:
            variables = set()
        except OSError:
            os.close(self._handle)
            raise
        expected = {"PACELINE_RUN": run, "RANK": rank, "PACELINE_ATTEMPT": attempt}
        if not {f"{name}={value}".encode() for name, value in expected.items()} <= variables:
            os.close(self._handle)
            raise ended

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def ask(self, number: int) -> None:
        """Send a signal to the process; raise a _NoStacksError if the process does not catch it."""
        status = _status(self._pid)
        state = status.get("State", "Z")[:1]
        if state in _STATES and state != "D":
            raise _NoStacksError(_STATES[state])
        if not signal.SIGRTMIN <= number <= signal.SIGRTMAX or not caught(status, number):
            raise _NoStacksError("its process does not catch the signal that it announced")
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _state(pid: int) -> str:
    return _status(pid).get("State", "Z")[:1]


def caught(status: dict[str, str], number: int) -> bool:
    """Return True if a process catches a signal, according to its ``/proc/PID/status``."""
    return bool(int(status.get("SigCgt", "0"), 16) >> (number - 1) & 1)
