"""How soon `paceline` balances a run of which nothing is known.

Twenty settings, simulated: makes of sizes, costs of a batch, equal and uneven speeds, epochs of 5
to 500 steps, 2 to 64 workers. Eighteen more, in which sizes are 0 to 20 % of the cost: there only
the first figure counts, since little can be saved before that share is known. Each is trained under
`bsp` and under `paceline` in both modes, on the same devices with the same noise. Planning sees as
many steps as it does on real ranks.

Two figures for each mode. First: the time of the first 20 steps ÷ that of `bsp`. Second: after how
many steps a run of five steps has 80 % of the benefit that steps from the 40th on have. In exact
mode, batches are those of `bsp`; the benefit is compared with that of an oracle, which knows the
devices, on the same batches. In free mode, batches differ: there times are per unit of load.
Chosen on seeds below 1,000, shown on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from harness import Check, finish, parser

from paceline.core.cost import SUM, Cost
from paceline.core.emulation import Emulation, Slowdown
from paceline.wire import Hello
from paceline_backend import policies
from paceline_backend.policies import Feedback, Models, Policy
from paceline_backend.simulator import Simulation
from paceline_backend.simulator.hello import hello_of

Floats = npt.NDArray[np.float64]

SEED = 42_000
FIRST, LATER, STEPS = 20, 40, 80  # the start; where the later benefit begins and ends
SPAN = 5  # steps over which a benefit is the mean
SHARE = 0.8  # of the later benefit
LITTLE = 0.03  # a later benefit below this share of the time is too little to be reached
SLOWER, SOON = 1.03, 5.0  # the bounds


@dataclass(frozen=True)
class Setting:
    """A run: its data, its devices and its batches."""

    sizes: str  # a make: see `_sizes`
    cost: str  # "sum", "padded", "quadratic" or "padded quadratic"
    speeds: str  # "equal", "two" (half of them twice as slow) or "spread" (0.6 to 1.8)
    workers: int
    per_worker: int  # samples of a global batch
    epoch: int  # steps
    step_s: float = 0.5  # about what a step takes
    noise: float = 0.05
    first: float = 1.0  # how many times as long the first step takes
    fixed: float = 0.02  # share of a step that does not depend on the batch
    sized: float = 1.0  # share of the rest of a mean step that depends on sizes
    per: str = "sample"  # "sample" or "step": what the others of its costs go by

    def __str__(self) -> str:
        """The setting in a line."""
        cost = self.cost if self.sized == 1 else f"{self.sized:.0%} {self.cost} per {self.per}"
        return (
            f"{self.sizes} {cost}, {self.speeds}, {self.workers} x {self.per_worker},"
            f" epochs of {self.epoch}"
        )


SETTINGS = (
    Setting("lognormal", "padded", "equal", 2, 16, 5, step_s=0.35),
    Setting("lognormal", "padded", "two", 2, 16, 5, first=2.0),
    Setting("lognormal", "sum", "equal", 8, 16, 50),
    Setting("lognormal", "sum", "spread", 8, 16, 100),
    Setting("lognormal", "quadratic", "equal", 4, 8, 20),
    Setting("lognormal", "padded quadratic", "two", 4, 16, 20),
    Setting("pareto", "sum", "equal", 16, 8, 50, noise=0.1),
    Setting("pareto", "padded", "equal", 16, 8, 50),
    Setting("pareto", "padded", "spread", 8, 32, 500),
    Setting("pareto", "quadratic", "spread", 4, 32, 100),
    Setting("pareto", "sum", "two", 2, 32, 5, first=2.0),
    Setting("bimodal", "sum", "equal", 4, 8, 20),
    Setting("bimodal", "padded", "equal", 4, 8, 20, step_s=0.15),
    Setting("bimodal", "padded", "two", 32, 16, 100),
    Setting("bimodal", "quadratic", "equal", 8, 16, 500, first=1.5),
    Setting("normal", "sum", "two", 8, 16, 50, noise=0.1),
    Setting("normal", "padded", "equal", 64, 8, 20),
    Setting("normal", "padded", "spread", 16, 16, 100),
    Setting("normal", "sum", "equal", 64, 16, 5),
    Setting("lognormal", "padded", "equal", 64, 16, 100, first=1.5),
    Setting("lognormal", "sum", "equal", 8, 16, 50, sized=0.0),
    Setting("pareto", "sum", "spread", 4, 32, 100, sized=0.0),
    Setting("bimodal", "sum", "two", 16, 16, 20, sized=0.0),
    Setting("lognormal", "sum", "two", 2, 16, 5, sized=0.0, first=2.0),
    Setting("pareto", "sum", "equal", 16, 8, 50, sized=0.05),
    Setting("lognormal", "sum", "spread", 8, 16, 100, sized=0.05),
    Setting("bimodal", "padded", "equal", 4, 8, 20, sized=0.05),
    Setting("lognormal", "sum", "equal", 8, 16, 50, sized=0.1, noise=0.1),
    Setting("pareto", "padded", "two", 8, 32, 100, sized=0.1),
    Setting("bimodal", "quadratic", "equal", 8, 16, 500, sized=0.1),
    Setting("lognormal", "sum", "equal", 64, 16, 5, sized=0.1),
    Setting("pareto", "quadratic", "spread", 4, 32, 100, sized=0.2),
    Setting("lognormal", "padded", "equal", 2, 16, 5, sized=0.2),
    Setting("pareto", "sum", "two", 16, 8, 50, sized=0.2),
    Setting("lognormal", "sum", "equal", 8, 16, 50, sized=0.0, per="step"),
    Setting("pareto", "sum", "two", 8, 32, 100, sized=0.05, per="step"),
    Setting("bimodal", "padded", "spread", 4, 8, 20, sized=0.1, per="step"),
    Setting("pareto", "quadratic", "equal", 16, 8, 50, sized=0.2, per="step"),
)


def _sizes(setting: Setting, rng: np.random.Generator) -> Floats:
    """Sizes of the samples, of mean about 1, [N]."""
    count = setting.epoch * setting.workers * setting.per_worker
    if setting.sizes == "lognormal":
        drawn = rng.lognormal(-0.5, 1.0, count)
    elif setting.sizes == "pareto":
        drawn = np.minimum(0.4 * (1 + rng.pareto(1.6, count)), 40.0)
    elif setting.sizes == "bimodal":
        drawn = np.where(rng.random(count) < 0.85, 0.5, 3.8) * rng.uniform(0.8, 1.2, count)
    else:
        drawn = np.maximum(rng.normal(1.0, 0.3, count), 0.1)
    return np.maximum(100 * drawn, 1.0)


class Known(NamedTuple):
    """A predictor that knows the devices."""

    models: Models

    def fit(self, feedback: Feedback, world: int) -> Models:
        """See `Predictor.fit`."""
        return self.models


@dataclass(frozen=True)
class Trained:
    """What steps took and how much they did; arrays are [STEPS]."""

    step_s: Floats
    work: Floats  # what the step's batches take ranks of the mean speed without padding, s

    def rate(self, steps: slice) -> float:
        """Seconds per unit of work over some steps."""
        return float(self.step_s[steps].sum() / self.work[steps].sum())


def trained(hello: Hello, devices: Emulation, policy: Policy) -> Trained:
    """Trains `STEPS` steps under a policy."""
    simulation = Simulation(hello, devices, policy, steps=STEPS)
    step_s, work = [], []
    a, c, b = (np.mean(values) for values in (devices.a_s, devices.c_s, devices.b_s))
    while not simulation.finished:
        ran = simulation.advance()
        step_s.append(ran.step_s)
        of = ran.features
        load = of.load + devices.cost.kappa * of.squares
        work.append((a * load + c * of.samples + b).sum(axis=1))
    return Trained(np.concatenate(step_s), np.concatenate(work))


def _run(setting: Setting, seed: int) -> tuple[Hello, Emulation, Models]:
    """The Hello message, the devices, and what an oracle knows of them."""
    rng = np.random.default_rng([seed, SETTINGS.index(setting)])
    sizes, world = _sizes(setting, rng), setting.workers
    typical = float((sizes**2).sum() / sizes.sum())
    kappa = 2 / typical if "quadratic" in setting.cost else 0.0
    cost = Cost(kappa, "padded" in setting.cost) if setting.cost != "sum" else SUM
    if setting.speeds == "two":
        factors = np.where(np.arange(world) % 2, 2.0, 1.0)
    elif setting.speeds == "spread":
        factors = rng.permutation(np.linspace(0.6, 1.8, world))
    else:
        factors = np.ones(world)
    sized = max(setting.sized, 1e-6)  # planners want a > 0
    a = factors * sized * setting.step_s / float(cost.sizes(sizes).mean() * setting.per_worker)
    c = factors * (1 - sized) * (setting.per == "sample") * setting.step_s / setting.per_worker
    b = np.full(world, (setting.fixed + (1 - sized) * (setting.per == "step")) * setting.step_s)
    first = [Slowdown(list(range(world)), setting.first, steps=1)] if setting.first > 1 else []
    devices = Emulation(
        a.tolist(),
        b.tolist(),
        c.tolist(),
        cost=cost,
        slowdowns=first,
        noise=setting.noise,
        seed=seed,
    )
    hello = hello_of(sizes, world, world * setting.per_worker, seed=seed)
    return hello, devices, Models(a, c, b, cost=cost)


@dataclass(frozen=True)
class Start:
    """How a run under `paceline` starts."""

    over_bsp: float  # time of the first steps ÷ that under `bsp`
    until: float  # steps until `SHARE` of the later benefit; 0: there is too little of it
    later: float  # the later benefit: share of the time of `bsp` that is saved


def _until(early: Floats, later: float) -> float:
    """The first step from which on a benefit is large enough."""
    reached = np.flatnonzero(early >= SHARE * later)
    return float(reached[0]) if len(reached) else float(STEPS)


def exact(hello: Hello, devices: Emulation, known: Models, bsp: Trained) -> Start:
    """How exact mode starts."""
    policy = policies.make("paceline")
    mine = trained(hello, devices, policy)
    oracle = trained(hello, devices, replace(policy, predictor=Known(known)))
    saved, possible = bsp.step_s - mine.step_s, bsp.step_s - oracle.step_s
    later = slice(LATER, STEPS)
    starts = range(LATER - SPAN)
    early = np.array([saved[k : k + SPAN].sum() / possible[k : k + SPAN].sum() for k in starts])
    benefit = float(saved[later].sum() / bsp.step_s[later].sum())
    of_possible = float(saved[later].sum() / possible[later].sum())
    until = _until(early, of_possible) if benefit > LITTLE else 0.0
    return Start(float(mine.step_s[:FIRST].sum() / bsp.step_s[:FIRST].sum()), until, benefit)


def free(hello: Hello, devices: Emulation, bsp: Trained) -> Start:
    """How free mode starts."""
    mine = trained(hello, devices, policies.make("paceline", {"mode": "free"}))
    usual = bsp.rate(slice(1, STEPS))  # the first step may be slow
    slow = bsp.step_s[0] / (usual * bsp.work[0]) if devices.slowdowns else 1.0
    first = Trained(mine.step_s.copy(), mine.work)
    first.step_s[0] /= max(slow, 1.0)
    benefit = 1 - mine.rate(slice(LATER, STEPS)) / usual
    starts = range(LATER - SPAN)
    early = np.array([1 - first.rate(slice(k, k + SPAN)) / usual for k in starts])
    until = _until(early, benefit) if benefit > LITTLE else 0.0
    return Start(first.rate(slice(FIRST)) / usual, until, benefit)


def measured(setting: Setting, seeds: Sequence[int]) -> dict[str, Start]:
    """Both modes: the slowest and the latest start of all seeds, and the mean later benefit."""
    starts: dict[str, list[Start]] = {"exact": [], "free": []}
    for seed in seeds:
        hello, devices, known = _run(setting, seed)
        bsp = trained(hello, devices, policies.make("bsp"))
        starts["exact"].append(exact(hello, devices, known, bsp))
        starts["free"].append(free(hello, devices, bsp))
    return {
        mode: Start(
            max(start.over_bsp for start in of),
            max(start.until for start in of),
            float(np.mean([start.later for start in of])),
        )
        for mode, of in starts.items()
    }


def main() -> None:
    """Runs the benchmark."""
    asking = parser(__doc__)
    asking.add_argument("--seeds", type=int, default=5, help="how many; %(default)s")
    asking.add_argument("--seed", type=int, default=SEED, help="the first; %(default)s")
    options = asking.parse_args()
    seeds = range(options.seed, options.seed + (1 if options.quick else options.seeds))
    settings = (*SETTINGS[:5], SETTINGS[20]) if options.quick else SETTINGS
    rows = {str(setting): measured(setting, seeds) for setting in settings}
    checks, lines = [], []
    for mode in ("exact", "free"):
        starts = {name: row[mode] for name, row in rows.items()}
        slowest = {
            by_sizes: max(
                (starts[str(s)].over_bsp for s in settings if (s.sized == 1) is by_sizes),
                default=0.0,
            )
            for by_sizes in (True, False)
        }
        latest = max(starts[str(setting)].until for setting in settings if setting.sized == 1)
        first = f"{mode}: first {FIRST} steps over bsp's, worst setting"
        checks += [
            Check(first, slowest[True], SLOWER, "<="),
            Check(f"{first}, sizes hardly matter", slowest[False], SLOWER, "<="),
            Check(f"{mode}: steps until {SHARE:.0%} of the benefit, worst", latest, SOON, "<="),
        ]
        lines += [
            f"{mode:6}{name:62} over bsp {start.over_bsp:.3f}  until {start.until:4.1f}"
            f"  later benefit {start.later:.3f}"
            for name, start in starts.items()
        ]
    results = {
        name: {mode: vars(start) for mode, start in row.items()} for name, row in rows.items()
    }
    finish(options, {"seed": options.seed, "seeds": len(seeds)}, results, checks, "\n".join(lines))


if __name__ == "__main__":
    main()
