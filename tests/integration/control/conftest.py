"""A database and a bus, each new for a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from paceline.wire.bus import connect
from paceline_backend.store import Store


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store.open(database_url) as opened:
        yield opened


@pytest.fixture
def bus(bus_url: str) -> Iterator[redis.Redis]:
    with connect(bus_url) as client:
        yield client
