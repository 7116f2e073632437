"""Who holds a run up, and why: in the scripted scenarios of the benchmark."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("verdicts")


@pytest.mark.parametrize("name", ["verdicts", "verdicts_tuned"])
@pytest.mark.parametrize("sick", [True, False])
def test_scripted_scenarios(name: str, sick: bool, benchmark: ModuleType) -> None:
    """Of each kind of scenario one is judged; one in fifty may be wrong."""
    module = benchmark.cases_of(BENCHMARKS / "strangers" / f"{name}.py")
    kinds = module.KINDS if sick else module.HEALTHY
    judged = [
        benchmark.judged(make(np.random.default_rng([1, at]), at))
        for at, make in enumerate(kinds.values())
    ]
    wrong = [(row["name"], row["told"], row["true"]) for row in judged if not row["right"]]
    assert len(wrong) <= len(kinds) // 50, wrong
    costs = [good for row in judged for good in row["costs"]]
    assert sum(costs) >= 0.95 * len(costs)
