"""Regret of `auto` compared with the best policy in hindsight, in virtual time.

Each scenario starts with bsp and trains under `auto`, as a controller and an advisor would run it
if forecasts took no time. Then the same devices with the same noise train from start to end under
each preset that does not change the training, with its defaults and its variants. The scenarios are
those of `forecasts.py`, the first of each kind.
"""

from __future__ import annotations

import copy
import multiprocessing
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from forecasts import measured, scenarios, simulation_of
from harness import Check, finish, parser

from paceline import policies
from paceline_backend.control.advice import NextLook
from paceline_backend.insight.report import WARMUP_STEPS
from paceline_backend.insight.whatif.answer import FORECAST_STEPS, Forecast, label
from paceline_backend.insight.whatif.auto import BY, decide
from paceline_backend.insight.whatif.forecast import of_state
from paceline_backend.insight.whatif.simulate import Effort, presets_and_variants
from paceline_backend.insight.whatif.state import PlanningState
from paceline_backend.simulator import Simulation, TrainedSegment
from paceline_backend.store.switches import Switch

# Steps before this one are reported separately.
START_UP = 200


def case(made: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the figures of a scenario: `auto` compared with each preset."""
    body = made["scenario"] | {"policy": "bsp", "parameters": {}}
    first = simulation_of(body, steps)
    began = time.process_time()
    switched, times = under_auto(copy.deepcopy(first), steps)
    row: dict[str, Any] = {
        "kind": made["kind"],
        "seed": body["seed"],
        "world": first.hello.world,
        "switches": switched,
        "took_s": time.process_time() - began,
    }
    fixed = {}
    for policy, parameters in options():
        simulation = copy.deepcopy(first)
        simulation.policy = policies.make(policy, parameters)
        fixed[label(policy, parameters)] = spent(trained(simulation, steps))
    for part, span in (("start", slice(0, START_UP)), ("then", slice(START_UP, steps))):
        taken = {name: float(of[span].sum()) for name, of in fixed.items()}
        best = min(taken, key=taken.__getitem__)
        mine = float(times[span].sum())
        row[part] = {
            "best": best,
            "ratio": mine / taken[best],
            "to_bsp": mine / taken["bsp"],
        }
    return row


def options() -> list[tuple[str, dict[str, Any]]]:
    """Return the presets that do not change the training, with their variants."""
    return [
        (name, parameters)
        for name, parameters in presets_and_variants().values()
        if policies.make(name, parameters).changes == "nothing"
        and not policies.make(name, parameters).threads
    ]


def trained(simulation: Simulation, steps: int) -> list[TrainedSegment]:
    """Train up to step `steps`, and return the trained segments."""
    ran = []
    while simulation.step < steps and not simulation.finished:
        ran.append(simulation.advance())
    return ran


def spent(ran: list[TrainedSegment]) -> Any:
    """Return seconds of each step, [steps]. Global batches are the same under these presets."""
    return np.concatenate([r.evened_s for r in ran])


def under_auto(simulation: Simulation, steps: int) -> tuple[list[str], Any]:
    """Train under `auto`, and return its switches and the time of each step."""
    ran: list[TrainedSegment] = []
    asked = [Switch(0, "bsp", "api", 0, {})]
    earlier: list[Forecast] = []
    look = NextLook(0, relaxed=False)
    while simulation.step < steps and not simulation.finished:
        if asked[-1].effective_step is None:
            asked[-1] = Switch(
                asked[-1].version, asked[-1].policy, BY, simulation.step, asked[-1].parameters
            )
        ran.append(simulation.advance())
        # The newest complete step.
        step = simulation.step - 1
        if step < look.step:
            continue
        newest, count = [], 0
        for segment in reversed(ran):
            newest.append(segment)
            count += len(segment.step_s)
            if count >= FORECAST_STEPS:
                break
        of = measured(newest[::-1], FORECAST_STEPS)
        now = asked[-1]
        assert now.effective_step is not None
        state = PlanningState(
            now.version,
            now.policy,
            now.parameters,
            simulation.history,
            simulation.window,
            of,
            of.step >= now.effective_step + WARMUP_STEPS,
        )
        made = of_state("run", state, look.presets, relaxed=False, effort=Effort(replicates=3))
        if made.step is None:
            look = look.after(None, step, 0.0, 0.0)
            continue
        decision = decide(made, earlier, asked, "switch")
        earlier.append(replace(made, decision=decision))
        look = look.after(earlier[-1], step, 0.0, 0.0)
        if decision.decided in ("switch", "back"):
            assert decision.policy is not None
            simulation.switch(policies.make(decision.policy, decision.parameters))
            asked.append(
                Switch(now.version + 1, decision.policy, BY, None, dict(decision.parameters))
            )
    named = [f"{label(s.policy, s.parameters)} at {s.effective_step}" for s in asked[1:]]
    return named, spent(ran)


def main() -> None:
    """Run the benchmark."""
    asking = parser(__doc__)
    asking.add_argument("--seed", type=int, default=0, help="number added to the scenarios' seeds")
    asking.add_argument("--scenarios", type=int, default=40)
    asking.add_argument("--steps", type=int, default=5_000)
    asking.add_argument("--most", type=int, default=32, help="largest number of ranks")
    asking.add_argument("--jobs", type=int, default=2, help="processes")
    asking.add_argument("--skip", type=int, default=0, help="number of first scenarios to skip")
    options = asking.parse_args()
    count, steps, most = options.scenarios, options.steps, options.most
    if options.quick:
        count, steps, most = 2, 400, 6
    small = [each for each in scenarios() if each["scenario"]["workers"] <= most]
    # Keep the first scenario of each kind.
    kinds = {each["kind"]: each for each in reversed(small)}
    asked = list(reversed(kinds.values()))[:count][options.skip :]
    for each in asked:
        each["scenario"]["seed"] += options.seed
    rows = []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for row in pool.imap(partial(case, steps=steps), asked):
            rows.append(row)
            print(_line(row), file=sys.stderr, flush=True)
    then = [row["then"]["ratio"] for row in rows]
    checks = [
        Check("to the best in hindsight, mean", float(np.mean(then)), 1.03, "<="),
        Check("to the best in hindsight, worst", float(np.max(then)), 1.10, "<="),
        Check("to bsp, worst", max(row["then"]["to_bsp"] for row in rows), 1.01, "<="),
    ]
    config = {"seed": options.seed, "steps": steps, "start_up": START_UP}
    finish(options, config, {"rows": rows}, checks, "\n".join(map(_line, rows)))


def _line(row: dict[str, Any]) -> str:
    then, start = row["then"], row["start"]
    return (
        f"{row['kind'][:60]:60} {row['world']:3} start {start['ratio']:.3f} then "
        f"{then['ratio']:.3f} of {then['best']}, {then['to_bsp']:.3f} of bsp; {row['switches']}"
    )


if __name__ == "__main__":
    main()
