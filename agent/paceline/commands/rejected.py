"""`paceline rejected`: messages that the control plane could not store."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from paceline.commands.options import Json, Server, Token, TokenFile, connected
from paceline.commands.printing import local_time, plain, print_json
from paceline.core.errors import InputError

_NUMBER = re.compile(r"[0-9]{1,15}-[0-9]{1,15}")

rejected = typer.Typer(
    help="Lists and drops messages that the control plane could not store.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(rejected, name="rejected")


@rejected.command("list")
def listed(
    limit: Annotated[int, typer.Option(min=1, max=500)] = 20,
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """List the newest messages that could not be stored, with their reasons."""
    with connected(server, token, token_file) as client:
        page = client.call("GET", "/rejected", params={"limit": limit})
    if as_json:
        print_json(page)
        return
    for message in page["items"]:
        typer.echo(_line(message))
    typer.echo(f"{page['kept']} kept, {page['ever']} ever")


@rejected.command()
def drop(
    entry: Annotated[
        str,
        typer.Argument(
            metavar="ENTRY", help="Number of a message, as `paceline rejected list` has it."
        ),
    ],
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Drop a message from the list."""
    if not _NUMBER.fullmatch(entry):
        raise InputError(f"ENTRY {entry!a}: give a number that `paceline rejected list` prints")
    with connected(server, token, token_file) as client:
        message = client.call("DELETE", f"/rejected/{entry}")
    if as_json:
        print_json(message)
    else:
        typer.echo(f"{entry} is dropped")


def _line(message: dict[str, Any]) -> str:
    run, kind = message["run"] or "-", message["kind"] or "unreadable"
    at, tries = local_time(message["rejected_at"]), message["tries"]
    return plain(f"{message['entry']}  {at}  {run}  {kind}  {tries}x  {message['reason']}")
