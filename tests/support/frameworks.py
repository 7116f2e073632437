"""Runs a framework's script on two ranks: alone, or as a run that a controller plans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import paceline_backend
from paceline_backend.server.stack import Stack
from support.e2e import wait_for_end

WORLD = 2
ROOT = Path(__file__).parents[2]
# Rank 1 is three times slower: half of a step's 300 words take it 90 ms.
EMULATE = {"a_s": [2e-4, 6e-4], "b_s": [0.004, 0.004]}
_QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
_LONGEST_S = 500

Results = list[list[Any]]  # of each rank, of each case


def environment() -> dict[str, str]:
    packages = Path(paceline_backend.__file__).parents[1]
    path = [str(ROOT / "tests"), str(ROOT / "agent"), str(packages)]
    given = os.environ.get("PYTHONPATH")
    return {**_QUIET, "PYTHONPATH": os.pathsep.join(path + ([given] if given else []))}


def results(script: Path | str, directory: Path, *cases: Any) -> Results:
    """What cases of a script give, on each rank: without a control plane."""
    forked = ROOT / "tests" / "support" / "forked_script.py"
    ended = subprocess.run(
        [sys.executable, str(forked), str(script), str(directory), *map(_as_argument, cases)],
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return read(directory)


def planned(
    stack: Stack, script: Path | str, directory: Path, *cases: Any, policy: str = "paceline"
) -> tuple[str, Results]:
    """The run, and the same; a controller plans the first case, for ranks of uneven speeds."""
    body = {
        "script": str(script),
        "args": [str(directory), *map(_as_argument, cases)],
        "nproc": WORLD,
        "policy": policy,
        "env": {**environment(), "PACELINE_EMULATE": json.dumps(EMULATE)},
    }
    run = str(stack.api("POST", "/runs", body)["id"])
    wait_for_end(stack, run)
    losses = stack.api("GET", f"/runs/{run}/steps?points=5000")["loss"]
    assert None not in losses  # the adapter reports them
    return run, read(directory)


def _as_argument(case: Any) -> str:
    return case if isinstance(case, str) else json.dumps(case)


def read(directory: Path) -> Results:
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(WORLD)]
