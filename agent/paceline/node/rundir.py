"""A run's directory on its node: what is where, and what launcher and supervisor write there.

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

from paceline.core.errors import PacelineError
from paceline.wire import RunState

T = TypeVar("T")

_TAIL_BYTES = 65536
_SHOWN = 2000  # characters of a log that a run's message holds


class LauncherStatus(msgspec.Struct, frozen=True):
    """How far a launcher is. `exit_code` is None while ranks run."""

    attempt: int
    exit_code: int | None = None
    message: str | None = None  # of a failure


class Record(msgspec.Struct):
    """A run's life as its supervisor reported it."""

    run: str
    node: str
    supervisor: str  # "agent" or "paceline run"
    control: str  # the control plane that is to hear of it: its id, or where its bus is
    states: list[RunState] = []
    delivered: int = 0  # how many of `states` the bus took
    settled: bool = False  # the run is over, all of it reported and its spool empty


def default_data() -> Path:
    """Where runs are kept unless ``--data`` or ``PACELINE_DATA`` says otherwise."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "paceline"


def open_data(path: Path) -> Path:
    """Makes a data directory, or finds it usable; its absolute path.

    Raises:
        PacelineError: it cannot be written.
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


def rank_log(directory: Path, attempt: int, rank: int, stream: str) -> Path:
    """The file that a rank's `stream` ("stdout", "stderr") goes to."""
    return directory / "logs" / f"attempt_{attempt}" / str(rank) / f"{stream}.log"


def tail(log: Path) -> str:
    """The end of what a rank wrote, without the prefix that torch.distributed puts on lines."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return re.sub(r"^\[rank\d+\]: ?", "", text.replace("\0", ""), flags=re.M)


def last_lines(log: Path) -> str:
    """The last lines of a log, for a run's message: 2,000 characters at most; "" if there are none.

    Of a line that was written over, such as a progress bar, only what was shown last.
    """
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in tail(log).strip().split("\n")]
    text = "\n".join(lines)
    if len(text) <= _SHOWN:
        return text
    cut = text[-_SHOWN - 1 :]
    return cut.partition("\n")[2] if "\n" in cut else cut[1:]


def write(path: Path, value: msgspec.Struct) -> None:
    """Replaces a JSON file at once: a reader sees the old or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(value))
    temporary.replace(path)


def read(path: Path, kind: type[T]) -> T | None:
    """A JSON file's value, None if there is no such file.

    Raises:
        msgspec.ValidationError: it holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
