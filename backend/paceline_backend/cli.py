"""`paceline server`, `replay`, `simulate` and `whatif`."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli import DEFAULT_SERVER
from paceline.core.errors import PacelineError
from paceline_backend.server.settings import MAX_BODY_BYTES, Settings

_ENVIRONMENT = 3  # exit code, docs/internals.md


def register(app: typer.Typer) -> None:
    """Adds `server`, `replay`, `simulate` and `whatif` to the command line."""
    app.command("server")(server)
    app.command("replay")(replay)
    app.command("simulate")(simulate)
    app.command("whatif")(whatif)


def server(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    database: Annotated[
        str | None,
        typer.Option(envvar="PACELINE_DATABASE", help="SQLAlchemy URL; default: SQLite in --data."),
    ] = None,
    bus: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_BUS",
            help="redis:// URL that agents can reach too; default: an embedded one on loopback.",
        ),
    ] = None,
    data: Annotated[
        Path, typer.Option(envvar="PACELINE_DATA", help="Directory of what is embedded.")
    ] = Path(".paceline"),
    token: Annotated[
        str | None,
        typer.Option(envvar="PACELINE_TOKEN", help="Wanted from clients; needed beyond loopback."),
    ] = None,
    max_body_bytes: Annotated[
        int,
        typer.Option(
            envvar="PACELINE_MAX_BODY_BYTES", min=1024, help="Larger requests are refused."
        ),
    ] = MAX_BODY_BYTES,
    only: Annotated[
        Literal["web", "worker"] | None,
        typer.Option(help="One part alone; needs --bus and --database."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Of this worker: no other may have it, and it is best kept across restarts. "
            "Default: host and port, or with --only worker host and process."
        ),
    ] = None,
    fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Starts the control plane: REST, dashboard, ingest and controllers. Ctrl-C stops it."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        if only is None:
            code = _all(host, port, database, bus, data, token or None, max_body_bytes, name)
            raise typer.Exit(code)
        if not bus or not database:
            raise typer.BadParameter(
                "parts that run alone must share a bus and a database: give --bus and --database",
                param_hint="--only",
            )
        settings = Settings(database, bus, host, port, token or None, max_body_bytes)
        code = _worker(settings, name) if only == "worker" else _web(settings, fd)
    except PacelineError as error:
        typer.echo(f"paceline server: {error}", err=True)
        raise typer.Exit(_ENVIRONMENT) from error
    raise typer.Exit(code)


def replay(
    run: Annotated[
        str, typer.Argument(help="A run's id, or a beginning that no other run's id has.")
    ],
    database: Annotated[
        str | None,
        typer.Option(envvar="PACELINE_DATABASE", help="SQLAlchemy URL; default: SQLite in --data."),
    ] = None,
    data: Annotated[
        Path, typer.Option(envvar="PACELINE_DATA", help="Directory of what is embedded.")
    ] = Path(".paceline"),
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Computes a run's plans again from the database alone; exit code 1 if one differs."""
    from paceline_backend.insight.replay import replay_command
    from paceline_backend.server.supervisor import embedded_database

    raise typer.Exit(replay_command(database or embedded_database(data), run, as_json))


def simulate(
    scenario: Annotated[Path, typer.Argument(help="YAML file; docs/simulator.md.")],
    server: Annotated[
        str | None,
        typer.Option(help="URL of a server that shall show the run; default: simulate just here."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="From start to end, instead of the scenario's.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="bsp,chronica", help="Simulate under each, and tabulate.")
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=0, help="Steps after each policy's start that figures leave out.")
    ] = 0,
    token: Annotated[
        str | None, typer.Option(envvar="PACELINE_TOKEN", help="The server's, beyond loopback.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Simulates training on a virtual cluster: what each policy would make of it."""
    from paceline_backend.simulator import command

    if compare is not None and (policy is not None or server is not None):
        raise typer.BadParameter("goes with neither --policy nor --server", param_hint="--compare")
    names = compare.split(",") if compare else [policy] if policy else []
    if server is None:
        raise typer.Exit(command.in_memory(scenario, names, warmup, as_json))
    raise typer.Exit(command.on_server(scenario, policy, server, token, warmup, as_json))


def whatif(
    run: Annotated[
        str, typer.Argument(help="A run's id, or a beginning that no other run's id has.")
    ],
    server: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_SERVER", help="URL of the server.", show_default=DEFAULT_SERVER
        ),
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="PACELINE_TOKEN", help="The server's, beyond loopback.")
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL to compute from, without a server.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Forecasts what each policy would save of a run's time, from what its ranks measured."""
    from paceline_backend.insight.whatif import command

    if database is not None:
        raise typer.Exit(command.from_database(database, run, as_json))
    raise typer.Exit(command.from_server(server or DEFAULT_SERVER, token, run, as_json))


def _all(
    host: str,
    port: int,
    database: str | None,
    bus: str | None,
    data: Path,
    token: str | None,
    max_body_bytes: int,
    name: str | None,
) -> int:
    from paceline_backend.server.supervisor import DataDirectory, Supervisor, listen
    from paceline_backend.store import Store

    with contextlib.ExitStack() as held:
        directory = None if database and bus else held.enter_context(DataDirectory(data))
        settings = Settings(database or "", bus or "", host, port, token, max_body_bytes)
        listener = held.enter_context(listen(settings))
        port = listener.getsockname()[1]
        embedded = None
        if directory is not None:
            embedded = None if bus else directory.bus()
            database = database or directory.database
            bus = bus or (embedded.url if embedded else None)
        assert database is not None
        assert bus is not None
        # Migrated here, before the parts start: they need not wait for each other.
        Store.open(database).close()
        settings = replace(settings, database=database, bus=bus, port=port)
        name = name or f"{socket.gethostname()}:{port}"
        return Supervisor(settings, listener, embedded, name).run()


def _worker(settings: Settings, name: str | None) -> int:
    from paceline_backend.control import worker

    return worker.run(settings, name or f"{socket.gethostname()}:pid-{os.getpid()}")


def _web(settings: Settings, fd: int | None) -> int:
    from paceline_backend.api import web
    from paceline_backend.server.supervisor import listen

    listener = listen(settings) if fd is None else socket.socket(fileno=fd)
    return web.run(settings, listener)


if __name__ == "__main__":
    typer.run(server)
