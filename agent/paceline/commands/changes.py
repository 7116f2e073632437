"""`paceline audit` and `paceline auto`: who changed what, and what `auto` may change."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from paceline.commands.options import (
    Json,
    RunId,
    Server,
    Token,
    TokenFile,
    Why,
    connected,
    reason,
)
from paceline.commands.printing import local_time, print_json, print_table

COLUMNS = ("at", "who", "action", "run", "revision", "what", "why", "via", "address")


def register(app: typer.Typer) -> None:
    """Adds both commands to the command line."""
    app.command("audit")(audit)
    app.command("auto")(auto)


def audit(
    run_id: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="Only changes of this run: its id, or the beginning of one."
        ),
    ] = None,
    who: Annotated[str | None, typer.Option(help="Only what this token's holder changed.")] = None,
    action: Annotated[
        str | None, typer.Option(help="Only changes of this kind, such as run.policy.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 20,
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Lists the newest changes: who asked for them, when, from where, and why."""
    with connected(server, token, token_file) as client:
        run = None if run_id is None else client.run(run_id)
        query = {"run": run, "who": who, "action": action, "limit": limit}
        given = {name: value for name, value in query.items() if value is not None}
        page = client.call("GET", "/audit", params=given)
    if as_json:
        print_json(page)
    else:
        print_table(COLUMNS, [_row(change) for change in page["items"]])


def auto(
    run_id: RunId,
    mode: Annotated[
        Literal["off", "recommend", "switch"] | None,
        typer.Argument(help="What it may do from now on; without it, nothing is changed."),
    ] = None,
    relaxed: Annotated[
        bool | None,
        typer.Option(
            "--relaxed/--no-relaxed",
            help="It may choose presets that change the training, too.",
            show_default="as it was",
        ),
    ] = None,
    why: Why = "",
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Says what `auto` may do with a run's policy, or changes that."""
    with connected(server, token, token_file) as client:
        run = client.run(run_id)
        if mode is None:
            answer = client.call("GET", f"/runs/{run}/auto")
        else:
            body = {"mode": mode, "relaxed": relaxed, "by": "cli", **reason(why)}
            answer = client.change("PUT", run, "auto", body)
    if as_json:
        print_json(answer)
    else:
        words = ", relaxed presets too" if answer["relaxed"] else ""
        typer.echo(f"run {run}: auto is {answer['mode']}{words}")


def _row(change: dict[str, Any]) -> dict[str, Any]:
    details = change["details"]
    what = details.get("policy") or details.get("mode") or change["target"]
    return {**change, "at": local_time(change["at"]), "what": what}
