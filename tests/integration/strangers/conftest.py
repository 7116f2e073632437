"""A control plane over an empty database, for whoever knows the documentation only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from paceline_backend.store import Store, nodes
from support.reported import Plane
from support.web import ANY, serving


@pytest.fixture
def plane(tmp_path: Path, bus_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    monkeypatch.setattr(nodes, "ALIVE_S", 3600)  # the machine may be busy
    with (
        Store.open(f"sqlite:///{tmp_path / 'paceline.db'}") as store,
        serving(store, bus_url) as client,
    ):
        client.headers.update(ANY)
        client.base_url = httpx.URL(f"{client.base_url}/api/v1/")
        yield Plane(store, bus_url, client)
