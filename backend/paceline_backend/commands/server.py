"""Command `paceline server`: its options, and the `Settings` built from them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.commands.options import given
from paceline.core import logs
from paceline.core.errors import PacelineError
from paceline_backend.commands import parts
from paceline_backend.commands.options import DATA, Data, Database
from paceline_backend.server import users
from paceline_backend.server.origins import Origins
from paceline_backend.server.prices import Price
from paceline_backend.server.settings import MAX_BODY_BYTES, MAX_STREAMS, Proxies, Settings

# Exit code; see docs/internals.md.
_ENVIRONMENT = 3

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")]
Bus = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_BUS",
        help="redis:// URL that agents can reach, too; default: an embedded bus on loopback.",
    ),
]
AdminToken = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_TOKEN",
        help="Token of an admin; required beyond loopback. Other users can see arguments: prefer "
        "the variable or --token-file.",
    ),
]
AdminTokenFile = Annotated[
    Path | None, typer.Option(envvar="PACELINE_TOKEN_FILE", help="File with the admin's token.")
]
AgentToken = Annotated[
    str | None,
    typer.Option(envvar="PACELINE_AGENT_TOKEN", help="Token for the agents of all nodes."),
]
ViewerToken = Annotated[
    str | None,
    typer.Option(envvar="PACELINE_VIEWER_TOKEN", help="Token for viewers, who may only read."),
]
MaxBodyBytes = Annotated[
    int,
    typer.Option(
        envvar="PACELINE_MAX_BODY_BYTES", min=1024, help="Maximum size of a request's body."
    ),
]
TrustNetwork = Annotated[
    bool,
    typer.Option(
        "--trust-network",
        envvar="PACELINE_TRUST_NETWORK",
        help="Let the embedded bus listen on --host: in clear text, so that anybody who can read "
        "the traffic can start programs.",
    ),
]
ShareBusPassword = Annotated[
    bool,
    typer.Option(
        "--share-bus-password",
        envvar=users.SHARE,
        help="If the server may not create users on the bus: give nodes and runs the server's own "
        "URL of the bus. Anybody who has that URL can read and write everything there.",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        envvar="PACELINE_TLS_CERT", help="PEM file with the certificate chain: serves HTTPS."
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(envvar="PACELINE_TLS_KEY", help="PEM file with the key; default: in --tls-cert."),
]
TrustedProxy = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_TRUSTED_PROXY",
        metavar="10.0.0.5,…",
        help="Addresses or networks of HTTP proxies whose X-Forwarded-For and -Proto are trusted.",
    ),
]
TrustProxyHeader = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_TRUST_PROXY_HEADER",
        metavar="X-Forwarded-User",
        help="Header in which these proxies, and no other clients, name the user.",
    ),
]
ProxyRole = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_PROXY_ROLE",
        metavar="USER=ROLE,…",
        help="Role of a user whom proxies name: viewer, operator or admin; default: viewer.",
    ),
]
WebhookTo = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_WEBHOOK_TO",
        metavar="https://HOST,…",
        help="Origins that alerts may be sent to by webhook; default: none.",
    ),
]
HourPrice = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_HOUR_PRICE",
        metavar="'2.50 EUR'",
        help="Price of a worker-hour, to show costs also in money.",
    ),
]
MaxStreams = Annotated[
    int,
    typer.Option(
        envvar="PACELINE_MAX_STREAMS", min=1, help="Maximum number of event streams per client."
    ),
]
PathPrefix = Annotated[
    str,
    typer.Option(
        envvar="PACELINE_PATH_PREFIX",
        metavar="/PATH",
        help="Path below which a reverse proxy serves this server.",
    ),
]
KeepDays = Annotated[
    float | None,
    typer.Option(
        envvar="PACELINE_KEEP_DAYS",
        min=0,
        help="Delete runs that ended more than this many days ago.",
    ),
]
KeepRuns = Annotated[
    int | None,
    typer.Option(
        envvar="PACELINE_KEEP_RUNS",
        min=0,
        help="Of the runs that have ended, keep only this many of the newest.",
    ),
]
KeepBytes = Annotated[
    int | None,
    typer.Option(
        envvar="PACELINE_KEEP_BYTES",
        min=0,
        help="Delete the oldest runs that have ended until the database's rows take at most this "
        "many bytes.",
    ),
]
Part = Annotated[
    Literal["web", "worker"] | None,
    typer.Option(help="Run only this part; requires --bus and --database."),
]
WorkerName = Annotated[
    str | None,
    typer.Option(
        help="Unique name of this worker, best kept across restarts. Default: host and port, or "
        "with --only worker host and process."
    ),
]
ListeningSocket = Annotated[int | None, typer.Option(hidden=True)]


def server(
    host: Host = "127.0.0.1",
    port: Port = 8000,
    database: Database = None,
    bus: Bus = None,
    data: Data = DATA,
    token: AdminToken = None,
    token_file: AdminTokenFile = None,
    agent_token: AgentToken = None,
    viewer_token: ViewerToken = None,
    max_body_bytes: MaxBodyBytes = MAX_BODY_BYTES,
    trust_network: TrustNetwork = False,
    share_bus_password: ShareBusPassword = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    trusted_proxy: TrustedProxy = None,
    trust_proxy_header: TrustProxyHeader = None,
    proxy_role: ProxyRole = None,
    max_streams: MaxStreams = MAX_STREAMS,
    path_prefix: PathPrefix = "",
    webhook_to: WebhookTo = None,
    hour_price: HourPrice = None,
    keep_days: KeepDays = None,
    keep_runs: KeepRuns = None,
    keep_bytes: KeepBytes = None,
    only: Part = None,
    name: WorkerName = None,
    fd: ListeningSocket = None,
) -> None:
    """Start the control plane: REST, dashboard, ingest and controllers. Ctrl-C stops it."""
    try:
        logs.to_stderr(logging.getLogger(), "%(asctime)s %(levelname)s %(name)s: %(message)s")
        os.environ[users.SHARE] = "1" if share_bus_password else "0"
        settings = Settings(
            database=database or "",
            bus=bus or "",
            host=host,
            port=port,
            token=given(token, token_file),
            agent_token=agent_token or None,
            viewer_token=viewer_token or None,
            makes_token=only is None,
            max_body_bytes=max_body_bytes,
            max_streams=max_streams,
            path_prefix=path_prefix,
            hour_price=Price.of(hour_price),
            webhook_origins=Origins.of(webhook_to),
            # A part that runs alone has no embedded bus, unless a parent process started it.
            trust_network=trust_network and (only is None or fd is not None),
            tls_cert=tls_cert,
            tls_key=tls_key,
            keep_days=keep_days,
            keep_runs=keep_runs,
            keep_bytes=keep_bytes,
            proxies=Proxies.of(trusted_proxy, trust_proxy_header, proxy_role),
        )
        code = _start(settings, data, name, only, fd)
    except PacelineError as error:
        typer.echo(f"paceline server: {error}", err=True)
        raise typer.Exit(_ENVIRONMENT) from error
    raise typer.Exit(code)


def _start(
    settings: Settings,
    data: Path,
    name: str | None,
    only: Literal["web", "worker"] | None,
    listener: int | None,
) -> int:
    if only is None:
        return parts.everything(settings, data, name)
    if not settings.bus or not settings.database:
        raise typer.BadParameter(
            "parts that run alone must share a bus and a database: give --bus and --database",
            param_hint="--only",
        )
    return parts.worker(settings, name) if only == "worker" else parts.web(settings, listener)
