"""Exact mode beside an exact solver: random global batches, divided among workers of known speeds.

Each instance is one global batch of up to 12 samples and 3 to 6 workers. scipy's MILP (HiGHS) finds
the least time of the slowest worker; the figure is our time ÷ that. All is virtual.
"""

from __future__ import annotations

import numpy as np
from harness import Check, finish, parser
from scipy.optimize import Bounds, LinearConstraint, milp

from paceline_backend.policies.base import Floats, Models, Problem
from paceline_backend.policies.presets.paceline import PacelineScheduler

SEED = 90_000
SIZES = ("lognormal", "pareto", "bimodal")


def drawn(seed: int) -> tuple[Floats, Models]:
    """Sizes of a batch, [n], and the workers."""
    rng = np.random.default_rng(seed)
    world, count = int(rng.integers(3, 7)), int(rng.integers(4, 13))
    sizes = {
        "lognormal": lambda: rng.lognormal(3.0, 0.8, count),
        "pareto": lambda: 10 * (1 + rng.pareto(1.5, count)),
        "bimodal": lambda: (
            np.where(rng.random(count) < 0.3, 100.0, 10.0) * rng.uniform(0.8, 1.2, count)
        ),
    }[SIZES[seed % len(SIZES)]]()
    speeds = rng.uniform(0.5, 3.0, world) * 1e-3
    overhead = np.zeros(world) if rng.random() < 0.5 else rng.uniform(0, 0.01, world)
    return sizes, Models(speeds, np.zeros(world), overhead)


def ours(sizes: Floats, models: Models) -> float:
    """The time of the slowest worker as the scheduler divides the batch."""
    world, count = len(models.a), len(sizes)
    problem = Problem(
        sizes=sizes,
        remaining=np.arange(count),
        order=np.arange(count),
        placement=np.arange(count) % world,
        epoch=0,
        first_step=0,
        steps=1,
        global_batch=count,
        world=world,
        seed=0,
    )
    batches = PacelineScheduler().schedule(problem, models)
    ends = np.cumsum(batches.counts[0])
    loads = np.array(
        [
            sizes[batches.samples[end - n : end]].sum()
            for n, end in zip(batches.counts[0], ends, strict=True)
        ]
    )
    return float(np.where(batches.counts[0] > 0, models.a * loads + models.b, 0.0).max())


def least(sizes: Floats, models: Models) -> float:
    """The least time of the slowest worker; a worker without samples takes none."""
    world, count = len(models.a), len(sizes)
    given, used = world * count, world  # x[j, i], then whether j works, then the time
    width = given + used + 1
    rows, low, high = [], [], []
    for sample in range(count):
        row = np.zeros(width)
        row[sample:given:count] = 1
        rows.append(row)
        low.append(1.0)
        high.append(1.0)
    for rank in range(world):
        row = np.zeros(width)
        row[rank * count : (rank + 1) * count] = models.a[rank] * sizes
        row[given + rank] = models.b[rank]
        row[-1] = -1
        rows.append(row)
        low.append(-np.inf)
        high.append(0.0)
        row = np.zeros(width)
        row[rank * count : (rank + 1) * count] = 1
        row[given + rank] = -count
        rows.append(row)
        low.append(-np.inf)
        high.append(0.0)
    solved = milp(
        np.eye(width)[-1],
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.append(np.ones(width - 1), 0),
        bounds=Bounds(np.zeros(width), np.append(np.ones(width - 1), np.inf)),
        options={"mip_rel_gap": 1e-7},
    )
    return float(solved.fun)


def main() -> None:
    """Runs the benchmark."""
    asking = parser(__doc__)
    asking.add_argument("--seed", type=int, default=SEED, help="the first; %(default)s")
    options = asking.parse_args()
    count = 40 if options.quick else 500
    ratios = []
    for seed in range(options.seed, options.seed + count):
        sizes, models = drawn(seed)
        ratios.append(ours(sizes, models) / least(sizes, models))
    optimal = 100 * float(np.mean(np.array(ratios) <= 1 + 1e-6))
    checks = [
        Check("optimal, %", optimal, 99.8, ">="),
        Check("worst time over the least", max(ratios), 1.005, "<="),
    ]
    table = f"{count} instances: {optimal:.1f} % optimal, worst {max(ratios):.4f}"
    finish(options, {"seed": options.seed, "instances": count}, {"ratios": ratios}, checks, table)


if __name__ == "__main__":
    main()
