"""Verdicts on the scenarios of the benchmark."""

from __future__ import annotations

import importlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
EACH = 3  # scenarios of each kind; further ones of a kind are verdicts' former misses


@pytest.fixture(scope="module")
def benchmark() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("verdicts")


def by_kind(benchmark: Any) -> dict[str, list[dict[str, Any]]]:
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for spec in benchmark.scenarios():
        kinds[spec["kind"]].append(spec)
    return kinds


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("healthy", [False, True])
def test_scripted_scenarios(healthy: bool, number: int, benchmark: Any) -> None:
    """Of each kind of scenario one is judged; one in fifty may be wrong."""
    specs = [some[number] for some in by_kind(benchmark).values() if some[0]["healthy"] == healthy]
    assert len(specs) == (21 if healthy else 75)
    judged = [benchmark.judged(benchmark.make(spec, at)) for at, spec in enumerate(specs)]
    wrong = [(row["name"], row["named"], row["true"]) for row in judged if not row["right"]]
    assert len(wrong) <= len(specs) // 50, wrong
    costs = [good for row in judged for good in row["costs"]]
    assert sum(costs) >= 0.95 * len(costs)


# Scenarios that verdicts had wrong: kind, number within the kind, and whether it still is wrong.
MISSES = [
    ("plan makes up for slow ranks half-way", 3, False),
    ("plan makes up for slow ranks half-way", 4, False),
    ("noisy neighbour on one rank", 3, True),  # three spans at equal distances
    ("pauses of one rank among hundreds", 3, False),
    ("storage hangs for all ranks in some steps", 3, False),
    ("planning that becomes slow", 3, False),
    ("planning that becomes slow", 4, False),
    ("planning that becomes slow", 5, False),
    ("planning that becomes slow", 6, False),
    ("two: slow rank, and a noisy neighbour on another that is worse", 3, True),
    ("plan makes up for slow ranks some steps late", 3, True),
]


def test_every_further_scenario_is_a_former_miss(benchmark: Any) -> None:
    further = [
        (kind, number)
        for kind, specs in by_kind(benchmark).items()
        for number in range(EACH, len(specs))
    ]
    assert sorted(further) == sorted((kind, number) for kind, number, _ in MISSES)


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        pytest.param(kind, number, marks=[pytest.mark.xfail(strict=True)] if wrong else [])
        for kind, number, wrong in MISSES
    ],
)
def test_misses(kind: str, number: int, benchmark: Any) -> None:
    row = benchmark.judged(benchmark.make(by_kind(benchmark)[kind][number], 3))
    assert row["right"], (row["named"], row["true"])
