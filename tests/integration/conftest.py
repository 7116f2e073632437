"""What most tests here start from: an empty SQLite database, a server, a bus, commands, ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import httpx
    import redis

    from paceline_backend.store import Store
    from support.command_line import Main
    from support.ranks import Ranks


@pytest.fixture
def store(tmp_path: Path, _sqlite: Path) -> Iterator[Store]:
    from paceline_backend.store import Store

    with Store.open(f"sqlite:///{shutil.copy(_sqlite, tmp_path / 'paceline.db')}") as opened:
        yield opened


@pytest.fixture
def client(store: Store, bus_url: str) -> Iterator[httpx.Client]:
    """The web application over the store."""
    from support.web import serving

    with serving(store, bus_url) as opened:
        yield opened


@pytest.fixture
def bus(bus_url: str) -> Iterator[redis.Redis]:
    from paceline.wire.bus import connect

    with connect(bus_url) as opened:
        yield opened


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    from support.command_line import in_process

    return in_process(monkeypatch, capsys)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """As many as the module's `WORLD`; two where it has none."""
    from support.ranks import Ranks

    pool = Ranks(getattr(request.module, "WORLD", 2))
    yield pool
    pool.stop()
