"""`paceline dead`: messages that the control plane could not store."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import Json, Server, Token, TokenFile, connected
from paceline.commands.printing import local_time, plain
from paceline.core.errors import InputError

_NUMBER = re.compile(r"[0-9]{1,15}-[0-9]{1,15}")

Entry = Annotated[
    str, typer.Argument(metavar="ENTRY", help="Number of a message; `paceline dead list` lists.")
]

dead = typer.Typer(
    help="Messages that the control plane could not store, and what to do about them.",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.add_typer(dead, name="dead")


@dead.command("list")
def listed(
    run_id: Annotated[
        str | None,
        typer.Option("--run", help="Of one run: its id, or a beginning."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 20,
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Lists the newest messages that could not be stored, with their reasons."""
    with connected(server, token, token_file) as client:
        query = {"limit": limit, **({} if run_id is None else {"run": run_id})}
        page = client.call("GET", "/dead", params=query)
        # Messages may be of a run that the server does not know: so the id itself comes first.
        if run_id is not None and not page["items"]:
            page = client.call("GET", "/dead", params={**query, "run": client.run(run_id)})
    if as_json:
        typer.echo(json.dumps(page))
        return
    for letter in page["items"]:
        typer.echo(_line(letter))
    typer.echo(f"{page['kept']} kept, {page['ever']} ever")


@dead.command()
def show(
    entry: Entry,
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Shows all that is known about one message, and what it says."""
    letter = _ask("GET", entry, "", server, token, token_file)
    if as_json:
        typer.echo(json.dumps(letter))
        return
    times = {name: local_time(letter[name]) for name in ("first_at", "last_at")}
    for name, value in {**letter, **times}.items():
        typer.echo(f"{name}: {'-' if value is None else plain(str(value))}")


@dead.command()
def retry(
    entry: Entry,
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Puts a message back where it came from: the control plane tries to store it again."""
    letter = _ask("POST", entry, "/retry", server, token, token_file)
    typer.echo(json.dumps(letter) if as_json else f"{entry} is back on {plain(letter['stream'])}")


@dead.command()
def drop(
    entry: Entry,
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Forgets a message for good."""
    letter = _ask("DELETE", entry, "", server, token, token_file)
    typer.echo(json.dumps(letter) if as_json else f"{entry} is dropped")


def _ask(
    method: str,
    entry: str,
    action: str,
    server: str | None,
    token: str | None,
    token_file: Path | None,
) -> Any:
    if not _NUMBER.fullmatch(entry):
        raise InputError(f"ENTRY {entry!a}: give a number that `paceline dead list` prints")
    with connected(server, token, token_file) as client:
        return client.call(method, f"/dead/{entry}{action}")


def _line(letter: dict[str, Any]) -> str:
    run, kind = letter["run"] or "-", letter["kind"] or "unreadable"
    at, tries = local_time(letter["last_at"]), letter["tries"]
    words = f"{letter['entry']}  {at}  {run}  {kind}  {tries}x  {letter['reason']}"
    return plain(words)
