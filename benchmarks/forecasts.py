"""Accuracy of forecasts compared with the effects of switches, in virtual time.

`scenarios/forecasts.json` lists the scenarios. Their kinds were described by people who had read
docs/simulator.md and docs/policies.md, but none of the code. Each scenario trains up to a step,
gets forecasts of all presets, and then continues under some of these presets, each from the same
step with the same devices and the same noise. The measured time is that of the steps after the
warm-up, per unit of load. `regret.py` trains the same scenarios under `auto`.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import Check, finish, parser, percent

from paceline import policies
from paceline.core.cost import Features
from paceline.wire import ALLREDUCE
from paceline_backend.insight.report import WARMUP_STEPS
from paceline_backend.insight.whatif.answer import FORECAST_STEPS
from paceline_backend.insight.whatif.forecast import of_state
from paceline_backend.insight.whatif.measured import MeasuredSteps, with_spans
from paceline_backend.insight.whatif.state import PlanningState
from paceline_backend.simulator import Scenario, ScenarioError, Simulation, TrainedSegment

SCENARIOS = Path(__file__).with_name("scenarios") / "forecasts.json"
# Number of steps that are measured after a switch and its warm-up.
AFTER = 200
# Number of forecasts that are checked in each scenario.
OPTIONS = 8
# Number of steps that a forecast uses.
KEPT = FORECAST_STEPS


def scenarios(kind: str = "") -> list[dict[str, Any]]:
    """Return the scenarios whose kind contains the text `kind`."""
    read: list[dict[str, Any]] = json.loads(SCENARIOS.read_text())
    return [each for each in read if kind in each["kind"]]


def mixed(sizes: Mapping[str, Any], seed: int) -> np.ndarray[Any, Any]:
    """Draw sizes from a mixture of distributions."""
    rng, samples = np.random.default_rng(seed), sizes["samples"]
    parts = sizes["mixture"]
    shares = np.array([part["share"] for part in parts])
    of = rng.choice(len(parts), samples, p=shares / shares.sum())
    drawn = np.zeros(samples)
    for number, part in enumerate(parts):
        ((name, given),) = ((k, v) for k, v in part.items() if k != "share")
        if name == "pareto":
            values = given[1] * (1 + rng.pareto(given[0], samples))
        else:
            values = getattr(rng, name)(*given, samples)
        drawn = np.where(of == number, values, drawn)
    drawn = np.clip(drawn, sizes.get("min"), sizes.get("max"))
    return np.asarray(np.ceil(drawn) if sizes.get("whole") else drawn.round(3))


def simulation_of(scenario: Mapping[str, Any], steps: int) -> Simulation:
    """Return the simulation of a scenario with `steps` steps. Mixed sizes are passed in a file."""
    body = copy.deepcopy(dict(scenario)) | {"name": "forecasts", "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        if "mixture" in body["sizes"]:
            path = Path(folder) / "sizes.npy"
            np.save(path, mixed(body["sizes"], body["seed"]))
            body["sizes"] = {"file": str(path)}
        return Simulation.of(Scenario.of(body))


def measured(ran: Sequence[TrainedSegment], newest: int) -> MeasuredSteps:
    """Return the measurements of a simulation's newest steps, as a forecast gets them."""
    columns = (np.concatenate(column) for column in zip(*(r.features for r in ran), strict=True))
    features = Features(*columns)
    of = MeasuredSteps(
        step=np.concatenate([r.plan.first_step + np.arange(len(r.step_s)) for r in ran]),
        features=features,
        compute_s=np.concatenate([r.compute_s for r in ran]),
        data_s=np.concatenate([r.data_s for r in ran]),
        sync_s=np.concatenate([r.wait_s + r.communication_s for r in ran]),
        rank_step_s=np.concatenate([r.rank_step_s for r in ran]),
        load=features.load.sum(axis=1),
    )
    of = of.since(max(len(of) - newest, 0))
    relaxed = [r for r in ran if r.plan.synchroniser != ALLREDUCE]

    def reduced_s(seqs: list[int]) -> list[float]:
        of_segments = [r for r in relaxed if r.plan.seq in seqs]
        return [round_.reduced_s for r in of_segments for round_ in r.rounds][-256:]

    return with_spans(of, [r.plan for r in relaxed], reduced_s)


def case(made: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return a scenario's forecasts, and the measured times of some of the presets.

    If the scenario is impossible, return the reason as text.
    """
    body, name, seed = made["scenario"], made["kind"], made["scenario"]["seed"]
    row: dict[str, Any] = {"kind": name, "seed": seed, "world": body["workers"]}
    try:
        simulation = simulation_of(body, made["at"] + WARMUP_STEPS + AFTER + 4096)
    except ScenarioError as error:
        return f"{name}, seed {seed}: {error}"
    policy, parameters = body["policy"], body.get("parameters", {})
    ran = []
    while simulation.step < made["at"]:
        ran.append(simulation.advance())
    of = measured(ran, KEPT)
    known, window = simulation.history, simulation.window
    state = PlanningState(0, policy, parameters, known, window, of, of.step >= WARMUP_STEPS)
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
    mine = next(f for f in answer.forecasts if (f.policy, f.parameters) == (policy, parameters))
    others = [forecast for forecast in answer.forecasts if forecast is not mine]
    # Check the best two, on which `auto` acts, and a random choice of the others.
    chosen, rest = [mine, *others[:2]], others[2:]
    order = np.random.default_rng(seed).permutation(len(rest))
    chosen += [rest[at] for at in order[: OPTIONS - len(chosen)]]
    base_s = None
    for forecast in chosen:
        per_load = after(simulation, forecast.policy, forecast.parameters, forecast is mine)
        if per_load is None:
            continue
        true_s = per_load * load
        base_s = base_s or true_s
        saved = 1 - true_s / base_s
        row["options"].append(
            {
                "policy": forecast.policy,
                "parameters": forecast.parameters,
                "relaxed": forecast.relaxed,
                "error": forecast.step_time_s / true_s - 1,
                "inside": forecast.low_s <= true_s <= forecast.high_s,
                "half": (forecast.high_s - forecast.low_s) / 2 / forecast.step_time_s,
                "saving": forecast.saving,
                "saving_inside": forecast.saving_low <= saved <= forecast.saving_high,
                "saved": saved,
                "fit_error": answer.fit_error,
            }
        )
    return row


def after(
    before: Simulation, policy: str, parameters: dict[str, Any], in_force: bool
) -> float | None:
    """Return seconds per unit of load under a preset after its warm-up; None if it cannot train."""
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
    step = np.concatenate([r.plan.first_step + np.arange(len(r.step_s)) for r in ran])
    counted = (step >= first) & (step < first + AFTER)
    step_s = np.concatenate([r.evened_s for r in ran])[counted]
    load = np.concatenate([r.evened_load for r in ran])[counted]
    return float(step_s.sum() / load.sum())


def table_of(cells: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return the figures by kind of scenario."""
    lines = []
    for name, options in cells.items():
        off = np.abs([option["error"] for option in options])
        inside, saving = (
            percent([option[field] for option in options]) for field in ("inside", "saving_inside")
        )
        lines.append(
            f"{name[:78]:78} {len(options):3} inside {inside:4.0f} % (saving {saving:4.0f})"
            f" error {100 * np.median(off):5.2f} most {100 * off.max():5.1f} %"
            f" ± {100 * np.median([option['half'] for option in options]):5.2f} %"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    asking = parser(__doc__)
    asking.add_argument("--kind", default="", help="only scenario kinds that contain this text")
    asking.add_argument("--seed", type=int, default=0, help="number added to the scenarios' seeds")
    asking.add_argument("--jobs", type=int, default=2, help="processes")
    options = asking.parse_args()
    asked = scenarios(options.kind)
    if options.quick:
        asked = list({each["kind"]: each for each in reversed(asked)}.values())
    for each in asked:
        each["scenario"]["seed"] += options.seed
    rows, impossible = [], []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for number, row in enumerate(pool.imap(case, asked), 1):
            if isinstance(row, str):
                impossible.append(row)
            else:
                rows.append(row)
            said = row if isinstance(row, str) else f"{row['kind']}: {row['reason'] or ''}"
            print(f"{number}/{len(asked)} {said}", file=sys.stderr)
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(row["kind"], []).extend(row["options"])
    cells = {kind: some for kind, some in cells.items() if some}
    every = [option for some in cells.values() for option in some]
    errors = np.abs([option["error"] for option in every])
    inside = percent([option["inside"] for option in every])
    kinds = {kind: percent([option["inside"] for option in some]) for kind, some in cells.items()}
    half = float(np.median([option["half"] for option in every]))
    refused = percent([row["reason"] is not None for row in rows])
    checks = [
        Check("forecasts", len(every), 1000, ">="),
        Check("scenarios that can be, %", 100 * len(rows) / len(asked), 95, ">="),
        Check("outcomes inside the 95 % interval, %, at least", inside, 93, ">="),
        Check("outcomes inside the 95 % interval, %, at most", inside, 97, "<="),
        Check("the kind with the fewest inside, %", min(kinds.values()), 85, ">="),
        Check("median half-width of an interval", half, 0.03, "<="),
        Check("refused, %", refused, 5, "<="),
        Check("median error", float(np.median(errors)), 0.01, "<="),
        Check("90th percentile of the errors", float(np.quantile(errors, 0.9)), 0.05, "<="),
    ]
    results = {"kinds": kinds, "scenarios": rows, "impossible": impossible}
    config = {"seed": options.seed, "after": AFTER, "warmup": WARMUP_STEPS}
    finish(options, config, results, checks, table_of(cells))


if __name__ == "__main__":
    main()
