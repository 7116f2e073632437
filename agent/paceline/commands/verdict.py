"""`paceline verdict`: who holds a run up, why, since when, and what it costs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceline.commands.options import Json, RunId, Server, Token, TokenFile, connected
from paceline.commands.printing import plain, print_json

First = Annotated[
    int | None,
    typer.Option("--from", min=0, help="First step.", show_default="500 steps before the last"),
]
Last = Annotated[int | None, typer.Option("--to", min=0, help="Last step.", show_default="newest")]


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command()(verdict)


def verdict(
    run_id: RunId,
    first: First = None,
    last: Last = None,
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Tells who holds a run up, why, since when, what it costs, and what to do."""
    span = {"from": first, "to": last}
    params = {name: step for name, step in span.items() if step is not None}
    with connected(server, token, token_file) as client:
        answer = client.call("GET", f"/runs/{client.run(run_id)}/verdict", params=params)
    if as_json:
        print_json(answer)
        return
    typer.echo("\n".join(lines(answer)))


def lines(answer: dict[str, Any]) -> list[str]:
    """The verdict for people: each cause, and what to do about it."""
    if not answer["causes"]:
        return [plain(answer["words"])]
    made = []
    for cause in answer["causes"]:
        made += [plain(cause["words"]), f"  What to do: {plain(cause['to_do'])}."]
    return made
