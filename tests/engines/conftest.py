"""Three nodes and a control plane, on a network of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.machines import Cluster
from support.network import network


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with network(3) as nodes, Cluster(nodes, tmp_path) as made:
        yield made
