"""`paceline token create|list|revoke`, and `paceline open`."""

from __future__ import annotations

import getpass
import re
from typing import Annotated, Any, Literal

import typer

from paceline.commands.options import Json, Server, Token, TokenFile, connected
from paceline.commands.printing import local_time, plain, print_json, print_table
from paceline.core.errors import InputError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_COLUMNS = (
    "id",
    "name",
    "kind",
    "scope",
    "node",
    "created_by",
    "expires_at",
    "used_at",
    "revoked_at",
)

app = typer.Typer(help="Create, list and revoke tokens of a server.", no_args_is_help=True)


def register(parent: typer.Typer) -> None:
    """Add `token` and `open` to the command line."""
    parent.add_typer(app, name="token")
    parent.command("open")(open_link)


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of the token.")],
    scope: Annotated[
        Literal["viewer", "operator", "agent", "admin"],
        typer.Option(help="Role of the token; see docs/deploying.md."),
    ],
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="30d", help="Lifetime in seconds, or with m, h or d; default: unlimited."
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(help="For an agent token: the only node that may use it; default: all."),
    ] = None,
    server: Server = None,
    database: Annotated[
        str | None,
        typer.Option(
            help="SQLAlchemy URL of a server's database: create the token there, without a server "
            "and without another token.",
        ),
    ] = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Create a token and print it. It is shown only this once."""
    body = {"name": name, "scope": scope, "expires_s": _seconds(expires), "node": node}
    if database is not None:
        made = _made_in(database, body)
    else:
        with connected(server, token, token_file) as client:
            made = client.call("POST", "/tokens", body)
    if as_json:
        print_json(made)
    else:
        typer.echo(made["token"])


@app.command("list")
def list_tokens(
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """List tokens, and the browsers that are logged in."""
    with connected(server, token, token_file) as client:
        rows = client.call("GET", "/tokens")
    if as_json:
        print_json(rows)
    else:
        print_table(_COLUMNS, [_readable(row) for row in rows])


@app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="ID from `paceline token list`.")],
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Revoke a token and log out the browsers that used it."""
    if not re.fullmatch(r"[0-9a-f]{1,64}", token_id):
        raise InputError(f"{token_id} is not a token ID: `paceline token list` shows the IDs")
    with connected(server, token, token_file) as client:
        revoked = client.call("DELETE", f"/tokens/{token_id}")
    if as_json:
        print_json(revoked)
    else:
        typer.echo(f"the token {plain(revoked['name'])} is revoked")


def open_link(
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Print a link that logs one browser in, within ten minutes."""
    with connected(server, token, token_file) as client:
        link = client.call("POST", "/login-links")
        url = client.server + link["path"]
    if as_json:
        print_json({"url": url, "expires_at": link["expires_at"]})
    else:
        typer.echo(url)


def _made_in(database: str, body: dict[str, Any]) -> dict[str, Any]:
    """Create a token in a database. Write access to the database is the only right needed."""
    from pydantic import ValidationError

    from paceline_backend.api.tokens import TokenCreate, issue
    from paceline_backend.store import Store
    from paceline_backend.store.access import tokens
    from paceline_backend.store.audit import Requester

    try:
        new = TokenCreate(**body)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(": ".join([*map(str, first["loc"]), first["msg"]])) from error
    by = Requester(f"database, by {getpass.getuser()}", "admin", via="paceline token")
    with Store.open(database) as store, store.write() as connection:
        made = issue(connection, new, by)
        return {**(tokens.get(connection, made.id) or {}), "token": str(made)}


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})([smhd]?)", text)
    if match is None:
        raise InputError(
            f"--expires {text}: give a number of seconds, or a duration such as 12h or 30d"
        )
    return float(match[1]) * _UNITS_S[match[2] or "s"]


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    def shown(name: str, value: Any) -> Any:
        if not name.endswith("_at") or value is None:
            return value
        return local_time(value)

    return {name: shown(name, value) for name, value in row.items()}
