"""`paceline report` and `paceline trace`: show a run, or write it to a file for others."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import Connection, Data, Json, RunId, grouped
from paceline.commands.printing import print_json, print_table
from paceline.core.errors import InputError, PacelineError

if TYPE_CHECKING:
    from paceline.core.epoch_report import EpochReport

Steps = Annotated[
    str | None,
    typer.Option(
        metavar="FIRST:LAST",
        help="First and last step to write; either may be omitted.",
        show_default="the newest 100",
    ),
]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="File to write; - means standard output.",
        show_default="a name with the run's ID",
    ),
]


_COLUMNS = (
    *("epoch", "policy", "steps", "time", "waiting", "SE"),
    *("estimate with equal batches: time, waiting", "times as fast"),
)
# Maximum number of other runs that `paceline report --local` names.
_OTHERS = 5


def register(app: typer.Typer) -> None:
    """Add both commands to the command line."""
    app.command("report")(report)
    app.command("trace")(trace)


@grouped
def report(
    *,
    context: typer.Context,
    run_id: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="ID of a run, or a unique prefix of its ID. With --local: the name of a run, or a "
            "prefix.",
            show_default="with --local: the newest run",
        ),
    ] = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local",
            help="Print the epochs of a run that trained on this machine without a server.",
        ),
    ] = False,
    output: _Output = None,
    data: Data = None,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Write a run's report as one HTML file, which a browser can show without the server.

    With --local, print what rank 0 kept of a run without a server: for each epoch the time, the
    waiting and the estimated gain, and each rank's speed.
    """
    if local:
        if output is not None:
            raise InputError("--output: leave it out with --local, which prints the report")
        _print_local(run_id or "", data, as_json)
        return
    # PACELINE_DATA may be set for other commands.
    given = context.get_parameter_source("data")
    if given is not None and given.name == "COMMANDLINE":
        raise InputError("--data: leave it out without --local; the report is the server's")
    if run_id is None:
        raise InputError("name a run, or give --local for a run without a server")
    with connection.client() as client:
        run = client.run(run_id)
        if as_json:
            print_json(client.call("GET", f"/runs/{run}/report"))
            return
        path = output or Path(f"paceline-{run}.html")
        _write(path, client.download(f"/runs/{run}/report", {"format": "html"}))
    _say(path, "open it in a browser, or attach it to a ticket")


@grouped
def trace(
    *,
    run_id: RunId,
    steps: Steps = None,
    output: _Output = None,
    connection: Connection,
) -> None:
    """Write a range of a run's steps as a trace for https://ui.perfetto.dev.

    The page reads the trace in the browser, and does not upload it.
    """
    span = range_of(steps)
    with connection.client() as client:
        run = client.run(run_id)
        path = output or Path(f"paceline-{run}.trace.json")
        _write(path, client.download(f"/runs/{run}/trace", span))
    _say(path, "open it with https://ui.perfetto.dev or chrome://tracing")


def range_of(text: str | None) -> dict[str, Any]:
    """Parse a range of steps such as ``100:200``, ``100:`` or ``:200`` into query parameters."""
    if text is None:
        return {}
    match = re.fullmatch(r"(\d{1,18})?:(\d{1,18})?", text)
    if match is None or text == ":" or (match[1] and match[2] and int(match[1]) > int(match[2])):
        raise InputError(f"--steps {text}: give FIRST:LAST, such as 100:200")
    both = {"from": match[1], "to": match[2]}
    return {name: int(step) for name, step in both.items() if step is not None}


def _print_local(run: str, data: Path | None, as_json: bool) -> None:
    from msgspec import to_builtins

    from paceline.core import epoch_report
    from paceline.node import rundir

    folder = (data or rundir.default_data()).expanduser().absolute()
    run = epoch_report.named(folder, run)
    reports = epoch_report.read(folder, run)
    if as_json:
        print_json({"run": run, "epochs": to_builtins(reports)})
        return
    typer.echo(f"run {run}")
    print_table(_COLUMNS, [_row(each) for each in reports])
    if reports:
        last = reports[-1]
        ranks = enumerate(zip(last.shares, last.speeds, strict=True))
        print_table(
            ("rank", "share of the load", "speed, size units per s"),
            [
                {
                    "rank": rank,
                    "share of the load": f"{100 * share:.1f} %",
                    "speed, size units per s": f"{speed:,.0f}" if speed >= 1000 else f"{speed:g}",
                }
                for rank, (share, speed) in ranks
            ],
        )
    others = [name for name in epoch_report.runs(folder) if name != run]
    if others:
        more = f" and {len(others) - _OTHERS} more" if len(others) > _OTHERS else ""
        typer.echo(f"other runs: {', '.join(others[:_OTHERS])}{more}")


def _row(report: EpochReport) -> dict[str, str]:
    from paceline.core.epoch_report import percent, seconds

    equal = report.equal
    estimate = gain = ""
    if equal is not None:
        estimate = f"{seconds(equal.epoch_s)}, {percent(equal.waiting)}"
        gain = f"{equal.epoch_s / report.epoch_s:.2f}"
    cells = (
        *(str(report.epoch), report.policy, str(report.steps), seconds(report.epoch_s)),
        *(percent(report.waiting), f"{report.se:.2f}", estimate, gain),
    )
    return dict(zip(_COLUMNS, cells, strict=True))


def _write(path: Path, parts: Iterable[bytes]) -> None:
    """Write the complete file or none; the path ``-`` means standard output."""
    if str(path) == "-":
        for part in parts:
            sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
        return
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with made.open("wb") as file:
                file.writelines(parts)
            made.replace(path)
        finally:
            with contextlib.suppress(OSError):
                made.unlink(missing_ok=True)
    except OSError as error:
        raise PacelineError(f"{path} cannot be written: {error.strerror or error}") from error


def _say(path: Path, words: str) -> None:
    if str(path) != "-":
        typer.echo(f"wrote {path}: {words}", err=True)
