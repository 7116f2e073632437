"""Start of a control plane for `paceline server`: all parts, or one of them.

Each function imports what only its part needs, so that the command starts quickly.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.wire.bus import is_loopback
from paceline_backend.server.settings import Settings

if TYPE_CHECKING:
    from paceline_backend.server.embedded import EmbeddedBus
    from paceline_backend.server.supervisor import DataDirectory

log = logging.getLogger(__name__)


def everything(settings: Settings, data: Path, name: str | None) -> int:
    """Start all parts. Embed a database or bus that is not given. Return the exit code."""
    from paceline_backend.server import token_file
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
        # Migrate the database before the parts start, so that they need not wait for each other.
        with Store.open(database) as store:
            if settings.token is None:
                folder = None if directory is None else directory.path
                made = str(tokens.embedded(store))
                held.enter_context(token_file.kept(settings.url, made, folder))
        name = name or f"{socket.gethostname()}:{port}"
        return ServerSupervisor(settings, listener, embedded, name).run()


def _embedded_bus(directory: DataDirectory, settings: Settings) -> EmbeddedBus:
    if settings.trust_network:
        return directory.bus(settings.host)
    if not is_loopback(settings.host):
        log.warning(
            "agents on other machines cannot reach the embedded bus: start the server with "
            "--trust-network if the network is trusted, or with --bus"
        )
    return directory.bus()


def worker(settings: Settings, name: str | None) -> int:
    """Run the worker process. Return the exit code."""
    from paceline_backend.control import worker as process

    return process.run(settings, name or f"{socket.gethostname()}:pid-{os.getpid()}")


def web(settings: Settings, fd: int | None) -> int:
    """Run the web process, on the listening socket `fd` if given. Return the exit code."""
    from paceline_backend.api import web as process
    from paceline_backend.server.supervisor import listen

    listener = listen(settings) if fd is None else socket.socket(fileno=fd)
    # With a socket from its parent, the parent has created the first token.
    if settings.token is None and fd is None:
        command = "paceline token create NAME --scope admin --database URL"
        typer.echo(
            f"paceline server: without --token, `{command}` creates the first token", err=True
        )
    return process.run(settings, listener)
