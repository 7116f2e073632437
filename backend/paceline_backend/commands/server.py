"""Command `paceline server`: options, the `Settings` built from them, and the start of the parts.

The command starts all parts, or only the web process or a worker. Each function that starts a part
imports the modules that only this part needs, so that the command starts quickly. If the
configuration has no token for admins, the server creates one, and writes it to files from which
commands of the same user read it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.commands.options import TokenOptions, grouped
from paceline.core import logs
from paceline.core.errors import PacelineError
from paceline.core.importing import uncollected
from paceline.wire.bus import is_loopback
from paceline_backend.commands.options import DATA, Data, Database
from paceline_backend.server import users
from paceline_backend.server.origins import Origins
from paceline_backend.server.prices import Price
from paceline_backend.server.settings import MAX_BODY_BYTES, MAX_STREAMS, Proxies, Settings

if TYPE_CHECKING:
    from paceline_backend.server.embedded import EmbeddedBus
    from paceline_backend.server.supervisor import DataDirectory

log = logging.getLogger(__name__)

# Exit code; see docs/internals.md.
_ENVIRONMENT = 3


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Address of the server, and its database and bus."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")
    ] = 8000
    database: Database = None
    bus: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_BUS",
            help="redis:// URL of the bus, which agents must be able to reach; default: an "
            "embedded bus on loopback.",
        ),
    ] = None
    data: Data = DATA


@dataclass(frozen=True, kw_only=True)
class ServerTokens:
    """Tokens from the configuration. Other tokens are in the database."""

    token: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_TOKEN",
            help="Token for admins, required if --host is not a loopback address. Other users of "
            "this machine can see an argument: prefer the variable or --token-file.",
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(envvar="PACELINE_TOKEN_FILE", help="File with the token for admins."),
    ] = None
    agent_token: Annotated[
        str | None,
        typer.Option(envvar="PACELINE_AGENT_TOKEN", help="Token for the agents of all nodes."),
    ] = None
    viewer_token: Annotated[
        str | None,
        typer.Option(envvar="PACELINE_VIEWER_TOKEN", help="Token for viewers."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Limits for clients of the server and its bus, and the proxies in front of the server."""

    max_body_bytes: Annotated[
        int,
        typer.Option(
            envvar="PACELINE_MAX_BODY_BYTES",
            min=1024,
            help="Maximum size of a request body; larger requests are refused.",
        ),
    ] = MAX_BODY_BYTES
    trust_network: Annotated[
        bool,
        typer.Option(
            "--trust-network",
            envvar="PACELINE_TRUST_NETWORK",
            help="Let the embedded bus listen at --host. Its traffic is not encrypted, and anyone "
            "who can read the traffic can start programs on the nodes.",
        ),
    ] = False
    share_bus_password: Annotated[
        bool,
        typer.Option(
            "--share-bus-password",
            envvar=users.SHARE,
            help="If the server cannot create users on the bus, give nodes and runs the server's "
            "own URL of the bus, with which they can read and write all data on the bus.",
        ),
    ] = False
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            envvar="PACELINE_TLS_CERT", help="PEM file with the certificate chain; enables HTTPS."
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(
            envvar="PACELINE_TLS_KEY",
            help="PEM file with the private key; default: the file of --tls-cert.",
        ),
    ] = None
    trusted_proxy: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_TRUSTED_PROXY",
            metavar="10.0.0.5,…",
            help="Addresses or networks of HTTP proxies whose headers X-Forwarded-For and "
            "X-Forwarded-Proto are trusted.",
        ),
    ] = None
    trust_proxy_header: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_TRUST_PROXY_HEADER",
            metavar="X-Forwarded-User",
            help="Header in which the proxies of --trusted-proxy name the user; ignored from "
            "other clients.",
        ),
    ] = None
    proxy_role: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_PROXY_ROLE",
            metavar="USER=ROLE,…",
            help="Roles (viewer, operator or admin) of users that the proxies of --trusted-proxy "
            "name; default: viewer.",
        ),
    ] = None
    max_streams: Annotated[
        int,
        typer.Option(
            envvar="PACELINE_MAX_STREAMS",
            min=1,
            help="Maximum number of event streams that a client may have open.",
        ),
    ] = MAX_STREAMS
    path_prefix: Annotated[
        str,
        typer.Option(
            envvar="PACELINE_PATH_PREFIX",
            metavar="/PATH",
            help="Path below which a reverse proxy serves this server.",
        ),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options about alerts, costs, and the deletion of old runs."""

    webhook_to: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_WEBHOOK_TO",
            metavar="https://HOST,…",
            help="Origins of the URLs to which webhooks may send alerts; default: none.",
        ),
    ] = None
    hour_price: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_HOUR_PRICE",
            metavar="'2.50 EUR'",
            help="Price of one hour of one rank; default: no costs in money are shown.",
        ),
    ] = None
    keep_days: Annotated[
        float | None,
        typer.Option(
            envvar="PACELINE_KEEP_DAYS",
            min=0,
            help="Delete runs that ended more than this many days ago; default: never.",
        ),
    ] = None
    keep_runs: Annotated[
        int | None,
        typer.Option(
            envvar="PACELINE_KEEP_RUNS",
            min=0,
            help="Number of ended runs to keep, the newest ones; default: all.",
        ),
    ] = None
    keep_bytes: Annotated[
        int | None,
        typer.Option(
            envvar="PACELINE_KEEP_BYTES",
            min=0,
            help="Delete the oldest ended runs until the database's rows take at most this "
            "many bytes; default: never.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServerPart:
    """The part of the server that this process runs."""

    only: Annotated[
        Literal["web", "worker"] | None,
        typer.Option(help="Run only this part of the server; requires --bus and --database."),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the worker process, which must be unique, and preferably stays the same "
            "after a restart; default: host and port, or with --only worker, host and process ID."
        ),
    ] = None


@grouped
def server(
    endpoints: Endpoints,
    tokens: ServerTokens,
    network: NetworkOptions,
    runs: RunOptions,
    part: ServerPart,
) -> None:
    """Start the control plane: REST, dashboard, ingest and controllers. Ctrl-C stops it."""
    try:
        logs.to_stderr(logging.getLogger(), "%(asctime)s %(levelname)s %(name)s: %(message)s")
        os.environ[users.SHARE] = "1" if network.share_bus_password else "0"
        proxies = network.trusted_proxy, network.trust_proxy_header, network.proxy_role
        authentication = TokenOptions(token=tokens.token, token_file=tokens.token_file)
        alone = part.only is not None
        settings = Settings(
            database=endpoints.database or "",
            bus=endpoints.bus or "",
            host=endpoints.host,
            port=endpoints.port,
            token=authentication.read(),
            agent_token=tokens.agent_token or None,
            viewer_token=tokens.viewer_token or None,
            makes_token=not alone,
            max_body_bytes=network.max_body_bytes,
            max_streams=network.max_streams,
            path_prefix=network.path_prefix,
            hour_price=Price.of(runs.hour_price),
            webhook_origins=Origins.of(runs.webhook_to),
            # A part that runs alone has no embedded bus.
            trust_network=network.trust_network and not alone,
            tls_cert=network.tls_cert,
            tls_key=network.tls_key,
            keep_days=runs.keep_days,
            keep_runs=runs.keep_runs,
            keep_bytes=runs.keep_bytes,
            proxies=Proxies.of(*proxies),
        )
        code = _start(settings, endpoints.data, part)
    except PacelineError as error:
        typer.echo(f"paceline server: {error}", err=True)
        raise typer.Exit(_ENVIRONMENT) from error
    raise typer.Exit(code)


def _start(settings: Settings, data: Path, part: ServerPart) -> int:
    if part.only is None:
        return start_everything(settings, data, part.name)
    if not settings.bus or not settings.database:
        raise typer.BadParameter(
            "parts that run alone must share a bus and a database: give --bus and --database",
            param_hint="--only",
        )
    if part.only == "worker":
        return start_worker(settings, part.name)
    return start_web(settings)


def start_everything(settings: Settings, data: Path, name: str | None) -> int:
    """Start all parts, with an embedded database or bus if none is given. Return the exit code."""
    with uncollected():
        from paceline_backend.server.supervisor import DataDirectory, ServerSupervisor, listen
        from paceline_backend.store import Store, tokens

    with contextlib.ExitStack() as held:
        database, bus, embedded = settings.database, settings.bus, None
        directory = None if database and bus else held.enter_context(DataDirectory(data))
        listener = held.enter_context(listen(settings))
        port = listener.getsockname()[1]
        if directory is not None:
            embedded = None if bus else _embedded_bus(directory, settings)
            database = database or directory.database
            bus = embedded.url if embedded else bus
        beyond = embedded is not None and not is_loopback(settings.host)
        trusted = settings.trust_network and beyond
        settings = replace(settings, database=database, bus=bus, port=port, trust_network=trusted)
        # Create the tables before the parts start, so that they need not wait for each other.
        with Store.open(database) as store:
            if settings.token is None:
                folder = None if directory is None else directory.path
                made = str(tokens.embedded(store))
                held.enter_context(token_kept(settings.url, made, folder))
        name = name or f"{socket.gethostname()}:{port}"
        return ServerSupervisor(settings, embedded, _parts(settings, listener, name)).run()


def _parts(settings: Settings, listener: socket.socket, name: str) -> dict[str, Callable[[], int]]:
    with uncollected():
        from paceline_backend.api import web
        from paceline_backend.control import worker

    def work() -> int:
        listener.close()
        return worker.run(settings, name)

    return {"web": partial(web.run, settings, listener), "worker": work}


def _embedded_bus(directory: DataDirectory, settings: Settings) -> EmbeddedBus:
    if settings.trust_network:
        return directory.bus(settings.host)
    if not is_loopback(settings.host):
        log.warning(
            "agents on other machines cannot reach the embedded bus: start the server with "
            "--trust-network if the network is trusted, or with --bus"
        )
    return directory.bus()


def start_worker(settings: Settings, name: str | None) -> int:
    """Run the worker process. Return the exit code."""
    with uncollected():
        from paceline_backend.control import worker as process
    return process.run(settings, name or f"{socket.gethostname()}:pid-{os.getpid()}")


def start_web(settings: Settings) -> int:
    """Run the web process. Return the exit code."""
    with uncollected():
        from paceline_backend.api import web as process
        from paceline_backend.server import tracing
        from paceline_backend.server.supervisor import listen

    listener = listen(settings)
    if settings.token is None:
        command = "paceline token create NAME --scope admin --database URL"
        typer.echo(
            f"paceline server: without --token, `{command}` creates the first token", err=True
        )
    code = process.run(settings, listener)
    tracing.end_soon(code)
    return code


def _write_token(path: Path, token: str) -> None:
    part = path.with_suffix(".new")
    try:
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{token}\n")
        part.replace(path)
    except OSError as error:
        raise PacelineError(f"the token file {path} cannot be written: {error}") from error


@contextlib.contextmanager
def token_kept(server: str, token: str, data: Path | None) -> Iterator[None]:
    """Write the token to files, so that this user's commands find it while the server runs.

    One file is the user's own token file, from which the token is removed when the block ends. If
    `data` is given, the token is also written to the file `token` in this directory, which is kept.
    A failure to write the user's file is then only logged.

    Raises:
        PacelineError: the file in `data` cannot be written; or `data` is None, and the user's file
            cannot be written.
    """
    from paceline.node import tokens

    if data is not None:
        _write_token(data / "token", token)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(tokens.keeping(server, token))
        except OSError as error:
            if data is None:
                raise PacelineError(f"the server's token cannot be written: {error}") from error
            log.warning(
                "clients need --token-file %s, because the user's token file cannot be written: %s",
                data / "token",
                error,
            )
        yield
