"""`paceline doctor`: checks a training script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.commands.options import Env, Json, grouped
from paceline.commands.printing import plain, print_json

if TYPE_CHECKING:
    from paceline.node.starting.examining import Finding


@dataclass(frozen=True, kw_only=True)
class DoctorTrial:
    """Size and time limit of the training that is checked."""

    nproc: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 2
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to run.")] = 2
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Time limit of the check.")
    ] = 600.0


@grouped
def doctor(
    *,
    script: Annotated[str, typer.Argument(help="Python script to check.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    trial: DoctorTrial,
    env: Env = None,
    as_json: Json = False,
) -> None:
    """Check a script by running its first steps. Options come before the script.

    Nothing is reported to a server, and session.checkpoint saves to a folder that is deleted. Files
    that the script saves itself are not deleted: give it another folder. Exit code 1: the check
    found problems.
    """
    from paceline.node.starting.examining import Level, examine
    from paceline.node.starting.foreground import say
    from paceline.node.starting.resume import variables
    from paceline.wire import Launch

    steps, nproc = trial.steps, trial.nproc
    launch = Launch(script, args or [], nproc, variables(env or []), str(Path.cwd()))
    say(f"{script}: {_count(steps, 'step')} on {_count(nproc, 'rank')}")
    findings = examine(launch, steps, trial.timeout)
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    if as_json:
        listed = [_document(finding) for finding in findings]
        print_json({"script": script, "ranks": nproc, "problems": problems, "findings": listed})
    else:
        for finding in findings:
            typer.echo(_lines(finding))
        typer.echo(f"{_count(problems, 'problem')} found")
    raise typer.Exit(1 if problems else 0)


def _document(finding: Finding) -> dict[str, object]:
    return {
        "check": finding.check,
        "level": finding.level.value,
        "says": finding.says,
        "do": finding.do,
        "figures": finding.figures,
    }


def _lines(finding: Finding) -> str:
    first, *more = finding.says.split("\n")
    lines = [
        f"{finding.level.value:8} {finding.check}: {first}",
        *(f"{'':9}{line}" for line in more),
    ]
    if finding.do:
        lines.append(f"{'':9}→ {finding.do}")
    return "\n".join(map(plain, lines))


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
