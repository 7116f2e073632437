"""The web application over an empty database."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from paceline_backend.store import Store
from support.web import serving


@pytest.fixture
def store(tmp_path: Path, _sqlite: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{shutil.copy(_sqlite, tmp_path / 'paceline.db')}") as opened:
        yield opened


@pytest.fixture
def client(store: Store, bus_url: str) -> Iterator[httpx.Client]:
    with serving(store, bus_url) as opened:
        yield opened
