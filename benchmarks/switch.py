"""Duration of a policy switch, from the REST call to the first step under the new policy.

PLAID trains on 4 real ranks with emulated device speeds and the embedded stack. The policy
alternates between bsp and chronica. The baseline, in the same run, is a change of policy without
live switches: the time from starting another run until its first step.

With --nodes 3, a rank trains on each of three nodes instead, which are network namespaces of this
machine and need root. A step of a small model takes 0.1 s. The database then shows if the policy
took effect at the same step on all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Api, Check, finish, parser, wait

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from paceline_backend.demo import emulation, example
from paceline_backend.server.stack import Stack
from support.machines import Cluster
from support.network import network

SLOWDOWNS = [1.0, 1.0, 1.5, 3.0]


def start(api: Api) -> str:
    """Start training on this node, and return the run's id."""
    run = api(
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
    return str(run["id"])


@contextlib.contextmanager
def on_one_node(folder: Path) -> Iterator[tuple[Api, str]]:
    """Start a run on this node, and yield the REST client and the run's id."""
    with Stack(folder, 0) as stack:
        yield stack.api, start(stack.api)


@contextlib.contextmanager
def on_nodes(folder: Path, nodes: int) -> Iterator[tuple[Api, str]]:
    """Start a run with a rank on each node, and yield the REST client and the run's id."""
    with network(nodes) as made, Cluster(made, folder) as cluster:
        cluster.start_agents(*range(1, nodes + 1))
        yield cluster.api, cluster.start_run(nodes, nodes, 100_000)


def first_step_at(api: Api, run: str, step: int) -> tuple[float, float]:
    """Return a step's start (Unix time) and duration in seconds, once it is complete."""
    while True:
        rows = api("GET", f"/runs/{run}/steps?from={step}&to={step}")
        if rows["step"]:
            return rows["ended_at"][0] - rows["step_s"][0], rows["step_s"][0]
        time.sleep(0.02)


def switch(api: Api, run: str, policy: str) -> dict[str, float]:
    """Switch the policy; return the latency in seconds and in steps, and the time of a step."""
    asked = time.time()
    version = api("POST", f"/runs/{run}/policy", {"policy": policy, "by": "benchmark"})["version"]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        made = api("GET", f"/runs/{run}/switches")[version]
        if made["effective_step"] is not None:
            began, step_s = first_step_at(api, run, made["effective_step"])
            earlier = made["effective_step"] - 1
            ended = api("GET", f"/runs/{run}/steps?from=0&to={earlier}&points=5000")
            before = sum(1 for at in ended["ended_at"] if at > asked)
            return {"latency_s": began - asked, "steps": before, "step_s": step_s}
        time.sleep(0.02)
    raise TimeoutError(f"the switch to {policy} did not take effect in 60 s")


def differing(database: Path) -> int:
    """Return the number of policy versions whose first step differs between ranks."""
    query = """
        SELECT s.version, w.rank, min(w.step) FROM worker_steps w
        JOIN segments s ON s.run = w.run AND s.attempt = w.attempt AND s.seq = w.segment
        GROUP BY s.version, w.rank
    """
    first: dict[int, set[int]] = {}
    with contextlib.closing(sqlite3.connect(database)) as known:
        for version, _, step in known.execute(query):
            first.setdefault(version, set()).add(step)
    return sum(len(steps) > 1 for steps in first.values())


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--nodes", type=int, default=1, help="number of nodes; above 1 needs root")
    given = options.parse_args()
    count = 6 if given.quick else 20
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begun = time.time()
        trains = on_one_node(folder) if given.nodes == 1 else on_nodes(folder, given.nodes)
        with trains as (api, run):
            wait(api, run, lambda now: (now["step"] or 0) >= 3)
            began, _ = first_step_at(api, run, 0)
            peer_s = began - begun
            rows = []
            for turn in range(count):
                # Request the switch anywhere within a segment.
                time.sleep(rng.uniform(0.3, 1.5))
                rows.append(switch(api, run, ("chronica", "bsp")[turn % 2]))
            api("POST", f"/runs/{run}/stop", {"force": True})
        odd = differing(folder / "server" / "paceline.db") if given.nodes > 1 else 0
    report(given, rows, peer_s, odd)


def report(options: Any, rows: list[dict[str, float]], peer_s: float, odd: int) -> None:
    """Print and check the switches. `peer_s` is the baseline, and `odd` is from `differing`."""
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
        f"{len(rows)} switches on {options.nodes} nodes, load average {os.getloadavg()[0]:.1f}: "
        f"median {latency:.2f} s, {steps:g} steps of {step_s:.2f} s; "
        f"slowest {results['latency_s']['max']:.2f} s\n"
        f"without a live switch, start of another run until its first step: {peer_s:.2f} s"
    )
    checks = [
        Check("median switch, s (1 s or 4 steps)", latency, bound, "<="),
        Check("switches at different steps of ranks", odd, 0, "<="),
    ]
    about = {"switches": len(rows), "slowdowns": SLOWDOWNS, "nodes": options.nodes}
    finish(options, about, results, checks, table)


if __name__ == "__main__":
    main()
