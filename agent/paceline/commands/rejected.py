"""`paceline rejected`: messages that the control plane could not store."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from paceline.commands.options import Connection, Json, grouped
from paceline.commands.printing import local_time, plain, print_json
from paceline.core.errors import InputError

_NUMBER = re.compile(r"[0-9]{1,15}-[0-9]{1,15}")

rejected = typer.Typer(
    help="List and delete messages that the control plane could not store.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(rejected, name="rejected")


@rejected.command("list")
@grouped
def listed(
    *,
    limit: Annotated[
        int, typer.Option(min=1, max=500, help="Maximum number of messages to list.")
    ] = 20,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """List the newest messages that the control plane could not store, and why it could not."""
    with connection.client() as client:
        page = client.call("GET", "/rejected", params={"limit": limit})
    if as_json:
        print_json(page)
        return
    for message in page["items"]:
        typer.echo(_line(message))
    typer.echo(f"{page['kept']} kept, {page['ever']} rejected in total")


@rejected.command()
@grouped
def drop(
    entry: Annotated[
        str,
        typer.Argument(
            metavar="ENTRY", help="Number of a message, as `paceline rejected list` prints it."
        ),
    ],
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Delete a message that the control plane could not store."""
    if not _NUMBER.fullmatch(entry):
        raise InputError(f"ENTRY {entry!a}: give a number that `paceline rejected list` prints")
    with connection.client() as client:
        message = client.call("DELETE", f"/rejected/{entry}")
    if as_json:
        print_json(message)
    else:
        typer.echo(f"{entry} is dropped")


def _line(message: dict[str, Any]) -> str:
    run, kind = message["run"] or "-", message["kind"] or "unreadable"
    at, tries = local_time(message["rejected_at"]), message["tries"]
    return plain(f"{message['entry']}  {at}  {run}  {kind}  {tries}x  {message['reason']}")
