"""`paceline token create|list|revoke`, and `paceline open`."""

from __future__ import annotations

import getpass
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from paceline.commands.options import Connection, Json, Server, TokenOptions, grouped
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


@dataclass(frozen=True, kw_only=True)
class TokenRequest:
    """The token to create."""

    name: Annotated[str, typer.Argument(help="Name of the token, as the audit log shows it.")]
    scope: Annotated[
        Literal["viewer", "operator", "agent", "admin"],
        typer.Option(help="Role of the token; see docs/deploying.md."),
    ]
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="30d",
            help="Lifetime of the token in seconds, or with the unit m, h or d; default: "
            "unlimited.",
        ),
    ] = None
    node: Annotated[
        str | None,
        typer.Option(
            help="Only node that may use the token, for a token with the scope agent; default: "
            "all nodes."
        ),
    ] = None

    def body(self) -> dict[str, Any]:
        """Return the body of ``POST /tokens``."""
        return {
            "name": self.name,
            "scope": self.scope,
            "expires_s": _seconds(self.expires),
            "node": self.node,
        }


@app.command()
@grouped
def create(
    *,
    request: TokenRequest,
    server: Server = None,
    database: Annotated[
        str | None,
        typer.Option(
            help="SQLAlchemy URL of a server's database, to create the token directly there, "
            "without a running server and without another token.",
        ),
    ] = None,
    authentication: TokenOptions,
    as_json: Json = False,
) -> None:
    """Create a token and print it. No command can print the token again."""
    body = request.body()
    if database is not None:
        made = _made_in(database, body)
    else:
        connection = Connection(server=server, authentication=authentication)
        with connection.client() as client:
            made = client.call("POST", "/tokens", body)
    if as_json:
        print_json(made)
    else:
        typer.echo(made["token"])


@app.command("list")
@grouped
def list_tokens(
    connection: Connection,
    as_json: Json = False,
) -> None:
    """List tokens, and the browsers that are logged in."""
    with connection.client() as client:
        rows = client.call("GET", "/tokens")
    if as_json:
        print_json(rows)
    else:
        print_table(_COLUMNS, [_readable(row) for row in rows])


@app.command()
@grouped
def revoke(
    token_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the token, as in `paceline token list`.")
    ],
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Revoke a token and log out the browsers that used it."""
    if not re.fullmatch(r"[0-9a-f]{1,64}", token_id):
        raise InputError(
            f"ID {token_id}: not the id of a token; `paceline token list` shows the ids"
        )
    with connection.client() as client:
        revoked = client.call("DELETE", f"/tokens/{token_id}")
    if as_json:
        print_json(revoked)
    else:
        typer.echo(f"the token {plain(revoked['name'])} is revoked")


@grouped
def open_link(
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Print a link that logs one browser in, within ten minutes."""
    with connection.client() as client:
        link = client.call("POST", "/login-links")
        url = client.server + link["path"]
    if as_json:
        print_json({"url": url, "expires_at": link["expires_at"]})
    else:
        typer.echo(url)


def _made_in(database: str, body: dict[str, Any]) -> dict[str, Any]:
    """Create a token in a database. The caller needs only write access to the database."""
    from pydantic import ValidationError

    from paceline_backend.api.tokens import TokenCreate, issue
    from paceline_backend.store import Store, tokens
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
            f"--expires {text}: give a number of seconds, or a time such as 12h or 30d"
        )
    return float(match[1]) * _UNITS_S[match[2] or "s"]


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    def shown(name: str, value: Any) -> Any:
        if not name.endswith("_at") or value is None:
            return value
        return local_time(value)

    return {name: shown(name, value) for name, value in row.items()}
