"""Planning an epoch of 1,133,158 samples (Sports-1M's count) on 1,024 workers, CPU seconds.

Models are given; a segment is four steps through `policies.plan`. A fit of the models is not in it.
The peer flatflow is not measured here.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, replace

import numpy as np
from harness import Check, finish, parser

from paceline_backend.policies import Feedback, KeepPlacement, Models, Policy, Problem, plan
from paceline_backend.policies.order import epoch_order
from paceline_backend.policies.paceline import PacelineScheduler, warm_up

WORLD, SAMPLES, MEAN, DIF = 1024, 1_133_158, 300.0, 540.0
LOCAL_BATCH = 4


@dataclass(frozen=True)
class Known:
    """A predictor that knows."""

    models: Models

    def fit(self, feedback: Feedback, world: int) -> Models:
        """See `Predictor.fit`."""
        return self.models


def measure(free: bool, uneven: bool) -> dict[str, float]:
    """Seconds of one core for an epoch, and of its median segment."""
    rng = np.random.default_rng(0)
    variance = np.log(1 + (DIF / MEAN) ** 2)
    sizes = rng.lognormal(np.log(MEAN) - variance / 2, np.sqrt(variance), SAMPLES)
    a = np.repeat([1e-3, 2e-3 if uneven else 1e-3], WORLD // 2)
    models = Models(a, np.zeros(WORLD), np.zeros(WORLD))
    policy = Policy("paceline", Known(models), PacelineScheduler(free), KeepPlacement())
    everything = np.arange(SAMPLES)
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


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__).parse_args()
    warm_up()
    modes = {"exact": (False, False), "free": (True, False), "free, uneven": (True, True)}
    results = {name: measure(*mode) for name, mode in modes.items()}
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    checks = [Check("peak memory, GiB", peak_gib, 1.0, "<=")]
    table = [f"{'mode':<14}{'compose s':>10}{'segment ms':>12}{'epoch s':>9}"]
    for name, row in results.items():
        checks.append(Check(f"{name}: epoch, s", row["epoch_s"], 2.0, "<="))
        checks.append(Check(f"{name}: segment, s", row["segment_s"], 0.005, "<="))
        table.append(
            f"{name:<14}{row['compose_s']:>10.2f}{1e3 * row['segment_s']:>12.1f}"
            f"{row['epoch_s']:>9.2f}"
        )
    config = {"samples": SAMPLES, "world": WORLD, "local_batch": LOCAL_BATCH, "dif": DIF}
    finish(options, config, results, checks, "\n".join(table))


main()
