"""Whether a forecast tells what a switch then gives: 12 real runs of 4 emulated ranks each.

Each run has one of four sets of speeds and one of three data sets (PLAID, and two whose sizes are
drawn). A run starts under bsp, gets forecasts of all presets, and switches to one preset; the
preset changes from run to run. The forecast is compared with the time of steps per unit of load
after the switch, without the first steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Check, finish, parser
from switch import effective, wait

from paceline.core.cost import Features
from paceline.node.client import Client
from paceline_backend.demo import example
from paceline_backend.insight.report import WARMUP_STEPS
from paceline_backend.insight.whatif.forecast import of_state
from paceline_backend.insight.whatif.measured import MeasuredSteps
from paceline_backend.insight.whatif.state import PlanningState
from paceline_backend.server.stack import Stack
from paceline_backend.server.supervisor import embedded_database
from paceline_backend.simulator import Scenario, Simulation
from paceline_backend.store import Store, runs

HERE = Path(__file__).resolve().parent
SPEEDS = {
    "equal": [1.0, 1.0, 1.0, 1.0],
    "one slow": [1.0, 1.0, 1.0, 3.0],
    "half slow": [1.0, 1.0, 2.0, 2.0],
    "all differ": [1.0, 1.3, 1.7, 2.2],
}
# Script, arguments, seconds per size unit. A balanced step of equal ranks takes 0.1 s, with PLAID
# 0.2 s: PLAID's ranks really compute, on few cores.
DATA = {
    "plaid": (str(example("plaid") / "train.py"), ["--epochs", "10000"], 36e-6),
    "lognormal": (str(HERE / "sized.py"), ["--spread", "1.0"], 16e-6),
    "alike": (str(HERE / "sized.py"), ["--spread", "0.15", "--seed", "1"], 16e-6),
}
PRESETS = ("chronica", "paceline", "sata", "lbb", "boa", "dynamic-batching")
PER_STEP_S = 5e-3
BEFORE = 56  # steps under bsp
AFTER = 50  # steps that are measured under the other preset, after its warm-up


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--noise",
        action="store_true",
        help="instead: forecasts of 100 simulated runs that have nothing to save",
    )
    options = arguments.parse_args()
    if options.noise:
        noise(options)
    cases = [(speeds, data) for data in DATA for speeds in SPEEDS]
    if options.quick:
        cases = [("one slow", "lognormal"), ("half slow", "alike")]
    rows = []
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), 0) as stack:
        for turn, (speeds, data) in enumerate(cases):
            # Each set of speeds meets three presets, a different one with each data set.
            policy = PRESETS[(turn + turn // len(SPEEDS)) % len(PRESETS)]
            rows.append({"speeds": speeds, "data": data, **case(stack, speeds, data, policy)})
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    errors = [abs(row["error"]) for row in rows]
    inside = sum(bool(row["low_s"] <= row["measured_s"] <= row["high_s"]) for row in rows)
    results = {"runs": rows, "median_error": statistics.median(errors), "inside": inside}
    table = "\n".join(
        [
            *(_line(row) for row in rows),
            f"median error {100 * results['median_error']:.1f} %; {inside} of {len(rows)} within "
            "the interval",
        ]
    )
    checks = [Check("largest error of a forecast step time", max(errors), 0.05, "<=")]
    config = {"before": BEFORE, "warmup": WARMUP_STEPS, "after": AFTER, "speeds": SPEEDS}
    finish(options, config, results, checks, table)


def noise(options: argparse.Namespace) -> None:
    """Checks that noise alone promises no saving: equal ranks, sizes nearly equal, 5 % noise.

    Lower bounds of savings must stay below the margin of `auto`.
    """
    seeds = 10 if options.quick else 100
    bounds = [saving_low(seed, ("chronica", "paceline")[seed % 2]) for seed in range(seeds)]
    checks = [Check("highest lower bound of a saving", max(bounds), 0.02, "<=")]
    table = f"{seeds} runs: lower bounds of savings from {min(bounds):+.3f} to {max(bounds):+.3f}"
    finish(options, {"seeds": seeds}, {"bounds": bounds}, checks, table)


def saving_low(seed: int, preset: str) -> float:
    """The lower bound of what a preset would save, after 64 steps of a simulated run."""
    scenario = Scenario.of(
        {
            "name": "noise",
            "workers": 4,
            "global_batch": 16,
            "steps": 64,
            "seed": seed,
            "sizes": {"distribution": "lognormal", "mean": 150, "dif": 3, "samples": 640},
            "devices": {"unit_s": 1e-5, "step_s": 0.005, "noise": 0.05},
            "communication": {"fixed_s": 0.004},
        }
    )
    simulation = Simulation.of(scenario)
    ran = []
    while not simulation.finished:
        ran.append(simulation.advance())
    features = Features(
        *(
            np.concatenate(column)
            for column in zip(*(trained.features for trained in ran), strict=True)
        )
    )
    measured = MeasuredSteps(
        step=np.arange(len(features.load)),
        features=features,
        compute_s=np.concatenate([trained.compute_s for trained in ran]),
        data_s=np.concatenate([trained.data_s for trained in ran]),
        sync_s=np.concatenate([trained.wait_s + trained.communication_s for trained in ran]),
        rank_step_s=np.concatenate([trained.rank_step_s for trained in ran]),
        load=features.load.sum(axis=1),
    )
    steady = measured.step >= WARMUP_STEPS
    state = PlanningState(0, "bsp", {}, simulation.history, simulation.window, measured, steady)
    answer = of_state("run", state, [preset], replicates=1)
    if answer.reason is not None:
        raise RuntimeError(f"seed {seed}: no forecast: {answer.reason}")
    return max(forecast.saving_low for forecast in answer.forecasts)


def case(stack: Stack, speeds: str, data: str, policy: str) -> dict[str, Any]:
    """One run: forecast and measurement of a preset."""
    script, arguments, unit_s = DATA[data]
    factors = SPEEDS[speeds]
    emulated = {"a_s": [unit_s * f for f in factors], "b_s": [PER_STEP_S] * len(factors)}
    body = {
        "name": f"{data}, {speeds}",
        "script": script,
        "args": arguments,
        "nproc": len(factors),
        "policy": "bsp",
        "env": {"PACELINE_EMULATE": json.dumps(emulated)},
    }
    run = stack.api("POST", "/runs", body)["id"]
    wait(stack.api, run, lambda now: (now["step"] or 0) >= BEFORE)
    began = time.monotonic()
    with Client(stack.url, timeout_s=300.0) as client:  # the first forecast starts its process
        answer = client.call("GET", f"/runs/{run}/whatif?refresh=true")
    took_s = time.monotonic() - began
    if answer["reason"] is not None:
        raise RuntimeError(f"no forecast: {answer['reason']}")
    forecast = next(row for row in answer["forecasts"] if row["policy"] == policy)
    chosen = {"policy": policy, "parameters": forecast["parameters"], "by": "benchmark"}
    asked = stack.api("POST", f"/runs/{run}/policy", chosen)
    first = effective(stack.api, run, asked["version"]) + WARMUP_STEPS
    wait(stack.api, run, lambda now: now["step"] >= first + AFTER)
    span = f"from={first}&to={first + AFTER - 1}"
    step_s = stack.api("GET", f"/runs/{run}/steps?{span}")["step_s"]
    load = np.sum(stack.api("GET", f"/runs/{run}/worker-steps?{span}")["load"])
    stack.api("POST", f"/runs/{run}/stop", {"force": True})
    wait(stack.api, run, lambda now: now["state"] == "stopped")
    measured_s = float(sum(step_s) / load * mean_load(stack, run))
    return {
        "policy": policy,
        "parameters": forecast["parameters"],
        "bsp_s": answer["current"]["step_time_s"],
        "forecast_s": forecast["step_time_s"],
        "low_s": forecast["low_s"],
        "high_s": forecast["high_s"],
        "measured_s": measured_s,
        "error": forecast["step_time_s"] / measured_s - 1,
        "fit_error": answer["fit_error"],
        "replicates": answer["replicates"],
        "took_s": took_s,
    }


def mean_load(stack: Stack, run: str) -> float:
    """Mean load of a step over a whole epoch."""
    with Store.open(embedded_database(stack.data)) as store, store.read() as connection:
        hello = runs.hello(connection, runs.key_of(connection, run))
    assert hello is not None
    sizes = hello.sizes_array()
    return float(sizes.sum()) / -(-len(sizes) // hello.global_batch)


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['data']:10} {row['speeds']:11} {row['policy']:17} bsp {row['bsp_s']:.3f} s, "
        f"forecast {row['forecast_s']:.3f} ({row['low_s']:.3f} to {row['high_s']:.3f}), "
        f"then {row['measured_s']:.3f}: {100 * row['error']:+.1f} %"
    )


if __name__ == "__main__":
    main()
