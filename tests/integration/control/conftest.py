"""A database of each kind, and an engine over it and a bus."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from paceline_backend.store import Store, nodes
from support.engine import TableRuns, table_engine


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store.open(database_url) as opened:
        yield opened


@pytest.fixture
def table(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TableRuns]:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy
    with table_engine():
        yield TableRuns(store, bus, bus_url)
