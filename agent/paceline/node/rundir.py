"""A run's directory on its node: the files that launcher and supervisor write.

``<data>/runs/<run>/``
    ``run.json``       `Record`: what the supervisor reported, and whether the control plane has it
    ``launcher.json``  `LauncherStatus`
    ``launcher.log``   what the launcher and the rendezvous print
    ``logs/attempt_<k>/<rank>/{stdout,stderr}.log``
    ``spool/``         telemetry that the bus did not take
    ``lock``           held by the process that looks after the run
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.core import runid
from paceline.core.errors import PacelineError
from paceline.wire import RunState

T = TypeVar("T")

_TAIL_BYTES = 65536
_SHOWN = 2000  # most characters of a log in a run's message


class LauncherStatus(msgspec.Struct, frozen=True):
    """A launcher's state. `exit_code` is None while ranks run."""

    attempt: int
    exit_code: int | None = None
    message: str | None = None  # of a failure


class Record(msgspec.Struct):
    """A run's life as its supervisor reported it."""

    run: str
    node: str
    supervisor: str  # "agent" or "paceline run"
    control: str  # the control plane to deliver to: its id, or its bus's address
    states: list[RunState] = []
    delivered: int = 0  # how many of `states` the bus took
    settled: bool = False  # the run is over, all states are delivered and the spool is empty


def default_data() -> Path:
    """The data directory unless ``--data`` or ``PACELINE_DATA`` gives another."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "paceline"


def open_data(path: Path) -> Path:
    """Makes a data directory, or checks that it is usable; returns its absolute path.

    Raises:
        PacelineError: the directory cannot be written.
    """
    path = path.expanduser().absolute()
    try:
        (path / "runs").mkdir(parents=True, exist_ok=True)
        if not os.access(path / "runs", os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        probe = path / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise PacelineError(
            f"the data directory {path} cannot be written ({error.strerror}); "
            "choose another with --data"
        ) from error
    return path


def directory_of(data: Path, run: str) -> Path:
    """A run's directory in a data directory.

    Raises:
        InputError: `run` is no run's id; as a path it could lead anywhere.
    """
    return data / "runs" / runid.checked(run)


def rank_log(directory: Path, attempt: int, rank: int, stream: str) -> Path:
    """The file that a rank's `stream` ("stdout", "stderr") goes to."""
    return directory / "logs" / f"attempt_{attempt}" / str(rank) / f"{stream}.log"


def tail(log: Path) -> str:
    """The end of a rank's log, without the prefix that torch.distributed puts on lines."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return re.sub(r"^\[rank\d+\]: ?", "", text.replace("\0", ""), flags=re.M)


def last_lines(log: Path) -> str:
    """The last lines of a log, for a run's message: at most 2,000 characters.

    Of a line that was written over, for example a progress bar, only the last version is kept.
    """
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in tail(log).strip().split("\n")]
    text = "\n".join(lines)
    if len(text) <= _SHOWN:
        return text
    cut = text[-_SHOWN - 1 :]
    return cut.partition("\n")[2] if "\n" in cut else cut[1:]


def write(path: Path, value: msgspec.Struct) -> None:
    """Replaces a JSON file atomically: a reader sees the old file or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(value))
    temporary.replace(path)


def read(path: Path, kind: type[T]) -> T | None:
    """The value in a JSON file; None if there is no file.

    Raises:
        msgspec.ValidationError: the file holds another kind of value.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
