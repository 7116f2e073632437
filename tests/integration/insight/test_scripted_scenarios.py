"""Who is slow, and why: in the scripted scenarios of the benchmark."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def scenarios(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark with its scenarios."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("attribution")


@pytest.mark.parametrize("kind", ["node", "data", "transient", "input", "none"])
def test_scripted_scenarios(kind: str, scenarios: ModuleType) -> None:
    judged = [scenarios.judge(1_000 + at, kind) for at in range(10 if kind == "none" else 3)]
    assert [row["words"] for row in judged if not row["right"]] == []
