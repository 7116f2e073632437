"""Examination of a training script for `paceline doctor`, by running its first steps.

The ranks run the file `paceline/train/doctor/inside.py`, which runs the script, observes and ends
it, and writes an `Examined` into a folder. There is no control plane, and the files that Paceline
itself writes are deleted.
"""

from __future__ import annotations

import re
import secrets
import tempfile
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from paceline.core.terms import PLAIN
from paceline.node import rundir
from paceline.node.rundir import Record
from paceline.node.supervisor import Supervisor, check
from paceline.wire import Launch

_INSIDE = Path(__file__).parents[2] / "train" / "doctor" / "inside.py"
_TICK_S = 0.05
# Maximum number of seconds for the processes to end after all ranks have reported.
_PROCESSES_END_S = 15.0
_LOG_LINES = 12


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    # Information; the script trains correctly.
    NOTE = "note"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """A finding about a script, in plain sentences."""

    # The subject of the check, such as "sizes".
    check: str
    level: Level
    says: str
    # What the user should do; empty: nothing.
    do: str = ""
    figures: dict[str, float] = {}


class Examined(msgspec.Struct, frozen=True):
    """The findings on one rank."""

    rank: int
    # Number of steps that the rank completed.
    steps: int
    findings: list[Finding]
    # The error that ended the script; None: no error ended it.
    failure: Finding | None = None
    failed_at: float = 0.0  # Unix time
    # True if the model draws random numbers in its forward pass.
    draws: bool = False
    # Text that identifies the state of the random number generators in the first step. It is equal
    # on ranks whose generators had the same state.
    random: str = ""


def examine(launch: Launch, steps: int, timeout_s: float) -> list[Finding]:
    """Run a script's first steps; return the findings on all ranks.

    After `timeout_s` seconds the ranks are killed. Raise an InputError if the script cannot
    be launched.
    """
    check(launch)
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
        reports = Path(folder) / "reports"
        reports.mkdir()
        inside = msgspec.structs.replace(
            launch,
            script=str(_INSIDE),
            args=[str(reports), str(steps), launch.script, *launch.args],
            # A planning process would compete with the ranks.
            env={**launch.env, "PACELINE_POLICY": PLAIN},
        )
        record = Record(f"doctor-{secrets.token_hex(4)}", "here", "paceline doctor", "")
        supervisor = Supervisor(inside, rundir.open_data(Path(folder) / "data"), record, None)
        try:
            supervisor.start()
            late = _wait(supervisor, reports, launch.nproc, timeout_s)
        finally:
            supervisor.close()
        examined = _read(reports, launch.nproc)
        missing = set(range(launch.nproc)) - {rank.rank for rank in examined}
        if missing and late:
            return [*merged(examined), _late(steps, timeout_s)]
        message = supervisor.last.message if supervisor.last is not None else None
        if missing and _named(message or "") in {None, *missing}:
            calm = [msgspec.structs.replace(rank, failure=None) for rank in examined]
            return [*merged(calm), _died(message or "")]
        return merged(examined)


def merged(examined: Sequence[Examined]) -> list[Finding]:
    """Return the findings on the first rank, and problems that were found only on other ranks.

    If several ranks failed, return only the earliest failure, because it usually causes the others.
    """
    if not examined:
        return []
    findings = list(examined[0].findings)
    known = {(finding.check, finding.level) for finding in findings}
    for rank in examined[1:]:
        for finding in rank.findings:
            if finding.level is Level.PROBLEM and (finding.check, finding.level) not in known:
                says = f"On rank {rank.rank}: {finding.says}"
                findings.append(msgspec.structs.replace(finding, says=says))
    failed = [rank for rank in examined if rank.failure is not None]
    if failed:
        first = min(failed, key=lambda rank: rank.failed_at)
        assert first.failure is not None
        everywhere = all(rank.failure == first.failure for rank in examined)
        says = first.failure.says if everywhere else f"On rank {first.rank}: {first.failure.says}"
        findings.append(msgspec.structs.replace(first.failure, says=says))
    return [*findings, *_alike(examined)]


def _alike(examined: Sequence[Examined]) -> list[Finding]:
    states = {rank.random for rank in examined}
    if len(examined) == 1 or len(states) > 1 or not all(rank.draws for rank in examined):
        return []
    return [
        Finding(
            "random numbers",
            Level.NOTE,
            "All ranks draw the same random numbers in the model's forward pass, because the "
            "script gives them the same seed: dropout drops the same positions on each rank.",
            "After creating the model, seed each rank differently: "
            "torch.manual_seed(seed + session.rank).",
        )
    ]


def _wait(supervisor: Supervisor, reports: Path, nproc: int, timeout_s: float) -> bool:
    """Wait at most `timeout_s` seconds for the end of the ranks; return True if they still run.

    Once all ranks have reported, wait at most `_PROCESSES_END_S` from then.
    """
    deadline, all_reported = time.monotonic() + timeout_s, False
    while supervisor.running:
        supervisor.poll()
        if not all_reported and len(_read(reports, nproc)) == nproc:
            deadline, all_reported = time.monotonic() + _PROCESSES_END_S, True
        if time.monotonic() > deadline:
            return True
        time.sleep(_TICK_S)
    return False


def _read(reports: Path, nproc: int) -> list[Examined]:
    read = (rundir.read(path_of(reports, rank), Examined) for rank in range(nproc))
    return [examined for examined in read if examined is not None]


def path_of(reports: Path, rank: int) -> Path:
    """Return the path of the file into which a rank writes its findings."""
    return reports / f"{rank}.json"


def _late(steps: int, timeout_s: float) -> Finding:
    return Finding(
        "steps",
        Level.PROBLEM,
        f"Not all ranks made {steps} steps within {timeout_s:g} s.",
        "Raise --timeout if the script takes long to start; otherwise find out where it hangs.",
    )


def _named(message: str) -> int | None:
    named = re.match(r"rank (\d+) ", message)
    return None if named is None else int(named[1])


def _died(message: str) -> Finding:
    first, _, rest = message.partition("\n")
    lines = "\n".join(rest.splitlines()[-_LOG_LINES:])
    # The path of the log is left out, because the log is deleted.
    what = first.partition("; log: ")[0]
    says = (
        f"A rank ended without an error message: {what}"
        if what
        else "A rank ended without an error message."
    )
    return Finding(
        "script",
        Level.PROBLEM,
        f"{says}\n{lines}".rstrip("\n"),
        "Run the script with torchrun first. SIGKILL can also mean that memory ran out.",
    )
