"""`paceline report` and `paceline trace`: write files about a run, for sharing or inspection."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import Connection, Json, RunId, grouped
from paceline.commands.printing import print_json
from paceline.core.errors import InputError, PacelineError

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


def register(app: typer.Typer) -> None:
    """Add both commands to the command line."""
    app.command("report")(report)
    app.command("trace")(trace)


@grouped
def report(
    *,
    run_id: RunId,
    output: _Output = None,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Write a run's report as one HTML file, which a browser can show without the server."""
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
