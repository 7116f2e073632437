"""A run's directory on its node: the files of launcher, supervisor and ranks.

``<data>/runs/<run>/``
    ``run.json``       `Record`: reported states, and whether the control plane has them
    ``launcher.json``  `LauncherStatus`
    ``launcher.log``   output of the launcher
    ``arrived``        exists if this node's launcher has reached the rendezvous of several nodes
    ``reform``         exists while nodes join or leave, see `paceline.core.reform`
    ``logs/attempt_<k>/<rank>/{stdout,stderr}.log``
    ``checkpoints/``   checkpoints of a run on one node
    ``spool/``         telemetry that the bus did not accept
    ``memory/``        ranks' memory limits, see `paceline.train.features.memory`
    ``ended.json``     `EndedRanks`
    ``launches``       launches that were executed; none is executed twice
    ``lock``           held by the process that supervises the run
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.core import runid
from paceline.core.errors import PacelineError
from paceline.node import private
from paceline.wire import RunState

T = TypeVar("T")

_TAIL_BYTES = 65536
# Maximum number of characters of a log that a run's message quotes.
_LOG_CHARACTERS = 2000


class LauncherStatus(msgspec.Struct, frozen=True):
    """A launcher's state. `exit_code` is None while ranks run."""

    attempt: int
    exit_code: int | None = None
    # Message of a failure in this attempt or in the previous one.
    message: str | None = None
    # Unix time at which all ranks had ended; None: they have not ended.
    ended_at: float | None = None


class Record(msgspec.Struct):
    """The states of a run as its supervisor reported them."""

    run: str
    node: str
    # Name of the supervisor: "the agent", "paceline run", "paceline observe" or "paceline doctor".
    supervisor: str
    # The control plane that gets the states: its id, or the address of its bus.
    control: str
    states: list[RunState] = []
    # Number of `states` that the bus accepted.
    delivered: int = 0
    # True if the run has ended, all states are delivered, and the spool is empty.
    settled: bool = False


class EndedRanks(msgspec.Struct, frozen=True):
    """Ranks that were ended because they blocked other ranks."""

    attempt: int
    ranks: list[int]
    reason: str


def default_data() -> Path:
    """Return the default data directory, used unless ``--data`` or ``PACELINE_DATA`` is given."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "paceline"


def open_data(path: Path) -> Path:
    """Create a data directory, or check that it is usable; return its absolute path.

    Raises:
        PacelineError: the directory cannot be written, or another user owns a file in it.
    """
    path = path.expanduser().absolute()
    try:
        private.check_data(path)
        path.mkdir(0o700, parents=True, exist_ok=True)
        (path / "runs").mkdir(0o700, exist_ok=True)
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
    """Return a run's directory; reject an invalid id, which could be a path out of `data`."""
    return data / "runs" / runid.checked(run)


def note_launch(directory: Path, sealed: bytes) -> bool:
    """Record a launch of a run in its directory; return False if it is recorded already.

    `sealed` is the launch's encrypted secrets, which differ for each launch. So this function
    detects if a program that can write to the bus sends an old launch again.
    """
    name = hashlib.sha256(sealed).hexdigest()
    path = directory / "launches"
    if path.exists() and name in path.read_text().split():
        return False
    directory.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{name}\n")
    return True


def note_arrival(directory: Path) -> None:
    """Record that this node's launcher has reached the rendezvous of several nodes."""
    # A full disk must not end training.
    with contextlib.suppress(OSError):
        (directory / "arrived").touch()


def forget_launcher(directory: Path) -> None:
    """Delete the files of an earlier launcher before a run is resumed."""
    for name in ("launcher.json", "arrived", "reform"):
        (directory / name).unlink(missing_ok=True)


def rank_log(directory: Path, attempt: int, rank: int, stream: str) -> Path:
    """Return the path of a rank's log; `stream` is "stdout" or "stderr"."""
    return directory / "logs" / f"attempt_{attempt}" / str(rank) / f"{stream}.log"


def tail(log: Path) -> str:
    """Return the end of a rank's log, without the prefix that torch.distributed puts on lines."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return re.sub(r"^\[rank\d+\]: ?", "", text.replace("\0", ""), flags=re.M)


def last_lines(log: Path) -> str:
    """Return the last lines of a log, for a run's message: at most 2,000 characters.

    If a line was overwritten, such as a progress bar, return only its last version.
    """
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in tail(log).strip().split("\n")]
    text = "\n".join(lines)
    if len(text) <= _LOG_CHARACTERS:
        return text
    cut = text[-_LOG_CHARACTERS - 1 :]
    return cut.partition("\n")[2] if "\n" in cut else cut[1:]


def write(path: Path, value: msgspec.Struct) -> None:
    """Replace a JSON file atomically: a reader sees the old file or the new one.

    Only its owner may read the file, even if a rank writes it with the user's umask.
    """
    temporary = path.with_suffix(".tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(msgspec.json.encode(value))
    temporary.replace(path)


def read(path: Path, kind: type[T]) -> T | None:
    """Return the value in a JSON file; None if there is no file.

    Raise a ValidationError if the file holds another kind of value.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
