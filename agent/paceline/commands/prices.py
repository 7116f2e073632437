"""`paceline prices`: what an hour of each type of node costs."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import typer

from paceline.commands.options import (
    Json,
    Server,
    Token,
    TokenFile,
    Why,
    connected,
)
from paceline.commands.printing import local_time, plain, print_json, print_table
from paceline.core.errors import InputError

COLUMNS = ("type", "since", "price", "set_by")
_MOMENTS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"]

Type = Annotated[
    str, typer.Argument(metavar="TYPE", help="Of the nodes, as `paceline nodes` has it.")
]
Since = Annotated[
    datetime | None,
    typer.Option("--from", formats=_MOMENTS, help="From then on.", show_default="now"),
]


def register(app: typer.Typer) -> None:
    """Adds the group to the command line; without a further command it lists."""
    group = typer.Typer(help="Lists and sets what an hour of each type of node costs.")
    group.callback(invoke_without_command=True)(_prices)
    group.command("set")(set_price)
    group.command("delete")(delete_price)
    app.add_typer(group, name="prices")


def _prices(
    context: typer.Context,
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Lists what an hour of each type of node costs, and since when; or sets it."""
    if context.invoked_subcommand is None:
        with connected(server, token, token_file) as client:
            _show(client.call("GET", "/prices"), as_json)


def set_price(
    node_type: Type,
    price: Annotated[str, typer.Argument(metavar="'32.77 USD'", help="An amount and a currency.")],
    since: Since = None,
    per: Annotated[
        Literal["node", "worker"],
        typer.Option(help="Whose hour: the whole machine's, or each rank's."),
    ] = "node",
    why: Why = "",
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Says what an hour of a type of node costs, from a moment until its next price."""
    amount, _, currency = price.strip().partition(" ")
    try:
        body: dict[str, Any] = {"amount": float(amount), "currency": currency.strip()}
    except ValueError:
        message = f"price {price!r}: give an amount and a currency, as '32.77 USD'"
        raise InputError(message) from None
    body |= {"type": node_type, "per": per, "by": "cli", "why": why}
    if since is not None:
        body["since"] = since.timestamp()
    with connected(server, token, token_file) as client:
        made = client.call("PUT", "/prices", body)
    if as_json:
        print_json(made)
        return
    typer.echo(f"{plain(made['type'])} costs {_price(made)} from {local_time(made['since'])} on")


def delete_price(
    node_type: Type,
    since: Annotated[
        float | None,
        typer.Option(
            metavar="UNIX_TIME",
            help="Only the price from then on, as `paceline prices --json` has it.",
            show_default="all prices of the type",
        ),
    ] = None,
    why: Why = "",
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Forgets a price: its time costs what the type's price before says, or the default."""
    params: dict[str, Any] = {"type": node_type, "by": "cli", "why": why}
    if since is not None:
        params["since"] = since
    with connected(server, token, token_file) as client:
        _show(client.call("DELETE", "/prices", params=params), as_json)


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    rows = [
        {**row, "since": local_time(row["since"]), "price": _price(row)} for row in answer["prices"]
    ]
    print_table(COLUMNS, rows)
    default = answer["default"]
    if default is not None:
        typer.echo(f"Other nodes cost {_price({**default, 'per': 'worker'})}.")
    if answer["unpriced"]:
        types = ", ".join(map(plain, answer["unpriced"]))
        typer.echo(f"Types of nodes without a price of their own: {types}")
    if answer.get("untyped"):
        untyped = ", ".join(map(plain, answer["untyped"]))
        typer.echo(f"Nodes of unknown type, which only the server's --hour-price prices: {untyped}")


def _price(of: dict[str, Any]) -> str:
    return f"{of['amount']:g} {of['currency']} an hour of a {of['per']}"
