"""The whole product on free ports: server, bus, SQLite, agent and real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.processes import free_port
from paceline_backend.stack import Stack


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """A running embedded stack with one agent."""
    with Stack(tmp_path / "data", free_port()) as running:
        yield running
