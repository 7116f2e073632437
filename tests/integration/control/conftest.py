"""A database and a bus, each new for a test, and an engine over them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from paceline.wire.bus import connect
from paceline_backend.store import Store, nodes
from support.engine import TableRuns, table_engine


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store.open(database_url) as opened:
        yield opened


@pytest.fixture
def bus(bus_url: str) -> Iterator[redis.Redis]:
    with connect(bus_url) as client:
        yield client


@pytest.fixture
def table(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TableRuns]:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy
    with table_engine():
        yield TableRuns(store, bus, bus_url)
