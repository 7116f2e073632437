"""A control plane over an empty database, for whoever knows the documentation only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from paceline_backend.store import Store, nodes
from support.reported import Plane
from support.web import ANY, serving


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with tables: to copy it takes less than to migrate."""
    path = tmp_path_factory.mktemp("empty") / "paceline.db"
    with Store.open(f"sqlite:///{path}"):
        pass
    return path


@pytest.fixture
def plane(
    tmp_path: Path, empty: Path, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Plane]:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy
    path = shutil.copy(empty, tmp_path)
    with Store.open(f"sqlite:///{path}") as store, serving(store, bus_url) as client:
        client.headers.update(ANY)
        client.base_url = httpx.URL(f"{client.base_url}/api/v1/")
        yield Plane(store, bus_url, client)
