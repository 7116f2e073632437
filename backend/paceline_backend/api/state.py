"""Functions through which routes get the objects that `create_app` makes once per process."""

from __future__ import annotations

from fastapi import Request

from paceline.wire.bus import at_host
from paceline_backend.insight.reuse import Reused
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store


def store_of(request: Request) -> Store:
    """Return the application's store."""
    store: Store = request.app.state.store
    return store


def reused_of(request: Request) -> Reused:
    """Return the application's cache of computed results."""
    reused: Reused = request.app.state.reused
    return reused


def settings_of(request: Request) -> Settings:
    """Return the application's settings."""
    settings: Settings = request.app.state.settings
    return settings


def bus_url(request: Request, url: str) -> str:
    """Return the URL of the bus as the caller reaches it.

    If the embedded bus is open to the network, the URL has the host of the request's URL, because
    the bus listens on the same machine as this server.
    """
    host = request.url.hostname
    return at_host(url, host) if settings_of(request).trust_network and host else url
