"""Commands of the control plane for `paceline`.

The commands `replay`, `simulate` and `whatif` are defined here; `commands` defines the others. The
entry point `paceline.commands` calls `register`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from paceline.commands.options import Connection, Json, RunId, TokenOptions, grouped
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
    """Recompute a run's plans, and compare them with the stored plans.

    Exit code 1: a plan differs.
    """
    from paceline_backend.insight.replay import replay_command
    from paceline_backend.server.supervisor import embedded_database

    raise typer.Exit(replay_command(database or embedded_database(data), run, as_json))


@dataclass(frozen=True, kw_only=True)
class SimulatedPolicies:
    """The policies to simulate, and the number of steps that their results leave out."""

    policy: Annotated[
        str | None, typer.Option(help="Policy to simulate, instead of the one in the scenario.")
    ] = None
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="bsp,chronica",
            help="Policies to simulate one after the other, and to compare in a table.",
        ),
    ] = None
    warmup: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of steps to leave out of the results after each start of a policy.",
        ),
    ] = 0

    @property
    def names(self) -> list[str]:
        """Names of the policies; empty: the policy in the scenario."""
        if self.compare:
            return self.compare.split(",")
        return [self.policy] if self.policy else []


@grouped
def simulate(
    *,
    scenario: Annotated[
        Path, typer.Argument(help="YAML file with the scenario; see docs/simulator.md.")
    ],
    server: Annotated[
        str | None,
        typer.Option(
            help="URL of a server that should show the run; default: simulate without a server."
        ),
    ] = None,
    policies: SimulatedPolicies,
    authentication: TokenOptions,
    as_json: Json = False,
) -> None:
    """Simulate training on a virtual cluster under one or several policies."""
    from paceline_backend.simulator import command

    policy, warmup = policies.policy, policies.warmup
    if policies.compare is not None and (policy is not None or server is not None):
        raise typer.BadParameter(
            "cannot be combined with --policy or --server", param_hint="--compare"
        )
    if server is None:
        raise typer.Exit(command.in_memory(scenario, policies.names, warmup, as_json))
    token = authentication.read()
    raise typer.Exit(command.on_server(scenario, policy, server, token, warmup, as_json))


@grouped
def whatif(
    run: RunId,
    connection: Connection,
    database: Annotated[
        str | None,
        typer.Option(
            help="SQLAlchemy URL of a database, to compute the forecasts from it without a server."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Forecast how much time each policy would save in a run, from measurements of its ranks."""
    from paceline_backend.insight.whatif import command

    if database is not None:
        raise typer.Exit(command.from_database(database, run, as_json))
    token = connection.authentication.read()
    raise typer.Exit(command.from_server(connection.url, token, run, as_json))


if __name__ == "__main__":
    typer.run(server)
