"""Common functions of all benchmarks.

A program gets its options from `parser`, measures, and ends with `finish`, which prints a table, or
with ``--json`` one object with the commit, the machine, the configuration, the results and the
checks. The program exits with 1 if a check fails. `interleaved` measures several ways of doing the
same work in turn, so that other load on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

# Function that sends a request (method, path below /api/v1, body), and returns the answer.
Api = Callable[..., Any]

_OPERATORS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


@dataclass
class Check:
    """Comparison of a figure with its bound. `op` is "<=" or ">="."""

    name: str
    value: float
    bound: float
    op: str

    @property
    def ok(self) -> bool:
        """True if the figure keeps the bound."""
        return _OPERATORS[self.op](self.value, self.bound)


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Return the commit that is checked out, or an empty string outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print only one JSON object")
    made.add_argument("--quick", action="store_true", help="a reduced set, in under 50 s")
    return made


def report(
    config: Mapping[str, Any], results: Mapping[str, Any], checks: list[Check]
) -> dict[str, Any]:
    """Return the JSON document of a run of the benchmark."""
    rows = [{**asdict(check), "ok": check.ok} for check in checks]
    made = {"commit": commit(), "machine": machine()}
    return {**made, "config": config, "results": results, "checks": rows}


def finish(
    options: argparse.Namespace,
    config: Mapping[str, Any],
    results: Mapping[str, Any],
    checks: list[Check],
    table: str,
) -> NoReturn:
    """Print the table, or everything as JSON, and exit with 1 if a check failed."""
    if options.json:
        print(json.dumps(report(config, results, checks)))
    else:
        print(table)
        for check in checks:
            verdict = "ok  " if check.ok else "MISS"
            print(f"{verdict} {check.name}: {check.value:.4g} {check.op} {check.bound:.4g}")
    sys.exit(0 if all(check.ok for check in checks) else 1)


def interleaved(
    ways: Mapping[str, Callable[[], Any]], pairs: int, warm: int = 0
) -> list[dict[str, Any]]:
    """Run several functions in turn and in random order, which is the same on all ranks.

    Each function runs `warm` times without counting. Return the results by name, for each of
    `pairs` further turns.
    """
    shuffled, turns = random.Random(1), []
    for _ in range(warm + pairs):
        order = shuffled.sample([*ways], len(ways))
        turns.append({name: ways[name]() for name in order})
    return turns[warm:]


def median_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the ratios, and the low and high end of its 95 % bootstrap interval."""
    drawn = np.random.default_rng(1).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)


def percent(values: Sequence[bool]) -> float:
    """Return the percentage of values that are true, or 100 without values."""
    return 100 * float(np.mean(values)) if len(values) else 100.0


def percentiles(values: Sequence[float], *which: float) -> dict[str, float]:
    """Return percentiles by name, such as `p99`. The default is 50, 95 and 99."""
    which = which or (50, 95, 99)
    return {f"p{q:g}": float(at) for q, at in zip(which, np.percentile(values, which), strict=True)}


def wait(
    api: Api, run: str, until: Any, timeout_s: float = 300.0, every_s: float = 0.05
) -> dict[str, Any]:
    """Poll a run of a control plane until `until(run)` is true; return the run.

    Raises:
        RuntimeError: the run has failed.
        TimeoutError: the condition was not true within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        now: dict[str, Any] = api("GET", f"/runs/{run}")
        if until(now):
            return now
        if now["state"] == "failed":
            raise RuntimeError(f"run {run} failed: {now['message']}")
        time.sleep(every_s)
    raise TimeoutError(f"run {run} is {now['state']} at step {now['step']}: {now['message']}")
