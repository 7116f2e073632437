"""The web process, which `paceline server` forks, or `paceline server --only web` runs alone."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn

from paceline import policies
from paceline_backend.api.app import create_app
from paceline_backend.server import tracing
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store

# Maximum time for requests in progress to complete at shutdown.
_REQUESTS_END_S = 5  # seconds
# Exit code after SIGINT; see docs/internals.md.
_INTERRUPTED = 130
# Interval at which the time in the `Date` header of responses is updated.
_DATE_S = 1.0  # seconds


class _Server(uvicorn.Server):
    """Uvicorn's server with a main loop that wakes up once a second instead of ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._wake: Callable[[], object] = lambda: None

    async def main_loop(self) -> None:
        woken, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(woken.set)
        # With a counter of 0, each tick of uvicorn updates the date.
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), _DATE_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._wake()


def run(settings: Settings, listener: socket.socket) -> int:
    """Serve on a bound socket until SIGTERM or SIGINT. Return the exit code.

    Call this on the main thread, because it handles signals.
    """
    code = 0

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal code
        code = _INTERRUPTED if number == signal.SIGINT else 0
        server.should_exit = True

    tracing.configure("web")
    with Store.open(settings.database) as store:
        app = create_app(store, settings)
        server = _Server(
            uvicorn.Config(
                app,
                log_level=logging.WARNING,
                log_config=None,
                timeout_graceful_shutdown=_REQUESTS_END_S,
                server_header=False,
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
                # `ProxyIdentity` evaluates the headers instead, but only those of trusted proxies.
                proxy_headers=False,
            )
        )
        app.state.closing = lambda: server.should_exit
        app.state.loaded = _freeze
        threading.Thread(target=_import_policies, name="policies", daemon=True).start()
        # When uvicorn has shut down, it restores these handlers and raises the signal again. The
        # default handler would end the process before pending spans are exported.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        server.run(sockets=[listener])
    return code


def _import_policies() -> None:
    """Import policies and solvers in advance, so that the first switch need not wait for that."""
    policies.names()
    _freeze()


def _freeze() -> None:
    """Exclude all objects that exist now from garbage collection.

    Most of these objects belong to modules, which stay for the lifetime of the process. Before this
    exclusion, garbage collection delayed one response in twenty by 0.1 s.
    """
    gc.collect()
    gc.freeze()
