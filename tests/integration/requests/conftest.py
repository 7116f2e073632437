"""A control plane in this process, whose nodes stay alive without heartbeats."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from paceline_backend.store import Store, nodes
from support.web import ANY, serving


@pytest.fixture
def store(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy
    with Store.open(database_url) as opened:
        yield opened


@pytest.fixture
def client(store: Store, bus_url: str) -> Iterator[httpx.Client]:
    with serving(store, bus_url) as made:
        made.headers.update(ANY)
        made.base_url = httpx.URL(f"{made.base_url}/api/v1/")
        yield made
