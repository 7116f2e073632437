"""What end-to-end tests share: starting training on four emulated ranks, and waiting."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.wire import PLANNED
from paceline_backend.demo import example
from paceline_backend.server.stack import Stack
from support.waiting import TRAINING_S, until

TESTS = Path(__file__).parents[1]
# A third of the demo's times: steps of some 0.1 to 0.2 s on four ranks.
SLOWDOWNS = [1.0, 1.0, 1.5, 3.0]
SECONDS_PER_UNIT = 12e-6
OVERHEAD_S = 0.003
ENDLESS = 10_000  # epochs: more than any test waits for; `stop` ends the run
PAUSE_S = 0.2  # between two requests: those of a busy test would hold up the run's own


def start_training(stack: Stack, epochs: int = ENDLESS, policy: str = "bsp") -> str:
    """Starts PLAID training on four emulated ranks; the run's id."""
    emulate = {
        "a_s": [SECONDS_PER_UNIT * s for s in SLOWDOWNS],
        "b_s": [OVERHEAD_S] * len(SLOWDOWNS),
    }
    run = stack.api(
        "POST",
        "/runs",
        {
            "script": str(example("plaid") / "train.py"),
            "args": ["--epochs", str(epochs)],
            "nproc": len(SLOWDOWNS),
            "policy": policy,
            "env": {"PACELINE_EMULATE": json.dumps(emulate)},
        },
    )
    return str(run["id"])


def start_script(
    stack: Stack,
    script: ModuleType,
    folder: Path,
    nproc: int,
    policy: str,
    emulate: Mapping[str, Any] | None = None,
) -> str:
    """Starts a script of the tests, which writes into a folder; the run's id.

    Args:
        emulate: the ranks' speeds; None: real ones.
    """
    emulated = {} if emulate is None else {"PACELINE_EMULATE": json.dumps(emulate)}
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    body = {
        "script": script.__file__,
        "args": [str(folder)],
        "nproc": nproc,
        "policy": policy,
        "env": {**emulated, "PYTHONPATH": path},
    }
    return str(stack.api("POST", "/runs", body)["id"])


def wait_for_step(stack: Stack, run: str, step: int) -> None:
    def reached() -> bool:
        now = stack.api("GET", f"/runs/{run}")
        assert now["state"] not in ("failed", "stopped"), now["message"]
        return (now["step"] if now["step"] is not None else -1) >= step

    until(reached, f"step {step} of run {run}", TRAINING_S, PAUSE_S)


def wait_for_end(stack: Stack, run: str, state: str = "finished") -> dict[str, Any]:
    """Until the run has finished, or is in another state; fails when it ended otherwise."""

    def ended() -> Any:
        now = stack.api("GET", f"/runs/{run}")
        return now if now["state"] in ("finished", "failed", "stopped") else None

    now: dict[str, Any] = until(ended, f"the end of run {run}", TRAINING_S, PAUSE_S)
    assert now["state"] == state, now["message"]
    return now


def stop(stack: Stack, run: str) -> dict[str, Any]:
    """Ends a run in order, and waits until all of its steps are in the database; the run."""
    stack.api("POST", f"/runs/{run}/stop", {"force": False})
    now = wait_for_end(stack, run, "stopped")

    def arrived() -> bool:
        return bool(stack.api("GET", f"/runs/{run}/coverage")["exact"])

    until(arrived, f"all of run {run}", TRAINING_S, PAUSE_S)
    return now


def controllers_segments(stack: Stack, run: str) -> list[dict[str, Any]]:
    segments = stack.api("GET", f"/runs/{run}/segments")
    return [segment for segment in segments if segment["source"] == "controller"]


def planned_segments(stack: Stack, run: str) -> list[dict[str, Any]]:
    """Those of a policy: of a controller, or of rank 0 where a busy machine delayed it."""
    segments = stack.api("GET", f"/runs/{run}/segments")
    return [segment for segment in segments if segment["source"] in PLANNED]


def planned_effect(stack: Stack, run: str) -> list[float]:
    """Straggler effect of each complete step, from the seconds that ranks emulate.

    A busy machine's own delays are not in it: it tells what a policy did on any machine.
    """
    columns = stack.api("GET", f"/runs/{run}/worker-steps?points=5000")
    assert columns["bucket"] == 1
    effects = []
    for loads in zip(*columns["load"], strict=True):
        if None in loads:
            continue
        compute_s = [
            SECONDS_PER_UNIT * slowdown * load + OVERHEAD_S
            for slowdown, load in zip(SLOWDOWNS, loads, strict=True)
        ]
        effects.append(max(compute_s) / statistics.mean(compute_s) - 1)
    return effects


def all_steps(stack: Stack, run: str) -> dict[str, Any]:
    """Every step of a run, not downsampled."""
    steps: dict[str, Any] = stack.api("GET", f"/runs/{run}/steps?points=5000")
    assert steps["bucket"] == 1
    return steps
