"""Training with a framework is the framework's own where a controller plans for uneven ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline_backend.server.stack import Stack
from support.frameworks import ROOT, planned
from support.marks import some_long

pytestmark = pytest.mark.ranks

FRAMEWORKS = ["transformers", "accelerate", "lightning"]
TRAINED = {"count": 320, "epochs": 8}


@pytest.mark.parametrize("framework", some_long(FRAMEWORKS, 3))
def test_training_is_the_frameworks_own(
    shared_stack: Stack, tmp_path: Path, framework: str
) -> None:
    script, plain = script_of(framework), {**TRAINED, "plain": True}
    _, ((got, wanted), (other, _)) = planned(shared_stack, script, tmp_path, TRAINED, plain)
    assert loss(got) == pytest.approx(loss(wanted), abs=1e-5)
    assert sum(other["counts"]) < 0.8 * sum(got["counts"])  # rank 1 is slow


@pytest.mark.long
@pytest.mark.parametrize("policy", ["rna", "local-sgd"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_relaxed_policy_comes_into_force(
    shared_stack: Stack, tmp_path: Path, framework: str, policy: str
) -> None:
    run, ranks = planned(shared_stack, script_of(framework), tmp_path, TRAINED, policy=policy)
    assert shared_stack.api("GET", f"/runs/{run}/rounds?limit=5")
    assert loss(ranks[0][0]) == loss(ranks[1][0])  # replicas have met


def script_of(framework: str) -> Path:
    return ROOT / "tests" / "support" / f"{framework}_script.py"


def loss(result: dict[str, Any]) -> float:
    """Of all samples, in the end."""
    return float(result["losses"][-1] if "losses" in result else result["loss"])
