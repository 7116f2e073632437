"""What end-to-end tests share: starting training on four emulated ranks, and waiting."""

from __future__ import annotations

import json
from typing import Any

from paceline_backend.demo import example
from paceline_backend.server.stack import Stack
from support.waiting import until

# A third of the demo's times: steps of some 0.1 to 0.2 s on four ranks.
SLOWDOWNS = [1.0, 1.0, 1.5, 3.0]
SECONDS_PER_UNIT = 12e-6
PAUSE_S = 0.2  # between two requests: those of a busy test would hold up the run's own


def start_training(stack: Stack, epochs: int, policy: str = "bsp") -> str:
    """Starts PLAID training on four emulated ranks; the run's id."""
    emulate = {"a_s": [SECONDS_PER_UNIT * s for s in SLOWDOWNS], "b_s": [0.003] * len(SLOWDOWNS)}
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


def wait_for_step(stack: Stack, run: str, step: int) -> None:
    """Until the run has a step, as REST tells it."""

    def reached() -> bool:
        now = stack.api("GET", f"/runs/{run}")
        assert now["state"] not in ("failed", "stopped"), now["message"]
        return (now["step"] if now["step"] is not None else -1) >= step

    until(reached, f"step {step} of run {run}", 90, PAUSE_S)


def wait_for_end(stack: Stack, run: str) -> dict[str, Any]:
    """Until the run has finished; fails when it ended otherwise."""

    def ended() -> Any:
        now = stack.api("GET", f"/runs/{run}")
        return now if now["state"] in ("finished", "failed", "stopped") else None

    now: dict[str, Any] = until(ended, f"the end of run {run}", 150, PAUSE_S)
    assert now["state"] == "finished", now["message"]
    return now


def all_steps(stack: Stack, run: str) -> dict[str, Any]:
    """Every step of a run, not downsampled."""
    steps: dict[str, Any] = stack.api("GET", f"/runs/{run}/steps?points=5000")
    assert steps["bucket"] == 1
    return steps
