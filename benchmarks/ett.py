"""How well each rank's step times are foretold, and how soon forecasts recover after a slowdown.

First comes real training on the embedded stack: PLAID on 4 emulated ranks with 2 % noise, of which
one becomes three times as slow. Then come simulated clusters of 8 to 64 workers with noise of 0 to
5 %, whose batches cost the sum of their sizes, are padded, or cost more the longer their samples
are. `--simulated` leaves the real training out.

The ETT error is |ETT / T − 1|. "Noticed after" counts steps from the change until the changed
rank's next five steps have a mean error under 10 %. In a run, earlier plans are still in force
after the change. "Alone" is the predictor without a run: it gets each step at once.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from harness import Check, finish, parser

from paceline.core.cost import SUM, Cost, Features
from paceline.core.emulation import Emulation, Slowdown
from paceline_backend import policies
from paceline_backend.demo import emulation, example
from paceline_backend.policies import Feedback
from paceline_backend.policies.predict.linear import LinearPredictor
from paceline_backend.server.stack import Stack
from paceline_backend.simulator import Simulation
from paceline_backend.simulator.hello import hello_of

Floats = npt.NDArray[np.float64]

SPEEDS = [1.0, 1.0, 1.5, 3.0]
FACTOR = 3.0
NOISE = 0.02
BEGUN = 20  # steps from the start to a steady state
SETTLED = 15  # steps from a change to a steady state
ONCE_MORE = 5  # steps whose mean error shows that a change was noticed
MEAN_SIZE = 45.0


@dataclass
class Run:
    """What ranks did and what was expected of them.

    Args:
        batches: what ranks trained with, [steps, W].
        compute_s: compute times, [steps, W].
        ett_s: forecasts of the compute times, [steps, W]; NaN: no forecast.
        changed: the rank whose speed changed.
        at: the step at which the speed changed.
    """

    batches: Features
    compute_s: Floats
    ett_s: Floats
    changed: int
    at: int

    def steady(self) -> Floats:
        """The errors of steps that are far from the start and from the change, [steps, W]."""
        error = self.errors(self.ett_s)
        return np.concatenate([error[BEGUN : self.at], error[self.at + SETTLED :]])

    def noticed(self) -> int:
        """After how many steps the run's forecasts noticed the change."""
        return _noticed(self.errors(self.ett_s)[self.at :, self.changed])

    def noticed_alone(self, cost: str) -> int:
        """After how many steps a predictor that gets each step at once notices the change."""
        steps, world = self.compute_s.shape
        ett_s = np.full_like(self.compute_s, np.nan)
        for step in range(self.at, min(self.at + SETTLED, steps)):
            past = slice(max(0, step - 64), step)
            feedback = _feedback(Features(*(c[past] for c in self.batches)), self.compute_s[past])
            models = LinearPredictor(cost=cost).fit(feedback, world)
            ett_s[step] = models.ett(Features(*(c[step] for c in self.batches)))
        return _noticed(self.errors(ett_s)[self.at : self.at + SETTLED, self.changed])

    def errors(self, ett_s: Floats) -> Floats:
        """|ETT / T − 1|, [steps, W]; NaN where a time or a forecast is missing."""
        time_s = np.where(self.compute_s > 0, self.compute_s, np.nan)
        return np.asarray(np.abs(np.where(ett_s > 0, ett_s, np.nan) / time_s - 1))


def _noticed(errors: Floats) -> int:
    for step in range(len(errors) - ONCE_MORE + 1):
        if np.nanmean(errors[step : step + ONCE_MORE]) < 0.1:
            return step
    return len(errors)


def _feedback(batches: Features, compute_s: Floats) -> Feedback:
    steps, world = compute_s.shape
    columns = (np.ravel(c) for c in (batches.samples, batches.load, compute_s))
    step, rank = np.repeat(np.arange(steps), world), np.tile(np.arange(world), steps)
    return Feedback(step, rank, *columns, np.ravel(batches.squares), np.ravel(batches.longest))


def real(stack: Stack, policy: str, at: int, steps: int) -> Run:
    """Trains `steps` steps; rank 0 becomes slower at step `at`."""
    slow = Slowdown(ranks=[0], factor=FACTOR, first_step=at)
    emulate = {**emulation(SPEEDS), "noise": NOISE, "slowdowns": [msgspec.to_builtins(slow)]}
    body = {
        "name": "ett-benchmark",
        "script": str(example("plaid") / "train.py"),
        "args": ["--epochs", "1000"],
        "nproc": len(SPEEDS),
        "policy": policy,
        "env": {"PACELINE_EMULATE": json.dumps(emulate)},
    }
    run = stack.api("POST", "/runs", body)["id"]
    deadline = time.monotonic() + 300
    while (now := stack.api("GET", f"/runs/{run}"))["step"] is None or now["step"] < steps:
        if time.monotonic() > deadline or now["state"] == "failed":
            raise RuntimeError(f"run {run} is {now['state']} at {now['step']}: {now['message']}")
        time.sleep(0.2)
    rows = stack.api("GET", f"/runs/{run}/worker-steps?from=0&to={steps - 1}&points=5000")
    stack.api("POST", f"/runs/{run}/stop", {"force": True})
    table = {
        name: np.array(rows[name], np.float64).T
        for name in ("samples", "load", "compute_s", "ett_s")
    }
    none = np.zeros_like(table["load"])
    batches = Features(table["samples"].astype(np.int64), table["load"], none, none)
    return Run(batches, table["compute_s"], table["ett_s"], 0, at)


def simulated(world: int, noise: float, cost: Cost, at: int, steps: int) -> Run:
    """`real` on a simulated cluster; the predictor must find out what batches cost."""
    rng = np.random.default_rng(world)
    batch = 16 * world
    sizes = MEAN_SIZE * rng.lognormal(-0.125, 0.5, 50 * batch)
    load = 16 * MEAN_SIZE * (1 + cost.kappa * MEAN_SIZE) * (2 if cost.padded else 1)
    hello = hello_of(sizes, world, batch)
    devices = Emulation(
        a_s=(0.25 / load * np.resize(SPEEDS, world)).tolist(),
        b_s=[0.01] * world,
        cost=cost,
        noise=noise,
        slowdowns=[Slowdown(ranks=[0], factor=FACTOR, first_step=at)],
    )
    policy = replace(policies.make("chronica"), predictor=LinearPredictor(cost="auto"))
    run = Simulation(hello, devices, policy)
    ran = []
    while run.step < steps:
        ran.append(run.advance())
    batches = Features(*(np.concatenate(c) for c in zip(*(r.features for r in ran), strict=True)))
    expected = [np.array(r.segment.ett_s or np.full(r.compute_s.shape, np.nan)) for r in ran]
    return Run(batches, np.concatenate([r.compute_s for r in ran]), np.concatenate(expected), 0, at)


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__)
    options.add_argument("--simulated", action="store_true", help="no real training")
    options.add_argument("--policy", default="chronica", help="policy of the real training")
    given = options.parse_args()
    runs: dict[str, tuple[Run, str]] = {}
    if not given.simulated:
        at, steps = (40, 70) if given.quick else (80, 140)
        with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), 0) as stack:
            # How many steps are planned already depends on where in a segment the change comes.
            for k in range(1 if given.quick else 3):
                name = f"4 real ranks, {given.policy}, change at step {at + k}"
                runs[name] = real(stack, given.policy, at + k, steps), "sum"
    kinds = {"sum": SUM, "padded": Cost(padded=True), "quadratic": Cost(kappa=1 / MEAN_SIZE)}
    for world in (8,) if given.quick else (8, 64):
        for noise in (0.02,) if given.quick else (0.0, 0.02, 0.05):
            for kind, cost in kinds.items():
                name = f"{world} simulated, noise {noise:.0%}, {kind}"
                runs[name] = simulated(world, noise, cost, 80, 160), "auto"
    lines = [f"{'':48} {'steady':>8} {'median':>7} {'noticed after':>14} {'alone':>6}"]
    results, checks = {}, []
    for name, (run, cost_kind) in runs.items():
        figures = {
            "steady": float(np.nanmean(run.steady())),
            "steady_median": float(np.nanmedian(run.steady())),
            "noticed": run.noticed(),
            "noticed_alone": run.noticed_alone(cost_kind),
        }
        results[name] = figures
        lines.append(
            f"{name:48} {figures['steady']:8.2%} {figures['steady_median']:7.2%} "
            f"{figures['noticed']:>14} {figures['noticed_alone']:>6}"
        )
        noisy = "noise 5%" in name  # 5 % noise by itself is an error of 4 %
        checks.append(
            Check(f"{name}: steady error", figures["steady"], 0.045 if noisy else 0.03, "<=")
        )
        checks.append(Check(f"{name}: noticed after, steps", figures["noticed"], 5, "<="))
    config = {"speeds": SPEEDS, "factor": FACTOR, "noise": NOISE, "policy": given.policy}
    finish(given, config, results, checks, "\n".join(lines))


if __name__ == "__main__":
    main()
