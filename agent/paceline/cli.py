"""The command line `paceline`. To start fast, it imports no torch, and server packages only on use.

Commands that are imported here are registered here; the entry points of the group
`paceline.commands` add all other commands.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

import typer

from paceline.commands import linking, runs
from paceline.commands.options import (
    ChangeOptions,
    Connection,
    Data,
    Env,
    Json,
    Node,
    Notice,
    RunId,
    Server,
    TokenOptions,
    data_directory,
    grouped,
    node_name,
    parameters_of,
)
from paceline.commands.printing import print_json, print_table
from paceline.commands.starting import doctor, observe, run
from paceline.commands.switching import switch, switches
from paceline.core.errors import InputError, MissingExtraError, PacelineError
from paceline.core.importing import uncollected
from paceline.core.version import __version__

app = typer.Typer(
    name="paceline",
    help="Removes stragglers from data-parallel PyTorch training, live.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_log = logging.getLogger(__name__)
_VERSION = "--version"
# Entry points that add several commands, with the commands' names. Each other entry point adds one
# command, which has the entry point's name.
_ADDED = {
    "demo": ("demo", "up"),
    "server": ("server", "db", "open", "replay", "simulate", "token", "whatif"),
}

app.command(context_settings={"allow_interspersed_args": False})(run)
app.command(context_settings={"allow_interspersed_args": False})(doctor)
app.command(context_settings={"allow_interspersed_args": False})(observe)
for _command in (switch, switches):
    app.command()(_command)
runs.register(app)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            _VERSION,
            callback=_print_version,
            is_eager=True,
            help="Print the version of Paceline; `paceline version` prints more versions.",
        ),
    ] = False,
) -> None:
    """Declare the options that stand before the name of a command."""


@app.command()
@grouped
def agent(
    *,
    server: Server = None,
    bus: Annotated[
        str | None,
        typer.Option(
            help="redis:// URL at which this machine reaches the bus, the Redis server that "
            "carries messages between agents and server. The control plane provides user and "
            "password; with a password in the URL, the agent does not contact the control plane.",
            show_default="the URL that the server returns",
        ),
    ] = None,
    node: Node = None,
    data: Data = None,
    authentication: TokenOptions,
    notice: Notice = None,
) -> None:
    """Register this machine as a node, and supervise the runs that the server starts on it."""
    with uncollected():
        from paceline.node import session
        from paceline.node.agent import Agent
        from paceline.node.health.notice import Notices, provider_of

    directory = data_directory(data)
    name = node_name(node)
    notices = None if notice is None else Notices(provider_of(notice))
    if bus is not None and (parts := _bus_parts(bus)).password is not None:
        place = parts.netloc.rpartition("@")[2]
        with linking.linked(session.without(place, bus, name)) as link:
            linking.log_to_stderr()
            code = Agent(link, name, directory, notices=notices).run()
        raise typer.Exit(code)
    # Reject an invalid URL now, before the wait for the server.
    if bus is not None:
        linking.linked(session.without("", bus, name)).close()
    linking.log_to_stderr()
    with ExitStack() as stack:
        connection = Connection(server=server, authentication=authentication)
        client = stack.enter_context(connection.client(timeout_s=2.0))
        link = stack.enter_context(linking.linked(linking.wait_for_session(client, name, bus)))
        _log.info("node %s: server %s, bus %s", name, client.server, link.place)
        finder = linking.session_finder(client, name, bus)
        code = Agent(link, name, directory, finder, notices=notices).run()
    raise typer.Exit(code)


@app.command()
@grouped
def policies(connection: Connection, as_json: Json = False) -> None:
    """List the server's policies, with a summary of each."""
    with connection.client() as client:
        known = client.call("GET", "/policies")
    if as_json:
        print_json(known)
    else:
        print_table(("name", "changes", "summary", "source"), known)


@app.command()
@grouped
def backends(connection: Connection, as_json: Json = False) -> None:
    """List the training backends, such as Slurm, and show which of them are reachable."""
    with connection.client() as client:
        known = client.call("GET", "/backends")
    if as_json:
        print_json(known)
        return
    for backend in known:
        backend["takes"] = " ".join(backend["options"].get("properties", {}))
    print_table(("name", "reachable", "version", "problem", "takes"), known)


@app.command()
@grouped
def stop(
    *,
    run_id: RunId,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Kill the run's processes at once, even in the middle of a step."
        ),
    ] = False,
    change: ChangeOptions,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Stop a run after its current segment of a few steps.

    The script still executes its code after the training loop.
    """
    with connection.client() as client:
        run_id = client.run(run_id)
        seen = client.revision(run_id)
        change.confirm(f"{'Kill' if force else 'Stop'} run {run_id}?", as_json)
        body = {"force": force, **change.audit_fields}
        answer = client.change("POST", run_id, "stop", body, revision=seen)
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"run {run_id} is {'killed' if force else 'asked to stop'}")


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """The run to resume, and the settings to change."""

    run_id: RunId
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Maximum number of times that all ranks are restarted after a rank has failed.",
            show_default="as before",
        ),
    ] = None
    env: Env = None
    backend: Annotated[
        str | None,
        typer.Option(
            help="Training backend on which the run continues, such as `slurm`; `local`: nodes on "
            "which `paceline agent` runs.",
            show_default="as before",
        ),
    ] = None
    backend_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Option for the training backend; repeatable. If --backend changes the backend, "
            "the run's earlier backend options are discarded.",
        ),
    ] = None
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|MIN:MAX",
            help="Number of nodes on which the run continues, or minimum and maximum, such as 2:4.",
            show_default="as before",
        ),
    ] = None
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks on each node.", show_default="as before"),
    ] = None

    def elsewhere(self) -> dict[str, Any]:
        """Return the REST fields for options that choose other nodes, ranks or another backend."""
        from paceline.node.starting.several import counted

        asked: dict[str, Any] = {"backend": self.backend, "nproc": self.nproc}
        if self.backend_option is not None:
            asked["backend_options"] = parameters_of(self.backend_option, "--backend-option")
        if self.nodes is not None:
            asked["nodes_min"], asked["nodes_max"] = counted(self.nodes)
        return {name: value for name, value in asked.items() if value is not None}


@app.command()
@grouped
def resume(
    *,
    resumption: ResumeOptions,
    server: Server = None,
    data: Data = None,
    change: ChangeOptions,
    authentication: TokenOptions,
    as_json: Json = False,
) -> None:
    """Resume a failed or stopped run from its newest checkpoint.

    The agent of the run's node, or the run's engine, such as Slurm, starts the ranks. A run that
    `paceline run` started on this machine continues in the foreground, unless an option moves it to
    other nodes or to another backend.
    """
    from paceline.node.starting import resume as resuming

    directory, variables = data_directory(data), resuming.variables(resumption.env or [])
    asked = {"max_restarts": resumption.max_restarts, **change.audit_fields}
    elsewhere = resumption.elsewhere()
    with Connection(server=server, authentication=authentication).client() as client:
        run_id = client.run(resumption.run_id)
        where = f" on {resumption.backend}" if resumption.backend is not None else ""
        change.confirm(f"Resume run {run_id}{where}?", as_json)
        if not elsewhere and resuming.started_here(directory, run_id):
            raise typer.Exit(resuming.in_foreground(client, run_id, directory, variables, asked))
        answer = resuming.on_node(client, run_id, variables, asked | elsewhere)
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"run {run_id} resumes with attempt {answer['first_attempt']}")
        if not elsewhere:
            typer.echo(
                "The node's agent starts the ranks. They get the environment variables of --env, "
                "but not those of this shell."
            )


@app.command("version")
def show_version(as_json: Json = False) -> None:
    """Print the versions of Paceline, its protocol, Python and PyTorch."""
    from paceline.wire import PROTOCOL_VERSION

    versions = {
        "paceline": __version__,
        "protocol": PROTOCOL_VERSION,
        "python": sys.version.split()[0],
        "torch": version("torch"),
    }
    if as_json:
        print_json(versions)
    else:
        typer.echo("\n".join(f"{name} {value}" for name, value in versions.items()))


def _bus_parts(url: str) -> SplitResult:
    from paceline.wire.bus import connect

    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InputError(f"--bus: {error}") from error
    try:
        # Creating a client sends nothing; it validates the URL.
        connect(url).close()
    except ValueError as error:
        raise InputError(f"bus {linking.place(url)}: {error}") from error
    return parts


# Because of the cache, a process that calls `main` several times adds each plugin only once.
@cache
def _add_plugin(entry: EntryPoint) -> None:
    try:
        with uncollected():
            entry.load()(app)
    except ImportError as error:
        for name in _commands_of(entry):
            _add_missing(MissingExtraError(f"paceline {name}", "server", error), name)


def _commands_of(entry: EntryPoint) -> tuple[str, ...]:
    return _ADDED.get(entry.name, (entry.name,))


def _add_missing(error: MissingExtraError, name: str) -> None:
    @app.command(
        name,
        # Without the backslash, Rich reads the brackets as a style.
        help=r"(Not installed: pip install 'paceline\[server]'.)",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def missing() -> None:
        raise error


def main() -> None:
    """Run the command line: the entry point `paceline`."""
    from paceline import configuration
    from paceline.node import private

    private.files()
    own = {group.name for group in app.registered_groups}
    own |= {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    own.add(_VERSION)
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    # A configuration file may set defaults for any command, so all plugins' commands are added
    # before the file is checked.
    configured = configuration.path() is not None
    if name not in own or configured:
        entries = entry_points(group="paceline.commands")
        named = [entry for entry in entries if name in _commands_of(entry)]
        for entry in named if named and not configured else entries:
            _add_plugin(entry)
    try:
        command = typer.main.get_command(app)
        command(prog_name="paceline", default_map=configuration.defaults(command))
    except PacelineError as error:
        typer.echo(f"paceline: {error}", err=True)
        sys.exit(error.exit_code)
