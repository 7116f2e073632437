"""Training with a framework is the framework's own where a controller plans for uneven ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline_backend.server.stack import Stack
from support.frameworks import ROOT, planned

pytestmark = pytest.mark.ranks

TRAINED = {"count": 320, "epochs": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("server"), 0) as running:
        yield running


@pytest.mark.parametrize("framework", ["accelerate", "transformers", "lightning"])
def test_training_is_the_frameworks_own(server: Stack, tmp_path: Path, framework: str) -> None:
    script = ROOT / "tests" / "support" / f"{framework}_script.py"
    (got, wanted), (other, _) = planned(
        server, script, tmp_path, TRAINED, {**TRAINED, "plain": True}
    )
    assert loss(got) == pytest.approx(loss(wanted), abs=1e-5)
    assert sum(other["counts"]) < 0.8 * sum(got["counts"])  # rank 1 is slow


def loss(result: dict[str, Any]) -> float:
    """Of all samples, in the end."""
    return float(result["losses"][-1] if "losses" in result else result["loss"])
