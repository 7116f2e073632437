"""`paceline runs`: lists, shows, compares, exports and labels runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.commands.options import Connection, Json, RunId, Why, Yes, confirm, grouped
from paceline.commands.printing import local_time, money, plain, print_json, print_table, spans

if TYPE_CHECKING:
    from paceline.client import Server
    from paceline.node.client import Client

COLUMNS = ("id", "name", "state", "policy", "nproc", "epoch", "step", "step_s", "waste", "tags")
# Additional column, shown if runs have a cost.
_COST = "cost"
_WATCH_S = 2.0
_PROPERTIES = (
    *("id", "name", "state", "policy", "version", "backend", "node", "device", "script"),
    *("world", "global_batch", "epoch", "step", "tags", "note", "message", "notice"),
)

# Columns of the table of a run's devices, in which ranks with equal devices share a row.
_DEVICES = ("ranks", "device", "cores", "threads", "memory", "trial")
_DATES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"]


@dataclass(frozen=True, kw_only=True)
class RunListOptions:
    """Filter and order of the listed runs, and their maximum number."""

    state: Annotated[
        list[str] | None,
        typer.Option(help="List only runs in this state, such as running; repeatable."),
    ] = None
    policy: Annotated[
        str | None, typer.Option(help="List only runs whose current policy is this one.")
    ] = None
    used: Annotated[
        str | None, typer.Option(help="List only runs that have used this policy at any time.")
    ] = None
    param: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="List only runs whose policy has this parameter value; repeatable.",
        ),
    ] = None
    text: Annotated[
        str | None,
        typer.Option(
            help="List only runs with this text in their name, script, note, policy, device, tags "
            "or node."
        ),
    ] = None
    node: Annotated[str | None, typer.Option(help="List only runs on this node.")] = None
    device: Annotated[
        str | None,
        typer.Option(help="List only runs on a device whose name contains this text."),
    ] = None
    tag: Annotated[
        list[str] | None,
        typer.Option(help="List only runs with this tag; repeatable."),
    ] = None
    since: Annotated[
        datetime | None,
        typer.Option(formats=_DATES, help="List only runs created at this time or later."),
    ] = None
    until: Annotated[
        datetime | None,
        typer.Option(formats=_DATES, help="List only runs created before this time."),
    ] = None
    waste_min: Annotated[
        float | None,
        typer.Option(
            help="List only runs with at least this mean waste, such as 0.2. Waste is the fraction "
            "of the ranks' time in which they wait for the slowest rank."
        ),
    ] = None
    se_min: Annotated[
        float | None,
        typer.Option(
            help="List only runs with at least this mean straggler effect (SE), such as 0.2. SE is "
            "the difference between the ranks' longest and shortest compute time of a step, "
            "divided by the ranks' mean compute time."
        ),
    ] = None
    step_s_min: Annotated[
        float | None,
        typer.Option(help="List only runs whose steps take at least this many seconds on average."),
    ] = None
    sort: Annotated[
        str,
        typer.Option(
            help="Column to sort by, such as `name`. With a minus, as in `-cost`, the largest "
            "value comes first."
        ),
    ] = "-created_at"
    limit: Annotated[int, typer.Option(min=1, max=500, help="Maximum number of runs to list.")] = 20

    def parameters(self) -> dict[str, Any]:
        """Return these options as query parameters of ``GET /runs``."""
        asked = vars(self) | {
            "parameter": self.param,
            "since": _at(self.since),
            "until": _at(self.until),
        }
        del asked["param"]
        return {name: value for name, value in asked.items() if value not in (None, [])}


def register(app: typer.Typer) -> None:
    """Add the group to the command line; without a subcommand it lists runs."""
    group = typer.Typer(help="List, show, compare, export and label runs.")
    group.callback(invoke_without_command=True)(runs)
    for command in (show, compare, export, tag, untag, note):
        group.command(command.__name__)(command)
    app.add_typer(group, name="runs")


@grouped
def runs(
    *,
    context: typer.Context,
    query: RunListOptions,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh the list every two seconds, until Ctrl-C.")
    ] = False,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """List runs, by default the newest first.

    The subcommands show, compare, export and label runs.
    """
    if context.invoked_subcommand is not None:
        return
    parameters = query.parameters()
    with connection.client() as client:
        _print(client.call("GET", "/runs", params=parameters), as_json)
        problem = ""
        while watch:
            time.sleep(_WATCH_S)
            problem = _redraw(client, parameters, as_json, problem)


def _redraw(client: Client, query: Mapping[str, Any], as_json: bool, problem: str) -> str:
    """List runs in place of the previous list; keep that list if the server does not answer.

    Return the reason if the server does not answer, else an empty text. `problem` is the text that
    the previous call returned; a problem is not printed twice in a row.
    """
    from rich.console import Console

    from paceline.node.client import ServerUnreachable

    try:
        page = client.call("GET", "/runs", params=query)
    except ServerUnreachable as error:
        if str(error) != problem:
            typer.echo(f"paceline: {error}", err=True)
        return str(error)
    if not as_json:
        # Without a terminal, `clear` does nothing.
        Console().clear()
    _print(page, as_json)
    return ""


def _print(page: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(page)
    else:
        rows = [_row(run) for run in page["items"]]
        priced = any(row[_COST] for row in rows)
        print_table((*COLUMNS, _COST) if priced else COLUMNS, rows)


@grouped
def show(
    run_id: RunId,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Show a run's properties, measurements, policies and devices, and which ranks slow it down."""
    with _server(connection) as server:
        run = server.run(run_id)
        about, verdict, devices = run.about, run.verdict(), run.devices()["ranks"]
        switches = server.client.call("GET", f"/runs/{run.id}/switches")
    if as_json:
        print_json({"run": about, "switches": switches, "verdict": verdict, "devices": devices})
        return
    for name in _PROPERTIES:
        value = ", ".join(about[name]) if name == "tags" else about[name]
        if value not in (None, ""):
            typer.echo(f"{name:13} {plain(str(value).partition(chr(10))[0])}")
    for name in ("created_at", "started_at", "ended_at"):
        if about[name] is not None:
            typer.echo(f"{name:13} {local_time(about[name])}")
    for name, value in (about["figures"] or {}).items():
        typer.echo(f"{name:13} {_figure(name, value)}")
    if cost := about["cost"]:
        waited = money(cost["waited"], cost["currency"])
        typer.echo(f"{'cost':13} {_money(cost)}, {waited} of it for waiting")
    typer.echo(f"{'verdict':13} {plain(verdict['words'])}")
    columns = ("version", "policy", "parameters", "requested_by", "effective_step")
    print_table(columns, [{**each, "parameters": each["parameters"] or None} for each in switches])
    if rows := _device_rows(devices):
        print_table(_DEVICES, rows)


@grouped
def compare(
    sides: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN[:FIRST-LAST|@VERSION]...",
            help="Two to six items to compare. An item is a whole run, a range of its steps "
            "(RUN:FIRST-LAST), or its steps under a policy version (RUN@VERSION), which is the "
            "number of policy switches before these steps.",
        ),
    ],
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Compare runs, or parts of runs, with the first of them.

    Differences from the first one are shown with their 95 % confidence intervals.
    """
    with _server(connection) as server:
        answer = server.compare(*sides)
    if as_json:
        print_json(answer)
        return
    letters = "ABCDEF"
    for letter, side in zip(letters, answer["sides"], strict=False):
        span = "no steps" if side["from"] is None else f"steps {side['from']:,} to {side['to']:,}"
        typer.echo(f"{letter}  {side['run']}  {plain(side['name'])}, {side['policy']}, {span}")
    names = ["figure", *letters[: len(answer["sides"])]]
    names += [f"{letter} − A" for letter in letters[1 : len(answer["sides"])]]
    print_table(names, [_compared(names, row) for row in answer["differences"]])
    typer.echo("\n".join(answer["words"]))


@grouped
def export(
    *,
    run_id: RunId,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="File to write. Its extension chooses the format: .csv, .ndjson or .parquet.",
        ),
    ],
    table: Annotated[
        Literal["steps", "worker-steps", "rounds", "segments", "switches"],
        typer.Option(help="Table of the run that is written to the file."),
    ] = "steps",
    connection: Connection,
) -> None:
    """Write all rows of a run's table to a file."""
    from paceline.client.server import form_of

    form = form_of(output)
    with _server(connection) as server:
        path = server.run(run_id).export(output, table, form)
    typer.echo(f"{path} has {path.stat().st_size:,} bytes")


@grouped
def tag(
    *,
    run_id: RunId,
    words: Annotated[
        list[str],
        typer.Argument(metavar="TAG...", help="Tags to add to the run; a tag is a short word."),
    ],
    yes: Yes = False,
    connection: Connection,
) -> None:
    """Add tags to a run."""
    with _server(connection) as server:
        run = server.run(run_id)
        confirm(f"Add {', '.join(words)} to the tags of run {run.id}?", yes)
        for word in words:
            run.tag(word)
        typer.echo(f"run {run.id} has the tags {', '.join(run.about['tags'])}")


@grouped
def untag(
    *,
    run_id: RunId,
    words: Annotated[
        list[str], typer.Argument(metavar="TAG...", help="Tags to remove from the run.")
    ],
    yes: Yes = False,
    connection: Connection,
) -> None:
    """Remove tags from a run."""
    with _server(connection) as server:
        run = server.run(run_id)
        confirm(f"Remove {', '.join(words)} from the tags of run {run.id}?", yes)
        for word in words:
            run.untag(word)
        typer.echo(f"run {run.id} has the tags {', '.join(run.about['tags']) or '(none)'}")


@grouped
def note(
    *,
    run_id: RunId,
    text: Annotated[
        str, typer.Argument(help="New note of the run; an empty text removes the note.")
    ],
    why: Why = "",
    yes: Yes = False,
    connection: Connection,
) -> None:
    """Replace a run's note."""
    with connection.client() as client:
        run_id = client.run(run_id)
        seen = client.revision(run_id)
        confirm(f"Replace the note of run {run_id}?", yes)
        body = {"note": text, "by": "cli", "why": why}
        client.change("PUT", run_id, "note", body, revision=seen)
    typer.echo(f"run {run_id} has {'a' if text else 'no'} note")


def _server(connection: Connection) -> Server:
    from paceline.client import Server

    return Server(connection.client())


def _at(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _row(run: dict[str, Any]) -> dict[str, Any]:
    figures = run["figures"] or {}
    shown = {name: _figure(name, figures.get(name)) for name in ("step_s", "waste")}
    cost = run["cost"] and _money(run["cost"])
    return {**run, **shown, "tags": ", ".join(run["tags"]), _COST: cost}


def _money(cost: dict[str, Any]) -> str:
    return money(cost["amount"], cost["currency"])


def _figure(name: str, value: float | None) -> str | None:
    if value is None:
        return None
    if name == "waste":
        return f"{100 * value:.1f} %"
    return f"{value:,}" if name == "steps" else f"{value:.4g}{' s' if name.endswith('_s') else ''}"


def _compared(names: list[str], row: dict[str, Any]) -> dict[str, Any]:
    form = "{:.1%}" if row["unit"] == "share" else "{:.4g}"
    if row["figure"] in ("cost", "waited_cost"):
        form = f"{{:,.2f}} {row['unit']}"
    values = [None if value is None else form.format(value) for value in row["values"]]
    changes: list[str | None] = []
    for change in row["changes"]:
        if change is None:
            changes.append(None)
            continue
        # A change has no confidence interval if each side of the comparison has one measurement.
        if change["low"] is None:
            changes.append(form.format(change["value"]))
            continue
        low, high = form.format(change["low"]), form.format(change["high"])
        words = "" if change["known"] else ", no clear difference"
        changes.append(f"{form.format(change['value'])} ({low} to {high}{words})")
    return dict(zip(names, [_figure_of(row), *values, *changes], strict=True))


def _figure_of(row: dict[str, Any]) -> str:
    if row["metric"]:
        return f"{row['metric']}, {row['figure']}"
    if target := row["target"]:
        return f"{row['figure']}, {target['metric']}{target['direction']}{target['value']:g}"
    return str(row["figure"])


def _device_rows(ranks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the table of the ranks' devices, with the columns `_DEVICES`.

    `ranks` is the answer of ``GET /runs/{id}/devices``, whose ranks are in ascending order.
    """
    numbers: dict[tuple[Any, ...], list[int]] = {}
    for each in ranks:
        if device := each["device"]:
            numbers.setdefault(tuple(_device_row(device).items()), []).append(each["rank"])
    return [{"ranks": spans(of), **dict(row)} for row, of in numbers.items()]


def _device_row(device: Mapping[str, Any]) -> dict[str, Any]:
    flops = device["flops"]
    return {
        "device": device["name"] + (" (emulated)" if device["emulated"] else ""),
        "cores": device["cores"],
        "threads": device["threads"] or device["cores"],
        "memory": f"{device['memory_bytes'] / 2**30:.1f} GiB",
        "trial": None if flops is None else f"{flops / 1e9:,.4g} GFLOP/s",
    }
