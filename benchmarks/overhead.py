"""Overhead of a session per training step, compared with plain DDP in the same process.

Real ranks train a small model on the CPU; nothing is emulated. Each pair has a step of plain DDP
and a step of a session, in an order that changes from pair to pair, with a barrier before each
step. `alone` has no control plane, as under torchrun. `managed` has a control plane, which plans
and stores every step, and whose processes share the machine's cores with the ranks.

In addition to the time of a step, the CPU time of the script's own thread is measured, which
excludes waiting for other ranks and threads.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import Check, finish, parser, wait

from paceline_backend.server.stack import Stack

SCRIPT = Path(__file__).with_name("overhead_script.py")
PAIRS = 2_000
GOAL_US, THREAD_GOAL_US = 200.0, 120.0


def alone(folder: Path, world: int, pairs: int) -> None:
    """Train under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(world), str(SCRIPT), str(folder), str(pairs)]
    subprocess.run(launcher, check=True, stdout=sys.stderr)


def managed(folder: Path, world: int, pairs: int) -> None:
    """Train under a control plane."""
    with Stack(folder / "stack", 0) as stack:
        body = {
            "name": "overhead",
            "script": str(SCRIPT),
            "args": [str(folder), str(pairs)],
            "nproc": world,
            "policy": "bsp",
        }
        run = stack.api("POST", "/runs", body)["id"]
        ended = wait(stack.api, run, lambda now: now["ended_at"] is not None)
        if ended["state"] != "finished":
            raise RuntimeError(f"the run ended as {ended['state']}: {folder}")


WAYS = {"alone": alone, "managed": managed}


def measure(way: str, world: int, pairs: int) -> dict[str, Any]:
    """Train in one way (see `WAYS`) with `world` ranks, and return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        WAYS[way](Path(folder), world, pairs)
        files = sorted(Path(folder).glob("rank-*.json"))
        rows = np.array([row for file in files for row in json.loads(file.read_text())])
    # The columns are the fields of `support.gpu_cases.Pair`.
    plain, paced, plain_cpu, paced_cpu = 1e6 * rows.T
    return {
        "pairs": len(rows) // world,
        "plain_us": float(np.median(plain)),
        "over_us": float(np.median(paced - plain)),
        "over_p95_us": float(np.quantile(paced - plain, 0.95)),
        "over_mean_us": float(np.mean(paced - plain)),
        "thread_us": float(np.median(paced_cpu - plain_cpu)),
        "thread_p95_us": float(np.quantile(paced_cpu - plain_cpu, 0.95)),
    }


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--pairs", type=int, default=PAIRS, help="pairs of steps; default: %(default)s"
    )
    options = arguments.parse_args()
    pairs = 200 if options.quick else options.pairs
    results = {
        f"{way}, {world} ranks": measure(way, world, pairs)
        for world in ((2,) if options.quick else (2, 4))
        for way in WAYS
    }
    checks = []
    for name, row in results.items():
        if name.endswith(", 2 ranks"):
            checks += [
                Check(f"median µs that a session adds, {name}", row["over_us"], GOAL_US, "<="),
                Check(
                    f"of them the script's thread, {name}", row["thread_us"], THREAD_GOAL_US, "<="
                ),
            ]
    heads = ("plain_us", "over_us", "over_p95_us", "over_mean_us", "thread_us", "thread_p95_us")
    lines = [" " * 20 + "".join(f"{head:>15}" for head in heads)]
    lines += [
        f"{name:<20}" + "".join(f"{row[head]:>15.0f}" for head in heads)
        for name, row in results.items()
    ]
    finish(options, {"pairs": pairs}, results, checks, "\n".join(lines))


if __name__ == "__main__":
    main()
