"""How soon another worker plans a run whose worker was killed, and how soon a dead agent is shown.

PLAID trains on real ranks with the embedded stack and a second worker. Whoever plans the run is
killed (kill -9), again and again. The time counts from the kill to the next proposal on the bus.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from harness import Check, finish, parser

from paceline.node.processes import die_with_parent
from paceline.wire import control
from paceline.wire.bus import connect
from paceline_backend.demo import example
from paceline_backend.server.stack import Stack
from paceline_backend.server.supervisor import embedded_database

STANDBY = "standby"


def standby(stack: Stack, bus: str) -> subprocess.Popen[bytes]:
    """The second worker."""
    return subprocess.Popen(
        [sys.executable, "-m", "paceline_backend.cli", "--only", "worker", "--name", STANDBY],
        env={
            **os.environ,
            "PACELINE_DATABASE": embedded_database(stack.data.resolve()),
            "PACELINE_BUS": bus,
        },
        preexec_fn=die_with_parent,
    )


def first_worker(stack: Stack) -> psutil.Process:
    """The worker that the stack's server looks after."""
    assert stack.server is not None
    while True:
        for child in psutil.Process(stack.server.pid).children():
            if "worker" in child.cmdline():
                return child
        time.sleep(0.02)


def proposal(bus: str, run: str, after_ms: int, timeout_s: float = 60.0) -> float:
    """When the first plan was proposed after a time, Unix time."""
    deadline = time.monotonic() + timeout_s
    with connect(bus) as client:
        while time.monotonic() < deadline:
            entries: Any = client.xrange(control(run), min=f"({after_ms}", count=1)
            if entries:
                return int(entries[0][0].partition(b"-")[0]) / 1e3
            time.sleep(0.01)
    raise TimeoutError(f"nobody planned {run} in {timeout_s:g} s")


def planned(stack: Stack, run: str) -> str:
    """Who plans the run, once somebody has planned a while."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        newest: list[dict[str, Any]] = stack.api("GET", f"/runs/{run}/segments")[-3:]
        now: dict[str, Any] = stack.api("GET", f"/runs/{run}")
        if len(newest) == 3 and all(segment["source"] == "controller" for segment in newest):
            return str(now["controller"]["owner"])
        time.sleep(0.05)
    raise TimeoutError(f"nobody plans {run}")


def settled(*workers: psutil.Process) -> None:
    """Waits until the workers have imported and compiled what planning needs."""
    for worker in workers:
        while worker.cpu_percent(interval=2.0) > 20:
            pass


def takeover(stack: Stack, bus: str, run: str, second: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Kills who plans the run; how long nobody plans it."""
    owner = planned(stack, run)
    workers = first_worker(stack), psutil.Process(second.pid)
    settled(*workers)
    process = workers[owner == STANDBY]
    killed = time.time()
    process.kill()
    process.wait(10)
    return {"killed": owner, "plan_s": proposal(bus, run, int(1e3 * killed)) - killed}


def agent_death(stack: Stack) -> float:
    """Kills the agent; how long its node is shown as alive."""
    assert stack.agent is not None
    killed = time.monotonic()
    stack.agent.kill()
    while stack.api("GET", "/nodes")[0]["alive"]:
        time.sleep(0.05)
    return time.monotonic() - killed


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__).parse_args()
    count = 4 if options.quick else 20
    rng = random.Random(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), 0) as stack:
        bus = stack.api("GET", "/version")["bus"]
        second = standby(stack, bus)
        try:
            body = {
                "script": str(example("plaid") / "train.py"),
                "args": ["--epochs", "1000"],
                "nproc": 2,
                "policy": "chronica",
            }
            run = stack.api("POST", "/runs", body)["id"]
            for _ in range(count):
                planned(stack, run)
                time.sleep(rng.uniform(3.0, 6.0))  # the other worker starts; any part of a lease
                rows.append(takeover(stack, bus, run, second))
                if second.poll() is not None:
                    second = standby(stack, bus)
            dead_s = agent_death(stack)
        finally:
            second.kill()
            second.wait()
    plans = [row["plan_s"] for row in rows]
    table = (
        f"{count} kills: first plan after {statistics.median(plans):.2f} s (median), slowest "
        f"{max(plans):.2f} s; the agent's death is shown after {dead_s:.2f} s"
    )
    checks = [
        Check("slowest first plan, s", max(plans), 5.0, "<="),
        Check("agent shown as dead, s", dead_s, 10.0, "<="),
    ]
    results = {"takeovers": rows, "agent_dead_s": dead_s}
    finish(options, {"kills": count}, results, checks, table)


if __name__ == "__main__":
    main()
