"""Whether warnings before a switch are right: presets in random settings, against the simulator.

In each setting presets train for five epochs of 48 steps under the true devices, of which the first
does not count, and their time over that of `bsp` is the truth. The warnings know only what a run
measures: models that were fitted to 64 steps of `bsp`. Of the settings in which a preset is warned
of as slower, how many are more than 1 % slower? Of those more than 5 % slower, how many are warned
of? Presets with parameters that are known to do harm are among the contenders.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import Check, finish, parser

from paceline.core.cost import Cost
from paceline.core.emulation import Emulation
from paceline_backend import policies
from paceline_backend.insight import fitness
from paceline_backend.policies.predict.linear import LinearPredictor
from paceline_backend.simulator import Simulation
from paceline_backend.simulator.hello import hello_of

Floats = npt.NDArray[np.float64]

STEPS, EPOCHS = 48, 5
SPEED_S = 1e-4  # of the fastest ranks, s per size unit
CONTENDERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chronica", {}),
    ("chronica", {"picks": "paper", "ett": "per-sample"}),
    ("paceline", {}),
    ("paceline", {"mode": "free"}),
    ("paceline", {"cost": "sum"}),
    ("paceline", {"cost": "padded"}),
    ("sata", {}),
    ("boa", {}),
    ("lbb", {}),
    ("lbb", {"times": "measured"}),
    ("dynamic-batching", {}),
    ("dynamic-batching", {"times": "measured"}),
    ("sata", {"which": "levelled"}),
    ("boa", {"which": "levelled"}),
    ("static-batching", {}),
    ("static-batching", {"capacity": None}),  # of the setting, drawn at random
)


@dataclass(frozen=True)
class Setting:
    """A data set on a cluster, drawn from a seed."""

    seed: int
    kind: str
    sizes: Floats  # [N]
    world: int
    local: int
    cost: Cost
    speeds: str
    factors: Floats  # [W]
    noise: float
    step_s: float
    capacity: list[float]  # [W], of no meaning

    @staticmethod
    def drawn(seed: int) -> Setting:
        """The setting of a seed; no global batch is above 256 samples."""
        rng = np.random.default_rng([7, seed])
        kinds = ["lognormal", "lognormal", "pareto", "text", "bimodal", "uniform", "constant"]
        kind = str(rng.choice(kinds))
        world = int(rng.choice([2, 4, 8, 16, 32]))
        local = int(rng.choice([1, 2, 4, 8, 16, 32]))
        while world * local > 256:
            local //= 2
        sizes = _sizes(rng, kind, STEPS * world * local)
        typical = float((sizes**2).sum() / sizes.sum())
        name = str(rng.choice(["sum", "padded", "quadratic", "padded quadratic"]))
        kappa = float(10 ** rng.uniform(-0.7, 1)) / typical if "quadratic" in name else 0.0
        cost = Cost(kappa, "padded" in name)
        speeds = str(rng.choice(["equal", "half", "one", "random"]))
        factors = np.ones(world)
        if speeds == "half":
            factors[world // 2 :] = rng.uniform(1.2, 3)
        if speeds == "one":
            factors[-1] = rng.uniform(1.2, 4)
        if speeds == "random":
            factors = rng.uniform(1, 2, world)
        mean_s = SPEED_S * float(cost.sizes(sizes).mean()) * local
        noise, share = float(rng.uniform(0.005, 0.05)), float(rng.uniform(0.01, 0.3))
        capacity = rng.uniform(1, 3, world).round(2).tolist()
        return Setting(
            seed, kind, sizes, world, local, cost, speeds, factors, noise, share * mean_s, capacity
        )

    def simulation(self, policy: policies.Policy, epochs: int) -> Simulation:
        """A training under a policy."""
        hello = hello_of(
            self.sizes,
            self.world,
            self.world * self.local,
            seed=self.seed,
            epochs=epochs,
            uneven_steps=True,
        )
        devices = Emulation(
            a_s=(SPEED_S * self.factors).tolist(),
            b_s=[self.step_s] * self.world,
            cost=self.cost,
            noise=self.noise,
            seed=self.seed,
        )
        return Simulation(hello, devices, policy)

    def time_s(self, policy: policies.Policy) -> float:
        """Seconds of the epochs after the first."""
        simulation, total_s = self.simulation(policy, EPOCHS), 0.0
        while not simulation.finished:
            trained = simulation.advance()
            if trained.segment.epoch:
                total_s += float(trained.step_s.sum())
        return total_s

    def measured(self) -> fitness.Conditions:
        """What a run under `bsp` has measured after 64 steps."""
        simulation = self.simulation(policies.make("bsp"), EPOCHS)
        while simulation.step < 64:
            simulation.advance()
        feedback = simulation.window.feedback()
        models = LinearPredictor(cost="auto").fit(feedback, self.world)
        rows = feedback.by_step(self.world)
        off = np.log(rows.compute_s / models.ett(rows.features))
        return fitness.Conditions(
            models, self.sizes, self.world * self.local, noise=float(off.std()), seed=self.seed
        )

    def parameters(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A contender's parameters, with this setting's capacity."""
        values = {"capacity": self.capacity}
        return {name: values.get(name) if v is None else v for name, v in given.items()}


def _sizes(rng: np.random.Generator, kind: str, count: int) -> Floats:
    """Whole numbers, [count]."""
    if kind == "lognormal":
        sigma = rng.uniform(0.1, 1.5)
        drawn = rng.lognormal(5 - sigma * sigma / 2, sigma, count)
    elif kind == "pareto":
        drawn = 30 * (1 + rng.pareto(1.5, count))
    elif kind == "text":
        drawn = np.clip(rng.lognormal(5.5, 1, count), 8, 2048)
    elif kind == "bimodal":
        long = rng.random(count) < rng.uniform(0.05, 0.5)
        drawn = np.where(long, rng.uniform(300, 1500), 50) * rng.uniform(0.8, 1.2, count)
    elif kind == "uniform":
        drawn = rng.uniform(50, rng.uniform(60, 400), count)
    else:
        drawn = np.full(count, 100.0)
    return np.maximum(np.round(drawn), 1.0)


def truth(setting: Setting) -> list[float]:
    """Each contender's time over that of `bsp`."""
    plain_s = setting.time_s(policies.make("bsp"))
    made = (policies.make(name, setting.parameters(given)) for name, given in CONTENDERS)
    return [setting.time_s(policy) / plain_s for policy in made]


def warned(setting: Setting) -> list[bool]:
    """Whether each contender is warned of as slower than plain DDP."""
    suits = fitness.Fitness(setting.measured())
    return [
        any(caution.harm for caution in suits.cautions(name, setting.parameters(given)))
        for name, given in CONTENDERS
    ]


def label(name: str, given: Mapping[str, Any]) -> str:
    """A contender in a table."""
    return " ".join([name, *(f"{key}={value or 'any'}" for key, value in given.items())])


def main() -> None:
    """Runs the benchmark."""
    options_ = parser(__doc__)
    options_.add_argument("--settings", type=int, default=100)
    options_.add_argument("--truth", type=Path, help="JSON lines with `seed` and `ratios`, kept")
    options = options_.parse_args()
    known: dict[int, list[float]] = {}
    if options.truth and options.truth.exists():
        lines = map(json.loads, options.truth.read_text().splitlines())
        known = {line["seed"]: line["ratios"] for line in lines}
    rows = []
    for seed in range(8 if options.quick else options.settings):
        setting = Setting.drawn(seed)
        ratios = known.get(seed) or truth(setting)
        rows.append({"seed": seed, "ratios": ratios, "warned": warned(setting)})
        print(setting.kind, setting.world, setting.local, setting.speeds, file=sys.stderr)
    ratios = np.array([row["ratios"] for row in rows])
    warnings = np.array([row["warned"] for row in rows])
    slower, clearly = ratios > 1.01, ratios > 1.05
    right = int((warnings & slower).sum()) / max(int(warnings.sum()), 1)
    caught = int((warnings & clearly).sum()) / max(int(clearly.sum()), 1)
    lines_ = [f"{'contender':<44}{'warned':>8}{'right':>8}{'> 5 %':>8}{'warned':>8}"]
    for k, (name, given) in enumerate(CONTENDERS):
        w, s, c = warnings[:, k], slower[:, k], clearly[:, k]
        figures = (w.sum(), (w & s).sum(), c.sum(), (w & c).sum())
        lines_.append(f"{label(name, given):<44}" + "".join(f"{int(n):>8}" for n in figures))
    checks = [
        Check("warnings that are right", right, 0.9, ">="),
        Check("presets 5 % slower that are warned of", caught, 0.9, ">="),
    ]
    config = {"settings": len(rows), "steps": STEPS, "epochs": EPOCHS}
    finish(options, config, {"settings": rows}, checks, "\n".join(lines_) + "\n")


if __name__ == "__main__":
    main()
