"""The same training without a server, planned by rank 0, and with one, planned by a controller.

Ranks have emulated speeds, sizes are lognormal, and steps take about 0.1 s if they are balanced. In
each pair both trainings run on the same machine, one after the other, in random order; an epoch's
time is compared. Weights after it are compared, too: they are equal where the policy is exact.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import Check, finish, interleaved, parser, wait

from paceline_backend.server.stack import Stack

SCRIPT = Path(__file__).with_name("local_script.py")
# Mean size of the samples, which are lognormal(3, 0.8).
MEAN = float(np.exp(3 + 0.8**2 / 2))
STEP_S, PER_RANK = 0.1, 16
MOST = 1.03


def emulation(slowness: list[float]) -> str:
    """Return ``PACELINE_EMULATE`` for ranks with these relative times per size unit."""
    a_s = STEP_S / (MEAN * PER_RANK * len(slowness)) * sum(1 / slow for slow in slowness)
    return json.dumps({"a_s": [a_s * slow for slow in slowness], "b_s": [0.0] * len(slowness)})


def train(way: str, policy: str, slowness: list[float], steps: int, epochs: int) -> dict[str, Any]:
    """Train in one way, "local" or "managed"; return the results of the last epoch."""
    world = len(slowness)
    batch = PER_RANK * world
    with tempfile.TemporaryDirectory() as folder:
        arguments = [folder, str(batch * steps), str(batch), str(epochs)]
        env = {"PACELINE_EMULATE": emulation(slowness), "OMP_NUM_THREADS": "1"}
        if way == "local":
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            launcher += ["--nproc-per-node", str(world), str(SCRIPT), *arguments]
            env = {**os.environ, **env, "PACELINE_POLICY": policy, "PACELINE_DATA": folder}
            subprocess.run(launcher, check=True, stdout=sys.stderr, env=env)
        else:
            with Stack(Path(folder) / "stack", 0) as stack:
                body = {"name": "local", "script": str(SCRIPT), "args": arguments, "nproc": world}
                run = stack.api("POST", "/runs", {**body, "policy": policy, "env": env})["id"]
                ended = wait(stack.api, run, lambda now: now["ended_at"] is not None, 3_600)
                if ended["state"] != "finished":
                    raise RuntimeError(f"the run ended as {ended['state']}: {ended['message']}")
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
    samples = sum(rank["epochs"][-1]["samples"] for rank in ranks)
    if samples != batch * steps:
        raise RuntimeError(f"{way}: the epoch trained {samples} of {batch * steps} samples")
    of_leader = ranks[0]["epochs"][-1]
    return {"s": of_leader["s"], "sources": of_leader["sources"], "weights": ranks[0]["weights"]}


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--policies", default="paceline", help="comma-separated names")
    arguments.add_argument("--slowness", default="1,2", help="of each rank; default: %(default)s")
    arguments.add_argument("--steps", type=int, default=600, help="of an epoch")
    arguments.add_argument("--epochs", type=int, default=1, help="the last one is compared")
    arguments.add_argument("--pairs", type=int, default=3)
    options = arguments.parse_args()
    slowness = [float(part) for part in options.slowness.split(",")]
    steps, pairs = (100, 1) if options.quick else (options.steps, options.pairs)
    results, checks, lines = {}, [], []
    for policy in options.policies.split(","):
        ways = {
            way: partial(train, way, policy, slowness, steps, options.epochs)
            for way in ("local", "managed")
        }
        turns = interleaved(ways, pairs)
        ratios = [turn["local"]["s"] / turn["managed"]["s"] for turn in turns]
        apart = max(
            float(np.abs(np.subtract(a, b)).max())
            for turn in turns
            for a, b in zip(turn["local"]["weights"], turn["managed"]["weights"], strict=True)
        )
        results[policy] = {
            "local_s": [turn["local"]["s"] for turn in turns],
            "managed_s": [turn["managed"]["s"] for turn in turns],
            "ratio": float(np.median(ratios)),
            "largest_difference_of_weights": apart,
            "sources": turns[-1]["local"]["sources"],
        }
        checks.append(Check(f"{policy}: local ÷ managed", float(np.median(ratios)), MOST, "<="))
        lines.append(
            f"{policy:20} local {np.median(results[policy]['local_s']):7.2f} s, managed "
            f"{np.median(results[policy]['managed_s']):7.2f} s, ratio {np.median(ratios):.3f}, "
            f"weights differ by {apart:.1e}, {results[policy]['sources']}"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    config = {"slowness": slowness, "steps": steps, "pairs": pairs, "epochs": options.epochs}
    finish(options, config, results, checks, "\n".join(lines))


if __name__ == "__main__":
    main()
