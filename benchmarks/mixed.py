"""Real devices of different kinds in one run: a rank on each GPU, and ranks on the CPU.

Nothing is emulated. The run is under a real control plane and goes from bsp to static-batching,
whose capacities nobody has typed, and to paceline. Samples are all alike. From what the ranks
reported in the three stretches each rank's time for a batch is fitted as b + c·n, and the limit is
the least time of a step that any whole counts would take. Without a GPU nothing is measured.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from devices import limit_of
from harness import Check, finish, parser
from mixed_script import GLOBAL_BATCH
from switch import effective, wait

from paceline_backend.server.stack import Stack

SCRIPT = Path(__file__).with_name("mixed_script.py")
FIRST, COUNT = 16, 24  # steps of a stretch that do not count, then steps that do
POLICIES = ("bsp", "static-batching", "paceline")


def stretch(stack: Stack, run: str, first: int) -> dict[str, Any]:
    """Samples and compute times of each rank in the steps from one on, [W, steps]."""
    last = first + COUNT - 1
    wait(stack.api, run, lambda now: (now["step"] or 0) > last, timeout_s=180.0)
    rows = stack.api("GET", f"/runs/{run}/worker-steps?from={first}&to={last}&points=2000")
    samples, compute_s = (np.array(rows[name], float) for name in ("samples", "compute_s"))
    whole = samples.sum(axis=0) == GLOBAL_BATCH
    return {"samples": samples[:, whole], "compute_s": compute_s[:, whole]}


def measure(stack: Stack, ranks: int, threads: int) -> dict[str, Any]:
    """Trains one run under each policy in turn."""
    body = {
        "name": "mixed",
        "script": str(SCRIPT),
        "nproc": ranks,
        "policy": POLICIES[0],
        "env": {"MIXED_THREADS": str(threads)},
    }
    run = stack.api("POST", "/runs", body)["id"]
    made = {POLICIES[0]: stretch(stack, run, FIRST)}
    for policy in POLICIES[1:]:
        asked = stack.api("POST", f"/runs/{run}/policy", {"policy": policy, "by": "benchmark"})
        made[policy] = stretch(stack, run, effective(stack.api, run, asked["version"]) + FIRST)
    workers = stack.api("GET", f"/runs/{run}/workers")
    verdict = stack.api("GET", f"/runs/{run}/verdict")
    stack.api("POST", f"/runs/{run}/stop", {"force": True})
    wait(stack.api, run, lambda now: now["ended_at"] is not None)
    return {
        "devices": [worker["device"] for worker in workers],
        "verdict": verdict,
        **_figures(made),
    }


def _figures(made: dict[str, dict[str, Any]]) -> dict[str, Any]:
    samples, compute_s = (
        np.concatenate([part[name] for part in made.values()], axis=1)
        for name in ("samples", "compute_s")
    )
    lines = [_line(counts, times) for counts, times in zip(samples, compute_s, strict=True)]
    least_s = limit_of([c for c, _ in lines], [b for _, b in lines], GLOBAL_BATCH)
    steps_s = {name: float(np.median(part["compute_s"].max(axis=0))) for name, part in made.items()}
    return {
        "sample_s": [c for c, _ in lines],
        "fixed_s": [b for _, b in lines],
        "limit_s": least_s,
        "step_s": steps_s,
        "samples": {
            name: np.median(part["samples"], axis=1).astype(int).tolist()
            for name, part in made.items()
        },
        "share_of_limit": {name: least_s / step_s for name, step_s in steps_s.items()},
    }


def _line(counts: Any, times_s: Any) -> tuple[float, float]:
    """A rank's seconds per sample and per batch, from the median time of each of its counts."""
    used = sorted({int(count) for count in counts if count})
    medians = [float(np.median(times_s[counts == count])) for count in used]
    if len(used) < 2:
        return medians[0] / used[0], 0.0
    c, b = np.polyfit(used, medians, 1)
    return (float(c), max(0.0, float(b))) if c > 0 else (medians[-1] / used[-1], 0.0)


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=3, help="%(default)s")
    cores = len(os.sched_getaffinity(0))
    arguments.add_argument("--threads", type=int, default=max(1, cores // 4), help="of a rank")
    options = arguments.parse_args()
    config = {"ranks": options.ranks, "threads": options.threads, "gpus": torch.cuda.device_count()}
    if not torch.cuda.is_available():
        finish(
            options, config, {"skipped": "no GPU"}, [], "skipped: no GPU, so all devices are alike"
        )
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), 0) as stack:
        results = measure(stack, options.ranks, options.threads)
    share = results["share_of_limit"]
    checks = [
        Check(f"{name}: throughput over the limit's", share[name], 0.95, ">=")
        for name in POLICIES[1:]
    ]
    lines = [", ".join(f"{d['name']} ({d['kind']})" for d in results["devices"])]
    lines += [f"{'':<18}{'step (ms)':>10}{'of the limit':>14}  samples"]
    lines += [
        f"{name:<18}{1e3 * results['step_s'][name]:>10.1f}{share[name]:>14.3f}"
        f"  {results['samples'][name]}"
        for name in POLICIES
    ]
    finish(options, config, results, checks, "\n".join(lines))


if __name__ == "__main__":
    main()
