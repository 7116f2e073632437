"""A control plane over an empty database, for whoever knows the documentation only."""

from __future__ import annotations

import httpx
import pytest

from paceline_backend.store import Store, nodes
from support.reported import Plane
from support.web import ANY


@pytest.fixture
def plane(
    store: Store, client: httpx.Client, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> Plane:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy
    client.headers.update(ANY)
    client.base_url = httpx.URL(f"{client.base_url}/api/v1/")
    return Plane(store, bus_url, client)
