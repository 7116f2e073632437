"""The command line. It starts fast: no torch, and the server's packages for its commands only."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.core.errors import InputError, PacelineError
from paceline.core.version import __version__

if TYPE_CHECKING:
    from paceline.node.client import Client
    from paceline.node.link import Link

DEFAULT_SERVER = "http://127.0.0.1:8000"

app = typer.Typer(
    name="paceline",
    help="Removes stragglers from data-parallel PyTorch training, live.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_log = logging.getLogger(__name__)

Server = Annotated[
    str | None,
    typer.Option(envvar="PACELINE_SERVER", help="URL of the server.", show_default=DEFAULT_SERVER),
]
Token = Annotated[
    str | None,
    typer.Option(envvar="PACELINE_TOKEN", help="Token of a server on another machine."),
]
Data = Annotated[
    Path | None,
    typer.Option(
        envvar="PACELINE_DATA",
        help="Directory for runs, their logs and spools.",
        show_default="~/.local/share/paceline",
    ),
]
Node = Annotated[
    str | None, typer.Option(help="This machine's name.", show_default="the host's name")
]
Parameters = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="NAME=VALUE", help="A parameter of the policy; repeatable."),
]
RunId = Annotated[
    str, typer.Argument(metavar="RUN", help="Run id, or a beginning that no other run's id has.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="Python script to train with.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks.", show_default="1, or one per emulated device")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policy at the start; `paceline policies` lists all.", show_default="the server's"
        ),
    ] = None,
    param: Parameters = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run.", show_default="the script")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often to start all ranks again after one failed.")
    ] = 0,
    slowdown: Annotated[
        str | None,
        typer.Option(metavar="1,1,1.5,3", help="Emulate device speeds: a factor for each rank."),
    ] = None,
    seconds_per_unit: Annotated[
        float, typer.Option(help="Emulated time of one size unit at factor 1.")
    ] = 1e-5,
    seconds_per_step: Annotated[
        float, typer.Option(help="Emulated time that each step takes in addition, at any factor.")
    ] = 0.005,
    emulate: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|FILE", help="Emulate devices, all options: docs/training-scripts.md."
        ),
    ] = None,
    server: Server = None,
    node: Node = None,
    data: Data = None,
    token: Token = None,
) -> None:
    """Runs a training script on this machine, like torchrun. Options come before the script."""
    from paceline.node import run as foreground
    from paceline.wire import Launch

    env, devices = {}, None
    if emulate is not None and slowdown is not None:
        raise InputError("--emulate and --slowdown: give one of them")
    if emulate is not None:
        devices = foreground.whole_emulation(emulate, nproc)
    elif slowdown is not None:
        devices = foreground.emulation(slowdown, seconds_per_unit, seconds_per_step, nproc)
    if devices is not None:
        nproc = len(devices["a_s"])
        env["PACELINE_EMULATE"] = json.dumps(devices)
    launch = Launch(script, args or [], nproc or 1, env, str(Path.cwd()), max_restarts)
    code = foreground.train(
        launch,
        data=_data(data),
        node=_node(node),
        server=server,
        default_server=DEFAULT_SERVER,
        token=token,
        policy=policy,
        parameters=_parameters(param),
        name=name or Path(script).stem,
    )
    raise typer.Exit(code)


@app.command()
def agent(
    server: Server = None,
    bus: Annotated[
        str | None,
        typer.Option(help="redis:// URL of the bus.", show_default="what the server says"),
    ] = None,
    node: Node = None,
    data: Data = None,
    token: Token = None,
) -> None:
    """Registers this node and looks after the runs that the server starts on it."""
    from paceline.node.agent import Agent

    directory = _data(data)
    name = _node(node)
    if bus is not None:
        with _link(bus) as link:
            _log_to_stderr()
            code = Agent(link, name, directory, link.place).run()
        raise typer.Exit(code)
    _log_to_stderr()
    with ExitStack() as stack:
        client = stack.enter_context(_client(server, token, timeout_s=2.0))
        info = _wait_for(client)
        link = stack.enter_context(_link(info["bus"]))
        _log.info("node %s: server %s, bus %s", name, client.server, link.place)

        def find_bus() -> str | None:
            try:
                return str(client.version()["bus"])
            except PacelineError as error:
                _log.debug("%s", error)
                return None

        code = Agent(link, name, directory, info["id"], find_bus).run()
    raise typer.Exit(code)


@app.command()
def runs(
    state: Annotated[str | None, typer.Option(help="Only runs in this state.")] = None,
    policy: Annotated[str | None, typer.Option(help="Only runs under this policy.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 20,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Lists the newest runs."""
    query = {"state": state, "policy": policy, "limit": limit}
    with _client(server, token) as client:
        page = client.call("GET", "/runs", params={k: v for k, v in query.items() if v is not None})
    if as_json:
        _print_json(page)
    else:
        columns = ("id", "name", "state", "policy", "nproc", "epoch", "step", "message")
        _print_table(columns, page["items"])


@app.command()
def policies(server: Server = None, token: Token = None, as_json: Json = False) -> None:
    """Lists the policies that the server knows."""
    with _client(server, token) as client:
        known = client.call("GET", "/policies")
    if as_json:
        _print_json(known)
    else:
        _print_table(("name", "summary", "source"), known)


@app.command()
def switch(
    run_id: RunId,
    policy: Annotated[str, typer.Argument(metavar="POLICY")],
    param: Parameters = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Switches a run to another policy while it trains."""
    body = {"policy": policy, "parameters": _parameters(param), "by": "cli"}
    with _client(server, token) as client:
        run_id = client.run(run_id)
        answer = client.call("POST", f"/runs/{run_id}/policy", body)
    if as_json:
        _print_json(answer)
    else:
        typer.echo(f"run {run_id} goes on with {policy} from its next segment")


@app.command()
def stop(
    run_id: RunId,
    force: Annotated[bool, typer.Option("--force", help="Kill its processes now.")] = False,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Ends a run at its next segment: the script goes on to its last lines."""
    with _client(server, token) as client:
        run_id = client.run(run_id)
        answer = client.call("POST", f"/runs/{run_id}/stop", {"force": force})
    if as_json:
        _print_json(answer)
    else:
        typer.echo(f"run {run_id} is {'killed' if force else 'asked to stop'}")


@app.command("version")
def show_version(as_json: Json = False) -> None:
    """Prints versions: Paceline's, its protocol's, Python's and PyTorch's."""
    from paceline.wire import PROTOCOL_VERSION

    versions = {
        "paceline": __version__,
        "protocol": PROTOCOL_VERSION,
        "python": sys.version.split()[0],
        "torch": version("torch"),
    }
    if as_json:
        _print_json(versions)
    else:
        typer.echo("\n".join(f"{name} {value}" for name, value in versions.items()))


def _data(path: Path | None) -> Path:
    from paceline.node import rundir

    return rundir.open_data(path or rundir.default_data())


def _node(name: str | None) -> str:
    from paceline.node import machine

    return name or machine.default_name()


def _client(server: str | None, token: str | None, timeout_s: float = 10.0) -> Client:
    from paceline.node.client import Client

    return Client(server or DEFAULT_SERVER, token, timeout_s)


def _link(url: str) -> Link:
    from paceline.node.link import Link

    try:
        return Link(url)
    except ValueError as error:
        raise InputError(f"bus {url}: {error}") from error


def _wait_for(client: Client) -> dict[str, Any]:
    """The server's `version`; waits for a server that starts later."""
    from paceline.node.client import ServerUnreachable

    waiting = False
    while True:
        try:
            return client.version()
        except ServerUnreachable as error:
            if not waiting:
                _log.warning("%s; waiting for it", error)
            waiting = True
            time.sleep(1.0)


def _parameters(pairs: Sequence[str] | None) -> dict[str, Any]:
    """The values of ``name=value`` pairs. A value that is no JSON is a string."""
    parameters = {}
    for pair in pairs or ():
        name, separator, text = pair.partition("=")
        if not name or not separator:
            raise InputError(f"--param {pair}: give NAME=VALUE")
        try:
            parameters[name] = json.loads(text)
        except ValueError:
            parameters[name] = text
    return parameters


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value))


def _print_table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in columns:
        # Ids are for copying: show them whole, also in a narrow terminal.
        least = max((len(str(row[column])) for row in rows), default=0) if column == "id" else None
        table.add_column(column, min_width=least, no_wrap=column == "id")
    for row in rows:
        texts = ("" if row[c] is None else str(row[c]) for c in columns)
        table.add_row(*(text.partition("\n")[0] for text in texts))
    Console(highlight=False, markup=False).print(table)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("paceline")
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("PACELINE_LOG", "INFO"))


def _add_plugin(entry: EntryPoint) -> None:
    """Adds the commands of another package, or a command that says which packages are missing."""
    try:
        register = entry.load()
    except ImportError as error:
        reason = str(error)

        @app.command(
            entry.name,
            help="(Not installed: pip install 'paceline[server]'.)",
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )
        def missing() -> None:
            raise PacelineError(
                f"paceline {entry.name} needs packages that are not installed ({reason}): "
                "pip install 'paceline[server]'"
            )
    else:
        register(app)


def main() -> None:
    """The entry point `paceline`."""
    own = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    if len(sys.argv) < 2 or sys.argv[1] not in own:
        for entry in entry_points(group="paceline.commands"):
            _add_plugin(entry)
    try:
        app(prog_name="paceline")
    except PacelineError as error:
        typer.echo(f"paceline: {error}", err=True)
        sys.exit(error.exit_code)
