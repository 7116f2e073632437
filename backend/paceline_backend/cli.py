"""Commands of the control plane for `paceline`.

The commands `replay`, `simulate` and `whatif` are defined here; `commands` defines the others. The
entry point `paceline.commands` calls `register`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.commands.options import DEFAULT_SERVER, Json, RunId, Server, Token, TokenFile, given
from paceline_backend.commands import access
from paceline_backend.commands.options import DATA, Data, Database
from paceline_backend.commands.server import server


def register(app: typer.Typer) -> None:
    """Add the commands of the control plane to the command line."""
    from paceline_backend.commands import database as databases

    app.add_typer(databases.app, name="db")
    app.command("server")(server)
    app.command("replay")(replay)
    app.command("simulate")(simulate)
    app.command("whatif")(whatif)
    access.register(app)


def replay(
    run: RunId,
    database: Database = None,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Recompute a run's plans from the database alone. Exit code 1: a plan differs."""
    from paceline_backend.insight.replay import replay_command
    from paceline_backend.server.supervisor import embedded_database

    raise typer.Exit(replay_command(database or embedded_database(data), run, as_json))


def simulate(
    scenario: Annotated[Path, typer.Argument(help="YAML file; see docs/simulator.md.")],
    server: Annotated[
        str | None,
        typer.Option(
            help="URL of a server that should show the run; default: simulate without a server."
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policy for the whole run, instead of the scenario's.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="bsp,chronica", help="Simulate under each policy, and print a table."),
    ] = None,
    warmup: Annotated[
        int,
        typer.Option(min=0, help="Steps after each policy's start to leave out of the figures."),
    ] = 0,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Simulate training on a virtual cluster under one or several policies."""
    from paceline_backend.simulator import command

    if compare is not None and (policy is not None or server is not None):
        raise typer.BadParameter(
            "cannot be combined with --policy or --server", param_hint="--compare"
        )
    names = compare.split(",") if compare else [policy] if policy else []
    if server is None:
        raise typer.Exit(command.in_memory(scenario, names, warmup, as_json))
    raise typer.Exit(
        command.on_server(scenario, policy, server, given(token, token_file), warmup, as_json)
    )


def whatif(
    run: RunId,
    server: Server = None,
    token: Token = None,
    token_file: TokenFile = None,
    database: Annotated[
        str | None,
        typer.Option(help="SQLAlchemy URL of a database to compute from, without a server."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Forecast how much of a run's time each policy would save, from measurements of its ranks."""
    from paceline_backend.insight.whatif import command

    if database is not None:
        raise typer.Exit(command.from_database(database, run, as_json))
    raise typer.Exit(
        command.from_server(server or DEFAULT_SERVER, given(token, token_file), run, as_json)
    )


if __name__ == "__main__":
    typer.run(server)
