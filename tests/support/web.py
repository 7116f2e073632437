"""The web application on a real socket, in a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn

from paceline_backend.api.app import create_app
from paceline_backend.server.settings import MAX_BODY_BYTES, Settings
from paceline_backend.store import Store


@contextmanager
def serving(
    store: Store,
    bus_url: str,
    token: str | None = None,
    port: int = 0,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Iterator[httpx.Client]:
    """A client of the application over this store and bus; base URL is the server's root."""
    database = store.url.render_as_string(hide_password=False)
    settings = Settings(database, bus_url, token=token, max_body_bytes=max_body_bytes)
    app = create_app(store, settings)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5))
    app.state.closing = lambda: server.should_exit
    listener = socket.create_server(("127.0.0.1", port))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive(), "the server did not stop"
