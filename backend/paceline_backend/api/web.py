"""The web process."""

from __future__ import annotations

import logging
import socket
import threading

import uvicorn

from paceline_backend import policies
from paceline_backend.api.app import create_app
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store

_GRACE_S = 5  # for calls in progress; event streams end by themselves


def run(settings: Settings, listener: socket.socket) -> int:
    """Serves on a bound socket until SIGTERM or SIGINT; its exit code.

    Raises:
        StoreError: the database cannot be used.
    """
    with Store.open(settings.database) as store:
        app = create_app(store, settings)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level=logging.WARNING,
                log_config=None,
                timeout_graceful_shutdown=_GRACE_S,
                server_header=False,
            )
        )
        app.state.closing = lambda: server.should_exit
        # Imports policies and their solvers, which takes seconds: neither the start nor the first
        # switch shall wait for it.
        threading.Thread(target=policies.names, name="policies", daemon=True).start()
        server.run(sockets=[listener])
    return 0
