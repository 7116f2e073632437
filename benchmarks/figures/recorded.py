"""Figures of other benchmarks, which are stored in `benchmarks/results`."""

from __future__ import annotations

import json
import math
import statistics
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
# Records that were read. The ledger clears the set before each row.
read: set[Path] = set()


def results(name: str) -> dict[str, Any]:
    """Return the results in a benchmark's record. `name` is the file's name without extension."""
    path = RESULTS / f"{name}.json"
    read.add(path)
    return _results(path)


@cache
def _results(path: Path) -> dict[str, Any]:
    of: dict[str, Any] = json.loads(path.read_text())["results"]
    return of


def trainings(record: str, scenario: str) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of `benchmarks/synchronisers.py` with each seed, by contender."""
    of: dict[str, list[dict[str, Any]]] = results(record)["scenarios"][scenario]
    return of


def mean(runs: list[dict[str, Any]], figure: str) -> float:
    """Return the mean of a figure over seeds, or infinity if it is None for any seed."""
    values = [math.inf if run[figure] is None else run[figure] for run in runs]
    return statistics.fmean(values)
