"""Reports of the epochs that rank 0 plans without a server: what was measured, and what it gained.

Rank 0's planning process makes an `EpochReport` at each epoch's end, and appends it to the run's
file, one JSON object per line. Rank 0 prints the report's `sentence`. `paceline report --local`
reads the files, which are in the folder ``local`` of the data directory, each up to `MOST_BYTES`.
A new run deletes files that were last written over a day ago, except the newest `MOST_RUNS`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from pathlib import Path

import msgspec

from paceline.core.errors import InputError, PacelineError

# Folder in the data directory.
FOLDER = "local"
MOST_RUNS = 50
MOST_BYTES = 1 << 20
# Files that were written in this time may be of runs that still train.
_RECENT_S = 86_400
_SUFFIX = ".jsonl"

_encoder = msgspec.json.Encoder()


class Estimate(msgspec.Struct, frozen=True):
    """Estimate of an epoch with equal batches (`bsp`), the same samples and the fitted speeds."""

    # Duration of the epoch in seconds.
    epoch_s: float
    # Fraction of the ranks' time in which they would wait for slower ranks.
    waiting: float


class EpochReport(msgspec.Struct, frozen=True):
    """Measurements of an epoch, or of its steps from `first_step` on if `whole` is False."""

    epoch: int
    first_step: int
    steps: int
    whole: bool
    # The run's policy.
    policy: str
    # Duration of the steps in seconds, with loading and without what the script does between
    # epochs.
    epoch_s: float
    # Fraction of the ranks' time in which they waited for slower ranks.
    waiting: float
    # Mean straggler effect of the steps: (max T − min T) / mean T, with the compute times T.
    se: float
    # Each rank's share of the load, and its speed in size units per second, in the newest steps at
    # the epoch's end.
    shares: list[float]
    speeds: list[float]
    ended_at: float  # Unix time
    # Estimate for equal batches. None: too few steps have been measured, or a comparison of times
    # would not be fair.
    equal: Estimate | None = None


def sentence(report: EpochReport) -> str:
    """Return a report as one line for people."""
    since = "" if report.whole else f" from step {report.first_step} on"
    words = (
        f"epoch {report.epoch}{since} took {seconds(report.epoch_s)}, "
        f"of which ranks waited {percent(report.waiting)}"
    )
    equal = report.equal
    if equal is None:
        return words
    return (
        f"{words}; {equal.epoch_s / report.epoch_s:.2f} times as fast as equal batches "
        f"(estimate: {seconds(equal.epoch_s)}, {percent(equal.waiting)} waiting)"
    )


def seconds(duration_s: float) -> str:
    """Return a duration with its unit."""
    digits = 2 if duration_s < 10 else 1 if duration_s < 1000 else 0
    return f"{duration_s:,.{digits}f} s"


def percent(fraction: float) -> str:
    """Return a fraction in per cent."""
    return f"{100 * fraction:.0f} %"


def new_file(data: Path, program: str) -> Path:
    """Return the path for the reports of a run of `program` that starts now; create nothing."""
    stem = re.sub(r"[^\w-]+", "-", Path(program).stem).strip("-")[:64] or "run"
    started = time.strftime("%Y%m%d-%H%M%S")
    return data / FOLDER / f"{started}-{stem}-{secrets.token_hex(3)}{_SUFFIX}"


def keep(path: Path, report: EpochReport) -> None:
    """Append a report to a run's file. If the file is new, delete old files of other runs.

    Raises:
        OSError: the file cannot be written, or would exceed `MOST_BYTES`.
    """
    # `parents` would give the data directory itself another mode.
    path.parent.parent.mkdir(0o700, parents=True, exist_ok=True)
    path.parent.mkdir(0o700, exist_ok=True)
    line = _encoder.encode(report) + b"\n"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(file).st_size
        # A full disk may have cut the last line.
        if size and os.pread(file, 1, size - 1) != b"\n":
            line = b"\n" + line
        if size + len(line) > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has reached {MOST_BYTES:,} bytes")
        # In one write, so that a reader never sees a part of a line, unless the disk is full.
        if os.write(file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)
    if not size:
        _delete_old(path.parent)


def _delete_old(folder: Path) -> None:
    before = time.time() - _RECENT_S
    for old in _files(folder)[MOST_RUNS:]:
        # Another run may have deleted the file.
        with contextlib.suppress(OSError):
            if old.stat().st_mtime < before:
                old.unlink()


def _files(folder: Path) -> list[Path]:
    """Return the files of all runs, newest first. Names begin with the time of the start."""
    return sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.name, reverse=True)


def runs(data: Path) -> list[str]:
    """Return the names of the runs whose reports are kept, newest first."""
    return [path.name.removesuffix(_SUFFIX) for path in _files(data / FOLDER)]


def named(data: Path, prefix: str = "") -> str:
    """Return the name of the run with this name or unique prefix; without one, the newest run.

    Raises:
        InputError: no run, or several runs, have this prefix.
    """
    found = [run for run in runs(data) if run.startswith(prefix)]
    if not found:
        which = f"whose name begins with {prefix}" if prefix else "without a server"
        raise InputError(f"no run {which} is kept in {data / FOLDER}; --data names another folder")
    if prefix and prefix not in found and len(found) > 1:
        raise InputError(f"{prefix} names several runs: {', '.join(found)}")
    return prefix if prefix in found else found[0]


def read(data: Path, run: str) -> list[EpochReport]:
    """Return the reports of the run with this name, oldest first.

    Lines that a full disk has cut are left out.

    Raises:
        PacelineError: the file cannot be read, or no line of it is a report.
    """
    path = data / FOLDER / f"{run}{_SUFFIX}"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise PacelineError(f"{path} cannot be read: {error}") from error
    reports = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            reports.append(msgspec.json.decode(line, type=EpochReport))
    if lines and not reports:
        raise PacelineError(f"{path} cannot be read: no line of it is a report of an epoch")
    return reports
