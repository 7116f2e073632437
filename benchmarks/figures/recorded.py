"""Figures of other benchmarks, as `benchmarks/results` keeps them."""

from __future__ import annotations

import json
import math
import statistics
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
read: set[Path] = set()  # records that were asked for; the ledger clears it before each row


def results(name: str) -> dict[str, Any]:
    """Return the results of a benchmark's record, `name` without its ending."""
    path = RESULTS / f"{name}.json"
    read.add(path)
    return _results(path)


@cache
def _results(path: Path) -> dict[str, Any]:
    of: dict[str, Any] = json.loads(path.read_text())["results"]
    return of


def trainings(record: str, scenario: str) -> dict[str, list[dict[str, Any]]]:
    """Contender → its runs with each seed, of `benchmarks/synchronisers.py`."""
    of: dict[str, list[dict[str, Any]]] = results(record)["scenarios"][scenario]
    return of


def mean(runs: list[dict[str, Any]], figure: str) -> float:
    """Mean of a figure over seeds; infinite if some seed never got there."""
    values = [math.inf if run[figure] is None else run[figure] for run in runs]
    return statistics.fmean(values)
