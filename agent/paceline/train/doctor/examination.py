"""Runs a script in this rank for a few steps and writes the findings to a file."""

from __future__ import annotations

import builtins
import contextlib
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, ModuleType
from typing import NoReturn

import msgspec
import torch.distributed as dist

from paceline.core.errors import PacelineError
from paceline.node import rundir
from paceline.node.starting.examining import Examined, Finding, Level, path_of
from paceline.train.doctor import checks, drawing
from paceline.train.doctor.watching import ScriptRecord, watch
from paceline.train.stacks import is_users

_PACKAGE = str(Path(__file__).parents[2])
_Check = Callable[[ScriptRecord], Iterable[Finding]]
_CHECKS: list[tuple[str, _Check]] = [
    ("session", checks.sessions),
    ("loader", checks.loader),
    ("model", checks.models),
    ("optimizer", checks.optimiser),
    ("sizes", checks.sizes),
    ("sizes", checks.fitting),
    ("loss", checks.loss),
    ("random numbers", drawing.model),
    ("random numbers", drawing.samples),
    ("batchnorm", checks.batchnorm),
    ("precision", checks.precision),
    ("checkpoint", checks.checkpoint),
    ("warning", checks.warnings),
]
# Checks that run on rank 0 only: only rank 0 has the sizes, and it is enough to load samples there.
_OF_RANK_0 = {checks.sizes, checks.fitting, drawing.samples}


class EnoughError(SystemExit):
    """Exit of the script after its examined steps."""


class _AskedToEndError(SystemExit):
    """Exit of the script because another rank has failed."""


class Examination:
    """One rank's examination of a script's first `steps` steps; writes its findings to a folder."""

    def __init__(self, folder: Path, steps: int, rank: int) -> None:
        self._folder, self._steps, self._rank = folder, steps, rank
        self._seen = ScriptRecord()
        self._concluded = self._concluding = False

    def run(self, script: str) -> None:
        """Run the script as Python runs it, up to its last examined step.

        If the script fails or exits before that step, raise the script's exception.
        """
        # When another rank has failed, the launcher sends SIGTERM to this rank.
        signal.signal(signal.SIGTERM, self._asked_to_end)
        watch(self._seen, self._folder, self._steps, self._end)
        path = Path(script).absolute()
        main = ModuleType("__main__")
        vars(main).update(__file__=str(path), __builtins__=builtins)
        sys.modules["__main__"] = main
        try:
            code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
            exec(code, vars(main))
        except (EnoughError, _AskedToEndError):
            pass
        except SystemExit as end:
            self._conclude(None if end.code in (None, 0) else _ended(end))
            raise
        except Exception as error:
            if not self._in_trial(error):
                self._conclude(_failure(error))
            raise
        except BaseException as error:
            self._conclude(_failure(error))
            raise
        finally:
            self._conclude(None)
            self._close()

    def _end(self) -> NoReturn:
        self._conclude(None)
        raise EnoughError(0)

    def _in_trial(self, error: Exception) -> bool:
        """Return whether the script failed in a `Rehearsal`; if so, record the `ProofResult`."""
        known = next((k for k in self._seen.sessions if k.rehearsal is not None), None)
        if known is None or known.rehearsal is None:
            return False
        known.answer = known.rehearsal.failed(error, _place(error))
        return True

    def _asked_to_end(self, number: int, _frame: FrameType | None) -> None:
        if not self._concluding:
            raise _AskedToEndError(128 + number)

    def _conclude(self, failure: Finding | None) -> None:
        if self._concluded:
            return
        self._concluded = self._concluding = True
        failed_at, self._seen.failed = time.time(), failure is not None
        findings = [
            finding for name, check in _CHECKS for finding in self._findings_of(name, check)
        ]
        calls = [calls for session in self._seen.sessions for calls in session.calls]
        steps = max((session.steps for session in self._seen.sessions), default=0)
        if failure is None and 0 < steps < self._steps:
            findings.append(_short(steps, self._steps))
        examined = Examined(
            self._rank,
            steps,
            findings,
            failure,
            failed_at,
            any(each.draws for each in calls),
            next((each.random for each in calls), ""),
        )
        rundir.write(path_of(self._folder, self._rank), examined)
        self._concluding = False

    def _findings_of(self, name: str, check: _Check) -> list[Finding]:
        if self._rank and check in _OF_RANK_0:
            return []
        try:
            return [_finite(finding) for finding in check(self._seen)]
        # A check calls the script's own code, which may raise anything.
        except Exception as error:
            says = f"This check failed: {type(error).__name__}: {error}"
            return [Finding(name, Level.NOTE, says)]

    def _close(self) -> None:
        for seen in self._seen.sessions:
            if seen.session is not None:
                seen.session.close()
        if dist.is_available() and dist.is_initialized():
            # Other ranks may have ended already.
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group()


def _finite(finding: Finding) -> Finding:
    """Drop a finding's numbers that are infinite or NaN, which JSON cannot represent."""
    figures = {name: value for name, value in finding.figures.items() if math.isfinite(value)}
    return msgspec.structs.replace(finding, figures=figures)


def _failure(error: BaseException) -> Finding:
    frames = traceback.extract_tb(error.__traceback__)
    refused = isinstance(error, PacelineError) or (
        isinstance(error, ValueError | TypeError) and frames[-1].filename.startswith(_PACKAGE)
    )
    at = _place(error)
    if refused:
        return Finding("refused", Level.PROBLEM, f"{at}: {error}")
    return Finding(
        "script",
        Level.PROBLEM,
        f"{at}: the script failed with {type(error).__name__}: {error}",
        "First make the script run under plain Python, or with torchrun.",
    )


def _place(error: BaseException) -> str:
    """Return the innermost line of the user's own code, as ``file:line``."""
    place = "the script"
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if is_users(name):
            place = f"{Path(name).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _ended(end: SystemExit) -> Finding:
    says = f"{_place(end)}: the script exited with {end.code!r}."
    return Finding("script", Level.PROBLEM, says, "Give the script the arguments that it needs.")


def _short(made: int, wanted: int) -> Finding:
    says = f"The script ended after {made} of {wanted} steps."
    return Finding("steps", Level.NOTE, says)
