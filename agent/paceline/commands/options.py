"""Options and arguments that several commands share, and the conversion of their values.

Typer makes one option of each parameter of a command's function. Options that belong together, such
as the URL of a server and the token for it, are the fields of a frozen dataclass in this module, a
*group*. A command takes the group as one parameter, and has the decorator `grouped`::

    @app.command()
    @grouped
    def policies(connection: Connection, as_json: Json = False) -> None:
        with connection.client() as client: ...

`grouped` gives the function a signature in which the fields replace the group: Typer sees
``server``, ``token``, ``token_file`` and ``as_json``, in this order, each with its annotation and
default. When Typer calls the command, `grouped` builds the groups from the values. A field may be a
group itself. Names of options must be unique within a command, because a group adds no prefix.

Groups of a single command are defined beside that command. All groups are keyword-only dataclasses,
so that a field without a default, such as a required argument, may follow fields with defaults.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, wraps
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from paceline.core.errors import InputError

if TYPE_CHECKING:
    from paceline.node.client import Client

DEFAULT_SERVER = "http://127.0.0.1:8000"

R = TypeVar("R")


def grouped(command: Callable[..., R]) -> Callable[..., R]:
    """Replace the groups among a command's parameters by their fields, so that Typer reads them."""
    hints = get_type_hints(command, include_extras=True)
    given = inspect.signature(command).parameters
    groups = {name: hints[name] for name in given if _is_group(hints[name])}

    @wraps(command)
    def flat(**values: Any) -> R:
        built = {name: _build(group, values) for name, group in groups.items()}
        return command(**values, **built)

    parameters = [
        option
        for name, parameter in given.items()
        for option in _expand(name, hints[name], parameter.default)
    ]
    # Typer reads the signature with `inspect.signature`, and annotations with
    # `typing.get_type_hints`.
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {option.name: option.annotation for option in parameters}
    return flat


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and is_dataclass(annotation)


def _expand(name: str, annotation: Any, default: Any) -> Iterator[Parameter]:
    """Yield a parameter; for a group of options, yield the parameters of its fields instead."""
    if _is_group(annotation):
        for field in _fields_of(annotation):
            yield from _expand(*field)
    else:
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _build(group: Any, values: dict[str, Any]) -> Any:
    """Build a group from the values of its options, and remove its options from `values`."""
    return group(
        **{
            name: _build(annotation, values) if _is_group(annotation) else values.pop(name)
            for name, annotation, _ in _fields_of(group)
        }
    )


@cache
def _fields_of(group: Any) -> list[tuple[str, Any, Any]]:
    hints = get_type_hints(group, include_extras=True)
    return [
        (
            field.name,
            hints[field.name],
            Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(group)
    ]


Server = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_SERVER", help="URL of the Paceline server.", show_default=DEFAULT_SERVER
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_TOKEN",
        help="Token for the Paceline server. Other users of this machine can see command-line "
        "arguments: prefer the environment variable or --token-file.",
        show_default="the token that a server on this machine stored",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        envvar="PACELINE_TOKEN_FILE",
        help="File with the token for the Paceline server, in place of --token.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        envvar="PACELINE_DATA",
        help="Directory for the states and logs of runs, and for telemetry that is not sent yet.",
        show_default="~/.local/share/paceline",
    ),
]
Node = Annotated[
    str | None,
    typer.Option(
        help="Name of this machine as a node of the server.", show_default="the host's name"
    ),
]
Notice = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_NOTICE",
        help="Where the cloud provider announces that it reclaims this machine: ec2, gce, azure, "
        "or a URL that returns 404 until the announcement. The machine then leaves its runs.",
        show_default="no announcements",
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=VALUE]",
        help="Environment variable for the ranks; repeatable. Without =VALUE, the ranks get its "
        "value in this shell.",
    ),
]
Parameters = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="NAME=VALUE", help="Parameter of the policy; repeatable."),
]
Policy = Annotated[
    str | None,
    typer.Option(
        help="Policy with which the run starts; `paceline policies` lists all policies.",
        show_default="the server's default",
    ),
]
Name = Annotated[
    str | None, typer.Option(help="Name of the run.", show_default="the script's name")
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        min=0, help="Maximum number of times that all ranks are restarted after a rank has failed."
    ),
]
RestartHung = Annotated[
    float | None,
    typer.Option(
        "--restart-hung",
        metavar="SECONDS",
        min=10,
        max=86_400,
        help="Restart all ranks when the run has hung for this many seconds. The restart counts "
        "towards --max-restarts.",
        show_default="no restart",
    ),
]
RunId = Annotated[
    str, typer.Argument(metavar="RUN", help="ID of a run, or a unique prefix of its ID.")
]
Why = Annotated[
    str,
    typer.Option(help="Reason for the change, shown by `paceline audit`.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of as text.")]
Yes = Annotated[
    bool,
    typer.Option(
        "--yes",
        "-y",
        help="Change the run without asking for confirmation. Required if there is no terminal.",
    ),
]
YesJson = Annotated[
    bool,
    typer.Option(
        "--yes",
        "-y",
        help="Change the run without asking for confirmation. Required with --json, and if there "
        "is no terminal.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """The token for a server."""

    token: Token = None
    token_file: TokenFile = None

    def read(self) -> str | None:
        """Return the token; `token_file` takes precedence over `token`."""
        from paceline.node import private

        if self.token_file is None:
            return self.token or None
        return private.secret("--token-file", self.token_file)


@dataclass(frozen=True, kw_only=True)
class Connection:
    """The connection to a server."""

    server: Server = None
    authentication: TokenOptions

    @property
    def url(self) -> str:
        """URL of the server."""
        return self.server or DEFAULT_SERVER

    def client(self, timeout_s: float | None = None) -> Client:
        """Return a client of the server; for `timeout_s`, see `Client`."""
        from paceline.node.client import Client

        return Client(self.url, self.authentication.read(), timeout_s)


@dataclass(frozen=True, kw_only=True)
class NodeConnection:
    """The connection to a server, and this machine's name and data directory as a node."""

    server: Server = None
    node: Node = None
    data: Data = None
    authentication: TokenOptions

    @property
    def required(self) -> bool:
        """True if the server must answer, because the user named it."""
        return self.server is not None

    def client(self) -> Client:
        """Return a client of the server."""
        return Connection(server=self.server, authentication=self.authentication).client()


@dataclass(frozen=True, kw_only=True)
class ChangeOptions:
    """Options of commands that change a run: the reason, and ``--yes`` to skip the confirmation."""

    why: Why = ""
    yes: YesJson = False

    @property
    def audit_fields(self) -> dict[str, str]:
        """Fields of the REST request for the audit log."""
        return {"by": "cli", "why": self.why}

    def confirm(self, question: str, as_json: bool) -> None:
        """Request a confirmation before the run is changed; see `confirm`."""
        confirm(question, self.yes, as_json)


@dataclass(frozen=True, kw_only=True)
class PolicyChoice:
    """The policy of a new run, and the run's name."""

    policy: Policy = None
    param: Parameters = None
    name: Name = None

    def rest_fields(self) -> dict[str, Any]:
        """Return these options as fields of ``POST /runs``."""
        asked = {"policy": self.policy, "parameters": parameters_of(self.param), "name": self.name}
        return {field: value for field, value in asked.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """Automatic restarts of a run's ranks."""

    max_restarts: MaxRestarts = 0
    restart_hung: RestartHung = None

    def rest_fields(self) -> dict[str, Any]:
        """Return `restart_hung` as a field of ``POST /runs``; `Launch` has `max_restarts`."""
        return {} if self.restart_hung is None else {"restart_hung_s": self.restart_hung}


def confirm(question: str, yes: bool, as_json: bool = False) -> None:
    """Request a confirmation before a run is changed, unless `yes` is True.

    Raises:
        InputError: there is no terminal for the question, or the output must be JSON only.
        typer.Abort: the answer is no.
    """
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        reason = "--json allows no question" if as_json else "there is no terminal for an answer"
        raise InputError(f"{question} Confirm with --yes: {reason}")
    typer.confirm(question, abort=True, err=True)


def data_directory(path: Path | None) -> Path:
    """Return the data directory, by default `default_data`; create it if it is missing."""
    from paceline.node import rundir

    return rundir.open_data(path or rundir.default_data())


def node_name(name: str | None) -> str:
    """Return the node's name from a command's option; raise an InputError for an invalid name."""
    from paceline.node import machine
    from paceline.wire import is_node

    name = name or machine.default_name()
    if not is_node(name):
        raise InputError(
            f"--node {name}: a name has 1 to 200 letters, digits, dots, - and _, and starts with "
            "a letter or a digit"
        )
    return name


def parameters_of(pairs: Sequence[str] | None, option: str = "--param") -> dict[str, Any]:
    """Parse ``name=value`` pairs of an option. A value that is not JSON is a string."""
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
