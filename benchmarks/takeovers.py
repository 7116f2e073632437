"""Kills of control plane and bus during one run: nothing is lost, doubled or planned twice.

Four ranks with emulated speeds train under a control plane, beside processes that keep all cores
busy. The server, the bus or both are killed many times. Rank 0 plans meanwhile; once the server is
back, its controller takes over. The seconds count from the moment when the server is
ready, or the bus runs again, to the adoption of the controller's first plan.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from harness import Check, finish, parser, percentiles

from paceline_backend.demo import example
from paceline_backend.insight.replay import replay
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store
from paceline_backend.testing.control_plane import until

KINDS = ("server", "bus", "both")
SLOWNESS = (1.0, 1.0, 1.5, 3.0)
UNIT_S, STEP_S = 12e-6, 0.003  # a step of the example takes 0.1 to 0.2 s


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy."""
    load = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for process in load:
            process.kill()
            process.wait()


def bus(stack: Stack) -> psutil.Process | None:
    """Return the process of the bus, which is a child of the server."""
    assert stack.server is not None
    for child in psutil.Process(stack.server.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "valkey" in child.name() and child.status() != psutil.STATUS_ZOMBIE:
                return child
    return None


def ran(stack: Stack, run: str, newest: int) -> list[dict[str, Any]]:
    """Return the newest segments that ran, at most so many."""
    made: list[dict[str, Any]] = stack.api("GET", f"/runs/{run}/segments?limit={newest}")
    return made


def kill(stack: Stack, run: str, kind: str, away_s: float) -> dict[str, Any]:
    """Kill the server, the bus or both; return when a controller plans again.

    A killed server is started again after `away_s` seconds; it starts a killed bus again itself.
    """
    assert stack.server is not None
    victim = until(lambda: bus(stack), "the bus")
    killed_at = time.time()
    if kind != "server":
        victim.kill()
        victim.wait()
    if kind != "bus":
        stack.server.kill()
        stack.server.wait()
        time.sleep(away_s)
        stack.start_server()
    until(lambda: bus(stack), "the bus")
    ready_at = time.time()

    def taken_over() -> dict[str, Any] | None:
        made = [s for s in ran(stack, run, 50) if s["source"] == "controller"]
        return next((s for s in made if s["adopted_at"] > ready_at), None)

    first = until(taken_over, "a plan of the controller")
    return {
        "kind": kind,
        "away_s": ready_at - killed_at,
        "takeover_s": first["adopted_at"] - ready_at,
    }


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--kills", type=int, default=50)
    options = arguments.parse_args()
    kills = 3 if options.quick else options.kills
    rng, outcomes = random.Random(1), []
    emulate = {"a_s": [UNIT_S * slow for slow in SLOWNESS], "b_s": [STEP_S] * len(SLOWNESS)}
    body = {
        "script": str(example("plaid") / "train.py"),
        "args": ["--epochs", "10000"],
        "nproc": len(SLOWNESS),
        "policy": "paceline",
        "env": {"PACELINE_EMULATE": json.dumps(emulate)},
    }
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder) / "stack", 0) as stack:
        run = stack.api("POST", "/runs", body)["id"]
        until(lambda: (stack.api("GET", f"/runs/{run}")["step"] or 0) > 20, "the first steps")
        with busy_cores():
            for number in range(kills):
                kind, away_s = rng.choice(KINDS), rng.uniform(0.5, 6.0)
                outcomes.append(kill(stack, run, kind, away_s))
                print(number, outcomes[-1], file=sys.stderr, flush=True)
        stack.api("POST", f"/runs/{run}/stop", {"force": False})
        until(lambda: stack.api("GET", f"/runs/{run}")["ended_at"], "the end")
        until(lambda: stack.api("GET", f"/runs/{run}/coverage")["exact"], "coverage")
        workers = stack.api("GET", f"/runs/{run}/workers")
        segments = ran(stack, run, 100_000)
        now = stack.api("GET", f"/runs/{run}")
        with Store.open(f"sqlite:///{stack.data / 'paceline.db'}") as store:
            again = replay(store, run)
    twice = [
        later["seq"]
        for before, later in pairwise(segments)
        if later["first_step"] < before["first_step"] + before["steps"]
    ]
    seconds = [outcome["takeover_s"] for outcome in outcomes]
    missing = sum(worker["missing"] for worker in workers)
    results = {
        "outcomes": outcomes,
        "takeover_s": percentiles(seconds, 50, 90, 100),
        "steps": now["step"] + 1,
        "segments": dict(Counter(segment["source"] for segment in segments)),
        "planned_twice": twice,
        "missing_rows": missing,
        "replayed": [again.identical, again.segments, again.first_difference],
    }
    checks = [
        Check("steps that two segments planned", len(twice), 0, "<="),
        Check("missing rows", missing, 0, "<="),
        Check("plans that replay made otherwise", again.segments - again.identical, 0, "<="),
        Check(
            "seconds until a controller took over, median", results["takeover_s"]["p50"], 5, "<="
        ),
    ]
    config = {"kills": kills, "slowness": SLOWNESS, "busy": True}
    finish(options, config, results, checks, json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
