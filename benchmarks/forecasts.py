"""Whether forecasts tell what a switch then gives, in virtual time.

The scenarios are in `strangers/forecasts.py`: somebody wrote them who had read docs/simulator.md
and docs/policies.md and nothing of the code. Each scenario trains up to a step, gets forecasts of
all presets, and then goes on under some of the forecast presets: the same devices, the same noise,
each from the same step. The measured time is that of the steps after the warm-up, per unit of load.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import Check, finish, parser
from virtual import measured, module_at

from paceline_backend import policies
from paceline_backend.insight.report import WARMUP_STEPS
from paceline_backend.insight.whatif.answer import STEPS
from paceline_backend.insight.whatif.forecast import of_state
from paceline_backend.insight.whatif.state import PlanningState
from paceline_backend.simulator import Scenario, ScenarioError, Simulation

SEED = 1_000_000
CASES = Path(__file__).with_name("strangers") / "forecasts.py"
AFTER = 200  # steps that are measured after a switch and its warm-up
OPTIONS = 8  # forecasts that are checked in each scenario
KEPT = STEPS  # steps that a forecast rests on


def simulation_of(scenario: dict[str, Any], steps: int) -> Simulation:
    """The simulation of a scenario for so many steps; sizes given one by one go through a file."""
    body = copy.deepcopy(scenario) | {"steps": steps}
    body.pop("epochs", None)
    with tempfile.TemporaryDirectory() as folder:
        values = body["sizes"].pop("values", None)
        if values is not None:
            np.save(Path(folder) / "sizes.npy", np.asarray(values, float))
            body["sizes"] = {"file": str(Path(folder) / "sizes.npy")}
        return Simulation.of(Scenario.of(body))


def case(asked: tuple[str, str, int]) -> dict[str, Any] | str:
    """One scenario: its forecasts, and what some of the forecast presets then took.

    A text is the reason why there can be no such scenario.
    """
    path, name, seed = asked
    made = module_at(Path(path)).KINDS[name](np.random.default_rng(seed), seed)
    row: dict[str, Any] = {"kind": name, "seed": seed, "world": made["scenario"]["workers"]}
    body = made["scenario"]
    try:
        simulation = simulation_of(body, made["at"] + WARMUP_STEPS + AFTER + 4096)
    except ScenarioError as error:
        return f"{name}, seed {seed}: {error}"
    policy, parameters = body.get("policy", "bsp"), body.get("parameters", {})
    ran = []
    while simulation.step < made["at"]:
        ran.append(simulation.advance())
    state = PlanningState(
        0,
        policy,
        parameters,
        simulation.history,
        simulation.window,
        of := measured(ran, KEPT),
        of.step >= WARMUP_STEPS,
    )
    began = time.process_time()
    answer = of_state("run", state)
    row |= {"took_s": time.process_time() - began, "policy": policy, "reason": answer.reason}
    row |= {"left_out": len(answer.left_out), "replicates": answer.replicates, "options": []}
    if answer.reason is not None:
        return row
    sizes = simulation.history.sizes
    load = float(sizes.sum()) / -(-len(sizes) // simulation.hello.global_batch)
    if simulation.hello.drop_last:
        load = float(sizes.mean()) * simulation.hello.global_batch
    rng = np.random.default_rng(seed)
    mine = next(f for f in answer.forecasts if (f.policy, f.parameters) == (policy, parameters))
    others = [forecast for forecast in answer.forecasts if forecast is not mine]
    chosen = [mine, *others[:2]]  # the best two are what is acted on
    rest = others[2:]
    chosen += [rest[at] for at in rng.permutation(len(rest))[: OPTIONS - len(chosen)]]
    base_s = None
    for forecast in chosen:
        per_load = after(simulation, forecast.policy, forecast.parameters, forecast is mine)
        if per_load is None:
            continue
        true_s = per_load * load
        base_s = base_s or true_s
        row["options"].append(
            {
                "policy": forecast.policy,
                "parameters": forecast.parameters,
                "relaxed": forecast.relaxed,
                "error": forecast.step_time_s / true_s - 1,
                "inside": forecast.low_s <= true_s <= forecast.high_s,
                "half": (forecast.high_s - forecast.low_s) / 2 / forecast.step_time_s,
                "saving": forecast.saving,
                "saving_inside": forecast.saving_low <= 1 - true_s / base_s <= forecast.saving_high,
                "saved": 1 - true_s / base_s,
                "fit_error": answer.fit_error,
            }
        )
    return row


def after(
    before: Simulation, policy: str, parameters: dict[str, Any], in_force: bool
) -> float | None:
    """Seconds per unit of load under a preset; None: it cannot train here."""
    simulation = copy.deepcopy(before)
    if not in_force:
        simulation.switch(policies.make(policy, parameters, simulation.hello.world))
    first = simulation.step + WARMUP_STEPS
    ran = []
    try:
        while simulation.step < first + AFTER and not simulation.finished:
            ran.append(simulation.advance())
    except ValueError:
        return None
    step = np.concatenate([r.segment.first_step + np.arange(len(r.step_s)) for r in ran])
    counted = (step >= first) & (step < first + AFTER)
    step_s = np.concatenate([r.evened_s for r in ran])[counted]
    load = np.concatenate([r.evened_load for r in ran])[counted]
    return float(step_s.sum() / load.sum())


def percent(values: Sequence[bool]) -> float:
    """How many are True, in percent."""
    return 100 * float(np.mean(values)) if len(values) else 100.0


def main() -> None:
    """Runs the benchmark."""
    asking = parser(__doc__)
    asking.add_argument("--seed", type=int, default=SEED, help="seed of the first scenario")
    asking.add_argument("--cases", type=Path, default=CASES, help="file with the scenarios")
    asking.add_argument("--each", type=int, default=5, help="scenarios of each kind")
    asking.add_argument("--kind", default="", help="only kinds with this in the name")
    asking.add_argument("--jobs", type=int, default=2, help="processes")
    asking.add_argument("--rows", type=Path, help="file for the rows, as JSON")
    options = asking.parse_args()
    names = [name for name in module_at(options.cases).KINDS if options.kind in name]
    each = 1 if options.quick else options.each
    asked = [
        (str(options.cases), name, options.seed + 1000 * at + k)
        for at, name in enumerate(names)
        for k in range(each)
    ]
    rows, impossible = [], []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for row in pool.imap(case, asked):
            if isinstance(row, str):
                impossible.append(row)
                print(row, file=sys.stderr)
                continue
            rows.append(row)
            print(
                f"{len(rows) + len(impossible)}/{len(asked)} {row['kind']}: {row['reason'] or ''}",
                file=sys.stderr,
            )
            if options.rows:
                options.rows.write_text(json.dumps(rows))
    cells = [(row["kind"], option) for row in rows for option in row["options"]]
    errors = np.abs([option["error"] for _, option in cells])
    inside = [option["inside"] for _, option in cells]
    kinds = {
        name: percent([option["inside"] for kind, option in cells if kind == name])
        for name in names
    }
    refused = percent([row["reason"] is not None for row in rows])
    half = float(np.median([option["half"] for _, option in cells]))
    checks = [
        Check("forecasts", len(cells), 1000, ">="),
        Check("scenarios that can be, %", 100 * len(rows) / len(asked), 95, ">="),
        Check("outcomes inside the 95 % interval, %, at least", percent(inside), 93, ">="),
        Check("outcomes inside the 95 % interval, %, at most", percent(inside), 97, "<="),
        Check("the kind with the fewest inside, %", min(kinds.values()), 85, ">="),
        Check("median half-width of an interval", half, 0.03, "<="),
        Check("refused, %", refused, 5, "<="),
        Check("median error", float(np.median(errors)), 0.01, "<="),
        Check("90th percentile of the errors", float(np.quantile(errors, 0.9)), 0.05, "<="),
    ]
    lines = []
    for name in names:
        mine = [option for kind, option in cells if kind == name]
        if mine:
            off = np.abs([option["error"] for option in mine])
            wide = np.median([option["half"] for option in mine])
            saving = percent([option["saving_inside"] for option in mine])
            lines.append(
                f"{name[:78]:78} {len(mine):3} inside {kinds[name]:4.0f} % (saving {saving:4.0f})"
                f" error {100 * np.median(off):5.2f} most {100 * off.max():5.1f} %"
                f" ± {100 * wide:5.2f} %"
            )
    results = {
        "kinds": kinds,
        "scenarios": len(rows),
        "impossible": impossible,
        "median_error": float(np.median(errors)),
    }
    config = {"seed": options.seed, "each": each, "after": AFTER, "warmup": WARMUP_STEPS}
    finish(options, config, results, checks, "\n".join(lines))


if __name__ == "__main__":
    main()
