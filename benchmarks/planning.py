"""Planning an epoch of 1,133,158 samples (Sports-1M's count) on 1,024 workers, CPU seconds.

Models are given, so no time goes into fitting. A segment is four steps through `policies.plan`.
The peer is flatflow, whose planner is compiled, too: the time in which one of its ranks plans an
epoch.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # flatflow must run on one core, as Paceline's planner does

import numpy as np
from harness import Check, finish, parser
from peers import flatflow_rank

from paceline_backend.policies import Feedback, KeepPlacement, Models, Policy, Problem, plan
from paceline_backend.policies.presets.paceline import PacelineScheduler, warm_up
from paceline_backend.policies.solve.order import epoch_order

WORLD, SAMPLES, MEAN, DIF = 1024, 1_133_158, 300.0, 540.0
LOCAL_BATCH = 4
REPEATS = 3
MODES = {"exact": (False, False), "free": (True, False), "free, uneven": (True, True)}
PEERS = {"exact": "sched", "free": "sched_unstable"}  # mode → flatflow's name of its scheduler


@dataclass(frozen=True)
class Known:
    """A predictor that knows the models from the start."""

    models: Models

    def fit(self, feedback: Feedback, world: int) -> Models:
        """See `Predictor.fit`."""
        return self.models


def measure(sizes: Any, free: bool, uneven: bool) -> dict[str, float]:
    """Seconds of one core to compose an epoch, to plan its median segment, and for all of it."""
    a = np.repeat([1e-3, 2e-3 if uneven else 1e-3], WORLD // 2)
    models = Models(a, np.zeros(WORLD), np.zeros(WORLD))
    policy = Policy("paceline", Known(models), PacelineScheduler(free), KeepPlacement())
    everything = np.arange(len(sizes))
    work = Problem(
        sizes, everything, everything, everything % WORLD, 0, 0, 4, WORLD * LOCAL_BATCH, WORLD, 0
    )
    epoch_order.cache_clear()
    started = time.thread_time()
    order = policy.scheduler.compose(work, models)
    compose_s = time.thread_time() - started
    segments = []
    while len(order):
        part = replace(work, order=order, remaining=order)
        started = time.thread_time()
        made = plan(policy, part, Feedback.empty(), shuffle=False)
        segments.append(time.thread_time() - started)
        order = order[len(made.batches.samples) :]
    return {
        "compose_s": compose_s,
        "segment_s": float(np.median(segments)),
        "epoch_s": compose_s + sum(segments),
    }


def flatflow_s(sizes: Any, mode: str) -> float:
    """Seconds of one core in which a rank of flatflow plans an epoch, without the shuffle.

    flatflow takes whole numbers as sizes, and whole global batches only.
    """
    samples = len(sizes) - len(sizes) % (WORLD * LOCAL_BATCH)
    order = np.random.default_rng(1).permutation(samples)
    whole = sizes[:samples].astype(np.int64).clip(1)
    started = time.process_time()
    flatflow_rank(mode, order, whole, WORLD, 0, WORLD * LOCAL_BATCH)
    return time.process_time() - started


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__).parse_args()
    samples = SAMPLES // 8 if options.quick else SAMPLES
    rng = np.random.default_rng(0)
    variance = np.log(1 + (DIF / MEAN) ** 2)
    sizes = rng.lognormal(np.log(MEAN) - variance / 2, np.sqrt(variance), samples)
    warm_up()
    peak_gib = 0.0
    has_peer = find_spec("flatflow") is not None
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in MODES}
    peer_s: dict[str, list[float]] = {name: [] for name in PEERS}
    for _ in range(REPEATS):
        for name, mode in MODES.items():
            runs[name].append(measure(sizes, *mode))
        peak_gib = peak_gib or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        for name, theirs in PEERS.items() if has_peer else ():
            peer_s[name].append(flatflow_s(sizes, theirs))
    results: dict[str, Any] = {
        name: {figure: float(np.median([row[figure] for row in rows])) for figure in rows[0]}
        for name, rows in runs.items()
    }
    checks = [Check("peak memory, GiB", peak_gib, 1.0, "<=")]
    table = [f"{'mode':<24}{'compose s':>10}{'segment ms':>12}{'epoch s':>9}{'µs a sample':>13}"]
    for name, row in results.items():
        if not options.quick:
            checks.append(Check(f"{name}: epoch, s", row["epoch_s"], 2.0, "<="))
        checks.append(Check(f"{name}: segment, s", row["segment_s"], 0.005, "<="))
        table.append(
            f"{name:<24}{row['compose_s']:>10.2f}{1e3 * row['segment_s']:>12.1f}"
            f"{row['epoch_s']:>9.2f}{1e6 * row['epoch_s'] / samples:>13.2f}"
        )
    for name, theirs in PEERS.items():
        if not has_peer:
            table.append(f"{'flatflow ' + theirs:<24} not installed (make bench)")
            continue
        epoch_s = float(np.median(peer_s[name]))
        results[f"flatflow {theirs}"] = {"epoch_s": epoch_s}
        ratio = results[name]["epoch_s"] / epoch_s
        checks.append(Check(f"{name}: epoch ÷ flatflow {theirs}", ratio, 1.0, "<="))
        table.append(
            f"{'flatflow ' + theirs:<24}{'':>22}{epoch_s:>9.2f}{1e6 * epoch_s / samples:>13.2f}"
        )
    config = {"samples": samples, "world": WORLD, "local_batch": LOCAL_BATCH, "dif": DIF}
    finish(options, config, results, checks, "\n".join(table))


if __name__ == "__main__":
    main()
