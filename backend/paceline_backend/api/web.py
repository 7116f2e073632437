"""The web process."""

from __future__ import annotations

import gc
import logging
import socket
import threading

import uvicorn

from paceline_backend import policies
from paceline_backend.api.app import create_app
from paceline_backend.server import tracing
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store

_GRACE_S = 5  # for calls in progress; event streams end by themselves


def run(settings: Settings, listener: socket.socket) -> int:
    """Serves on a bound socket until SIGTERM or SIGINT; its exit code.

    Raises:
        StoreError: the database cannot be used.
    """
    tracing.configure("web")
    with Store.open(settings.database) as store:
        app = create_app(store, settings)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level=logging.WARNING,
                log_config=None,
                timeout_graceful_shutdown=_GRACE_S,
                server_header=False,
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
                proxy_headers=False,  # `ProxyIdentity` does this, for trusted proxies alone
            )
        )
        app.state.closing = lambda: server.should_exit
        threading.Thread(target=_import_policies, name="policies", daemon=True).start()
        server.run(sockets=[listener])
    return 0


def _import_policies() -> None:
    """Imports policies and their solvers: neither the start nor the first switch waits for them."""
    policies.names()
    # What stays for ever is not searched for garbage again: that held up one answer in twenty for
    # a tenth of a second.
    gc.collect()
    gc.freeze()
