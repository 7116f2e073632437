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
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.core.errors import PacelineError
from paceline.wire import RunState

T = TypeVar("T")


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
