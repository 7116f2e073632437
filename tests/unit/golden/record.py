"""Records the runs of the golden database with a real control plane, agent and ranks.

`make.py database` calls this. It takes some two minutes. Nothing of it runs in the tests.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.node.client import Client
from paceline_backend.server.stack import Stack
from support import relaxed_script
from support.chains import switch, wait_for_plan
from support.e2e import wait_for_end, wait_for_step
from support.waiting import until

Plain = dict[str, Any]

_CHAIN = ["bsp", "rna", "chronica", "local-sgd", "rna-hierarchical", "ad-psgd", "paceline"]
_STEPS = 6  # that each policy of the chain has at least
_FORECAST_S = 300.0  # that a forecast may take on a busy machine
_AUTO_STEPS = 130  # when `auto` is done: it looks twice, 100 steps apart, and switches
_CHAINED = {"a_s": [5e-6, 5e-6, 1e-5, 3e-5], "b_s": [0.003] * 4}
_WATCHED = {"a_s": [2e-5, 2e-5, 3e-5, 8e-5], "b_s": [0.01] * 4}

_SIMULATED: Plain = {
    "workers": 4,
    "global_batch": 32,
    "sizes": {"distribution": "lognormal", "mean": 45, "dif": 60, "samples": 700},
    "devices": {"unit_s": 3e-4, "step_s": 0.005, "factors": [1, 1, 1.5, 3], "noise": 0.05},
    "communication": {"latency_s": 1e-4, "fixed_s": 0.003},
    "epochs": 3,
}
_SCENARIOS: list[Plain] = [
    {
        "name": "switches",
        "policy": "bsp",
        "switches": [
            {"step": 9, "policy": "chronica", "parameters": {"picks": "paper"}},
            {"step": 18, "policy": "rna", "parameters": {"staleness": 2}},
            {"step": 27, "policy": "paceline", "parameters": {"mode": "free"}},
        ],
    },
    {
        "name": "failure",
        "policy": "paceline",
        "failures": [{"rank": 1, "step": 20, "restart_s": 2.0, "world": 3}],
    },
    {"name": "relaxed", "policy": "ssp", "switches": [{"step": 33, "policy": "local-sgd"}]},
    {
        "name": "chosen",
        "policy": "paceline-relaxed",
        "parameters": {"saving": 0.02, "hold": 1, "steps": 16},
        "devices": {
            "unit_s": 3e-4,
            "step_s": 0.005,
            "slowdowns": [{"ranks": [0, 1, 2, 3], "factor": 6.0, "chance": 0.2}],
        },
        "limits": [14, 14, 14, 14],
        "loss_mean": "size",
    },
]


def record(folder: Path) -> tuple[Path, list[str]]:
    """Trains and simulates on a server of its own.

    Returns:
        The database, without traces of this machine, and the ids of its runs.
    """
    with Stack(folder / "data", 0) as stack:
        _never_started(stack)
        _chained(stack, folder / "chained")
        for scenario in _SCENARIOS:
            _simulated(stack, folder, {**_SIMULATED, **scenario})
        _watched(stack, folder / "watched")
        runs = [run["id"] for run in stack.api("GET", "/runs")["items"]]
        with Client(stack.url, None, _FORECAST_S) as client:
            for run in runs:  # the server keeps the forecasts
                client.call("GET", f"/runs/{run}/whatif")
        until(lambda: _no_controllers(stack, runs), "leases to end")
    database = folder / "data" / "paceline.db"
    _anonymous(database)
    return database, runs


def _no_controllers(stack: Stack, runs: list[str]) -> bool:
    return not any(
        (stack.api("GET", f"/runs/{run}")["controller"] or {}).get("alive") for run in runs
    )


def _never_started(stack: Stack) -> None:
    scenario = {**_SIMULATED, **_SCENARIOS[0], "name": "never started"}
    body = {
        "name": "never started",
        "script": "scenario.yaml",
        "nproc": 4,
        "launch": False,
        "backend": "simulated",
        "scenario": scenario,
    }
    run = stack.api("POST", "/runs", body)["id"]
    stack.api("PUT", f"/runs/{run}/auto", {"mode": "recommend", "by": "operator"})
    stack.api("POST", f"/runs/{run}/stop", {})


def _simulated(stack: Stack, folder: Path, scenario: Plain) -> None:
    (folder / "scenario.yaml").write_text(json.dumps(scenario))
    command = ["simulate", "scenario.yaml", "--server", stack.url, "--json"]
    subprocess.run(
        [sys.executable, "-m", "paceline", *command], cwd=folder, check=True, stdout=sys.stderr
    )
    name = scenario["name"]
    run = stack.api("GET", f"/runs?name={name}")["items"][0]["id"]
    wait_for_end(stack, run)


def _start(stack: Stack, folder: Path, name: str, policy: str, emulate: Plain) -> str:
    folder.mkdir()
    environment = {
        "PACELINE_EMULATE": json.dumps(emulate),
        "PYTHONPATH": str(Path(relaxed_script.__file__).parents[1]),
    }
    body = {
        "name": name,
        "script": relaxed_script.__file__,
        "args": [str(folder)],
        "nproc": 4,
        "policy": policy,
        "env": environment,
    }
    run: str = stack.api("POST", "/runs", body)["id"]
    wait_for_plan(stack, run)
    return run


def _chained(stack: Stack, folder: Path) -> None:
    run = _start(stack, folder, "chained", _CHAIN[0], _CHAINED)
    wait_for_step(stack, run, _STEPS)
    for number, name in enumerate(_CHAIN[1:], 1):
        switch(stack, run, number, name, _STEPS)
    (folder / "enough").touch()
    wait_for_end(stack, run)


def _watched(stack: Stack, folder: Path) -> None:
    run = _start(stack, folder, "watched", "bsp", _WATCHED)
    stack.api("PUT", f"/runs/{run}/auto", {"mode": "switch", "by": "operator"})

    def reached() -> bool:
        now = stack.api("GET", f"/runs/{run}")
        assert now["state"] == "running", now["message"]
        return (now["step"] or 0) >= _AUTO_STEPS and now["version"] > 0

    _patiently(reached, 240)
    (folder / "enough").touch()
    wait_for_end(stack, run)


def _patiently(condition: Callable[[], bool], timeout_s: float) -> None:
    """Waits for a condition, or until the time is over: then what there is must do."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not condition():
        time.sleep(0.5)


def _anonymous(database: Path) -> None:
    """Removes paths and names of this machine, and makes the database one small file."""
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.execute("PRAGMA journal_mode = DELETE")
    for statement in (
        "UPDATE nodes SET id = 'node', report = json_set(report, '$.hostname', 'node', "
        "'$.cores', 2, '$.memory_bytes', 8589934592, '$.gpus', json('[]'), '$.runs', json('[]'))",
        "UPDATE runs SET node = 'node' WHERE node IS NOT NULL AND node <> ''",
        "UPDATE runs SET script = 'train.py', args = '[\"replicas\"]', cwd = '/training' "
        "WHERE backend = 'local'",
        "UPDATE runs SET env = json_remove(env, '$.PYTHONPATH')",
        "UPDATE runs SET cwd = '/training' WHERE cwd IS NOT NULL",
        "UPDATE leases SET owner = 'worker'",
        "VACUUM",
    ):
        connection.execute(statement)
    connection.close()
