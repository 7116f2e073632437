"""What every benchmark shares: options, the machine, checks, and the two ways to print."""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

_OPERATORS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


@dataclass
class Check:
    """A figure against its bound."""

    name: str
    value: float
    bound: float
    op: str  # "<=" or ">="

    @property
    def ok(self) -> bool:
        """Whether the figure keeps the bound."""
        return _OPERATORS[self.op](self.value, self.bound)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Return the commit that is checked out; empty outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--json", action="store_true", help="one JSON object alone on standard output"
    )
    made.add_argument("--quick", action="store_true", help="a reduced set, in under 50 s")
    return made


def report(
    config: Mapping[str, Any], results: Mapping[str, Any], checks: list[Check]
) -> dict[str, Any]:
    """The JSON document of a run of the benchmark."""
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
    """Prints the table, or everything as JSON, and exits 1 when a check failed."""
    if options.json:
        print(json.dumps(report(config, results, checks)))
    else:
        print(table)
        for check in checks:
            verdict = "ok  " if check.ok else "MISS"
            print(f"{verdict} {check.name}: {check.value:.4g} {check.op} {check.bound:.4g}")
    sys.exit(0 if all(check.ok for check in checks) else 1)
