"""The web application on a real socket, in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import httpx
import uvicorn
from fastapi import FastAPI
from fastapi.routing import _IncludedRouter
from starlette.routing import BaseRoute

from paceline.node import tokens
from paceline_backend.api.app import create_app
from paceline_backend.server.origins import Origins
from paceline_backend.server.prices import Price
from paceline_backend.server.settings import MAX_BODY_BYTES, MAX_STREAMS, Proxies, Settings
from paceline_backend.server.supervisor import listen
from paceline_backend.store import Store
from support.waiting import DEADLINE_S, until

ANY = {"If-Match": "*"}  # headers of a change that is made whatever others have done
ADMIN = "admin-of-tests-0123456789abcdef"
SIGNED_IN = {"Authorization": f"Bearer {ADMIN}"}


_applications: WeakKeyDictionary[httpx.Client, FastAPI] = WeakKeyDictionary()


def application(client: httpx.Client) -> FastAPI:
    """What a client of `serving` talks to."""
    return _applications[client]


@contextmanager
def serving(
    store: Store,
    bus_url: str,
    token: str | None = None,
    port: int = 0,
    max_body_bytes: int = MAX_BODY_BYTES,
    proxies: Proxies | None = None,
    max_streams: int = MAX_STREAMS,
    path_prefix: str = "",
    webhook_origins: Origins | None = None,
    hour_price: Price | None = None,
    agent_token: str | None = None,
) -> Iterator[httpx.Client]:
    """A client of the application over this store and bus; base URL is the server's root.

    Args:
        token: an admin's, which the client does not send. None: `ADMIN`, which the client sends,
            and which the command line finds while the server works.
        port: to listen on; 0: any.
        path_prefix: below which a proxy serves it.
        webhook_origins: where webhooks may be; None: nowhere.
        agent_token: that the configuration gives.
    """
    database = store.url.render_as_string(hide_password=False)
    settings = Settings(
        database,
        bus_url,
        port=port,
        token=token or ADMIN,
        max_body_bytes=max_body_bytes,
        max_streams=max_streams,
        path_prefix=path_prefix,
        webhook_origins=webhook_origins or Origins(),
        hour_price=hour_price,
        agent_token=agent_token,
        proxies=proxies or Proxies(),
    )
    app = create_app(store, settings)
    _share_routes(app)
    _share_document(app, path_prefix)
    server = _Server(
        uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5, proxy_headers=False)
    )
    app.state.closing = lambda: server.should_exit
    listener = listen(settings)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    headers = SIGNED_IN if token is None else {}
    with ExitStack() as held:
        held.callback(_stop, server, thread)
        until(lambda: server.started or not thread.is_alive(), "the web application")
        assert server.started, "the web application ended"
        if token is None:
            held.enter_context(tokens.keeping(url, ADMIN))
        client = held.enter_context(
            httpx.Client(
                base_url=url, headers=headers, timeout=DEADLINE_S, trust_env=False, verify=False
            )
        )
        _applications[client] = app
        yield client


_routes: dict[tuple[int, str], BaseRoute] = {}  # of the first application, by router and path


def _share_routes(app: FastAPI) -> None:
    """Give an application the API's routes of the first one, for which FastAPI has prepared them.

    Preparing them takes longer than most tests, and nothing in them is of one application.
    """
    for at, route in enumerate(app.router.routes):
        if isinstance(route, _IncludedRouter):
            key = id(route.original_router), route.include_context.prefix
            app.router.routes[at] = _routes.setdefault(key, route)


_documents: dict[str, dict[str, Any]] = {}  # OpenAPI, by prefix


def _share_document(app: FastAPI, path_prefix: str) -> None:
    """Give an application the OpenAPI document of the first one with its prefix: it takes 1 s."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if path_prefix not in _documents:
            _documents[path_prefix] = make()
        return _documents[path_prefix]

    app.openapi = openapi  # type: ignore[method-assign]


class _Server(uvicorn.Server):
    """Ends soon: the other one looks ten times a second whether it should."""

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            await asyncio.sleep(0.01)


def _stop(server: uvicorn.Server, thread: threading.Thread) -> None:
    server.should_exit = True
    thread.join(timeout=DEADLINE_S)
    assert not thread.is_alive(), "the server did not stop"
