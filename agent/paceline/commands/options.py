"""Options and arguments that several commands share, and the conversion of their values."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.core.errors import InputError

if TYPE_CHECKING:
    from paceline.node.client import Client

DEFAULT_SERVER = "http://127.0.0.1:8000"

Server = Annotated[
    str | None,
    typer.Option(envvar="PACELINE_SERVER", help="URL of the server.", show_default=DEFAULT_SERVER),
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_TOKEN",
        help="Token of the server. Other users of this machine can see an argument: prefer the "
        "variable or --token-file.",
        show_default="what a server on this machine keeps for its user",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="PACELINE_TOKEN_FILE", help="File with the token of the server."),
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
Notice = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_NOTICE",
        help="Leave in order when the provider takes this machine back: ec2, gce, azure, or the "
        "address of a notice, which is not found (404) until then.",
        show_default="nobody is asked",
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME[=VALUE]", help="A variable for the ranks; repeatable."),
]
Parameters = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="NAME=VALUE", help="A parameter of the policy; repeatable."),
]
Policy = Annotated[
    str | None,
    typer.Option(
        help="Policy at the start; `paceline policies` lists all.", show_default="the server's"
    ),
]
Name = Annotated[str | None, typer.Option(help="Name of the run.", show_default="the script")]
MaxRestarts = Annotated[
    int, typer.Option(min=0, help="How often to start all ranks again after one failed.")
]
RestartHung = Annotated[
    float | None,
    typer.Option(
        "--restart-hung",
        metavar="SECONDS",
        min=10,
        max=86_400,
        help="When the run has hung for so long, start all ranks again: one of --max-restarts.",
        show_default="it is left alone",
    ),
]
RunId = Annotated[
    str, typer.Argument(metavar="RUN", help="Run id, or a beginning that no other run's id has.")
]
Why = Annotated[str, typer.Option(help="The reason, for `paceline audit`.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Yes = Annotated[
    bool,
    typer.Option("--yes", "-y", help="Change the run without asking. Required without a terminal."),
]
YesJson = Annotated[
    bool,
    typer.Option(
        "--yes",
        "-y",
        help="Change the run without asking. Required without a terminal and with --json.",
    ),
]


def confirm(question: str, yes: bool, as_json: bool = False) -> None:
    """Ask before a run is changed, unless `yes` has answered already.

    Raises:
        InputError: there is no terminal to ask, or the output must be JSON only.
        typer.Abort: the answer is no.
    """
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        reason = "--json asks no questions" if as_json else "no terminal can be asked"
        raise InputError(f"{question} Confirm with --yes: {reason}")
    typer.confirm(question, abort=True, err=True)


def given(token: str | None, file: Path | None) -> str | None:
    """Return the token from a command's options; a file takes precedence over a token."""
    from paceline.node import private

    return token or None if file is None else private.secret("--token-file", file)


def connected(server: str | None, token: str | None, token_file: Path | None) -> Client:
    """Return a client of the server that a command's options name."""
    return client_of(server, given(token, token_file))


def client_of(server: str | None, token: str | None, timeout_s: float | None = None) -> Client:
    """Return a client of a server by its URL, or of the default server."""
    from paceline.node.client import Client

    return Client(server or DEFAULT_SERVER, token, timeout_s)


def data_directory(path: Path | None) -> Path:
    """Return the directory of runs from a command's option; create it if it is missing."""
    from paceline.node import rundir

    return rundir.open_data(path or rundir.default_data())


def node_name(name: str | None) -> str:
    """Return the node's name from a command's option; raise an InputError for an invalid name."""
    from paceline.node import machine
    from paceline.wire import is_node

    name = name or machine.default_name()
    if not is_node(name):
        raise InputError(
            f"--node {name}: a name has 1 to 200 letters, digits, dots, - and _, and begins with "
            "a letter or a digit"
        )
    return name


def parameters_of(pairs: Sequence[str] | None, option: str = "--param") -> dict[str, Any]:
    """Parse ``name=value`` pairs of an option. A value that is no JSON is a string."""
    parameters = {}
    for pair in pairs or ():
        name, separator, text = pair.partition("=")
        if not name or not separator:
            raise InputError(f"{option} {pair}: give NAME=VALUE")
        try:
            parameters[name] = json.loads(text)
        except ValueError:
            parameters[name] = text
    return parameters
