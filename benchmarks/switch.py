"""How long a policy switch takes, from the REST call to the first step under the new policy.

PLAID trains on 4 real ranks with emulated device speeds and the embedded stack. The policy goes
back and forth between bsp and chronica. The peer, in the same run, is what a change of policy costs
without live switches: the time from starting another run until its first step.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Check, finish, parser

from paceline_backend.demo import emulation, example
from paceline_backend.server.stack import Stack

SLOWDOWNS = [1.0, 1.0, 1.5, 3.0]


def start(stack: Stack) -> dict[str, Any]:
    """Starts training; returns the run once it has done three steps."""
    run = stack.api(
        "POST",
        "/runs",
        {
            "name": "switch-benchmark",
            "script": str(example("plaid") / "train.py"),
            "args": ["--epochs", "1000"],
            "nproc": len(SLOWDOWNS),
            "policy": "bsp",
            "env": {"PACELINE_EMULATE": json.dumps(emulation(SLOWDOWNS))},
        },
    )
    return wait(stack, run["id"], lambda now: (now["step"] or 0) >= 3)


def wait(stack: Stack, run: str, until: Any, timeout_s: float = 60.0) -> dict[str, Any]:
    """Polls a run until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        now: dict[str, Any] = stack.api("GET", f"/runs/{run}")
        if until(now):
            return now
        time.sleep(0.05)
    raise TimeoutError(f"run {run} is {now['state']} at step {now['step']}: {now['message']}")


def first_step_at(stack: Stack, run: str, step: int) -> tuple[float, float]:
    """When a step began (Unix time), and how long it took."""
    while True:
        rows = stack.api("GET", f"/runs/{run}/steps?from={step}&to={step}")
        if rows["step"]:
            return rows["ended_at"][0] - rows["step_s"][0], rows["step_s"][0]
        time.sleep(0.02)


def switch(stack: Stack, run: str, policy: str) -> dict[str, float]:
    """One switch: its latency in seconds and in steps."""
    asked = time.time()
    version = stack.api("POST", f"/runs/{run}/policy", {"policy": policy, "by": "benchmark"})[
        "version"
    ]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        made = stack.api("GET", f"/runs/{run}/switches")[version]
        if made["effective_step"] is not None:
            began, step_s = first_step_at(stack, run, made["effective_step"])
            earlier = made["effective_step"] - 1
            ended = stack.api("GET", f"/runs/{run}/steps?from=0&to={earlier}&points=5000")
            before = sum(1 for at in ended["ended_at"] if at > asked)
            return {"latency_s": began - asked, "steps": before, "step_s": step_s}
        time.sleep(0.02)
    raise TimeoutError(f"the switch to {policy} did not take effect in 60 s")


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__).parse_args()
    count = 6 if options.quick else 20
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), 0) as stack:
        begun = time.time()
        run = start(stack)["id"]
        began, _ = first_step_at(stack, run, 0)
        peer_s = began - begun
        rows = []
        for turn in range(count):
            time.sleep(rng.uniform(0.3, 1.5))  # anywhere within a segment
            rows.append(switch(stack, run, ("chronica", "bsp")[turn % 2]))
        stack.api("POST", f"/runs/{run}/stop", {"force": True})
    latency = statistics.median(row["latency_s"] for row in rows)
    steps = statistics.median(row["steps"] for row in rows)
    step_s = statistics.median(row["step_s"] for row in rows)
    bound = max(1.0, 4 * step_s)
    results = {
        "latency_s": {"median": latency, "max": max(row["latency_s"] for row in rows)},
        "steps": {"median": steps, "max": max(row["steps"] for row in rows)},
        "step_s": {"median": step_s},
        "restart_s": peer_s,
        "switches": rows,
    }
    table = (
        f"{count} switches: median {latency:.2f} s, {steps:g} steps of {step_s:.2f} s; "
        f"slowest {results['latency_s']['max']:.2f} s\n"
        f"without a live switch, start of another run until its first step: {peer_s:.2f} s"
    )
    checks = [Check("median switch, s (1 s or 4 steps)", latency, bound, "<=")]
    finish(options, {"switches": count, "slowdowns": SLOWDOWNS}, results, checks, table)


if __name__ == "__main__":
    main()
