"""Accuracy of verdicts: causes, ranks, first steps and costs.

The scenarios are those of `tests/support/verdict_scenarios.py`. A verdict is right if it names
exactly the kinds of cause that the scenario has, with exactly their ranks. `--real` adds four
trainings on emulated devices.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import Check, finish, parser, percent, wait

from paceline_backend.demo import emulation, example
from paceline_backend.insight.verdict import ObservedSteps, TimeLoss, Verdict, judge
from paceline_backend.server.stack import Stack

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.verdict_scenarios import Case, Truth, make, scenarios

SEED = 1_000_000
# A named onset is right if it is at most this far from the true onset.
NEAR = 10  # steps
# Onsets of fewer standard deviations of the noise than this are not counted.
SIGMAS = 2.0


def observed(case: Case) -> ObservedSteps:
    """Return the steps that a scenario's ranks report."""
    of = case.batches
    steps = len(case.first)
    return ObservedSteps(
        np.arange(steps),
        of.samples,
        of.load,
        of.squares,
        of.longest,
        case.data_s,
        case.compute_s,
        case.sync_s,
        case.between_s,
        case.first,
        np.zeros(steps, bool),
        case.nodes,
    )


def by_kind(causes: Sequence[Any]) -> dict[str, set[int]]:
    """Return all ranks of each kind of cause."""
    kinds: dict[str, set[int]] = defaultdict(set)
    for cause in causes:
        kinds[cause.kind] |= set(cause.ranks)
    return dict(kinds)


def of_truth(truth: Truth, verdict: Verdict) -> TimeLoss | None:
    """Return the named cause of a true cause's kind with most of its ranks; None: none is named."""
    same = [cause for cause in verdict.causes if cause.kind == truth.kind]
    mine = set(truth.ranks)
    return max(same, key=lambda cause: len(mine & set(cause.ranks)), default=None)


def judged(case: Case) -> dict[str, Any]:
    """Return a scenario and the accuracy of its verdict."""
    verdict = judge(observed(case))
    named, true = by_kind(verdict.causes), by_kind(case.truths)
    onsets, costs = [], []
    for truth in case.truths:
        cause = of_truth(truth, verdict)
        near_s = max(0.1 * truth.cost_s, 0.005 * verdict.wall_s)
        costs.append(cause is not None and abs(cause.cost_s - truth.cost_s) <= near_s)
        if truth.sigmas is not None and truth.sigmas >= SIGMAS and truth.since is not None:
            onsets.append(cause is not None and abs((cause.since or 0) - truth.since) <= NEAR)
    return {
        "name": case.name,
        "seed": case.seed,
        "world": len(case.nodes),
        "steps": len(case.first),
        "right": named == true,
        "all_named": all(kind in named and named[kind] >= ranks for kind, ranks in true.items()),
        "onsets": onsets,
        "costs": costs,
        "named": [_shown(cause, verdict.wall_s) for cause in verdict.causes],
        "true": [_shown(truth, verdict.wall_s) for truth in case.truths],
    }


def _shown(cause: Any, wall_s: float) -> str:
    ranks = sorted(cause.ranks)
    named = str(ranks) if len(ranks) <= 6 else f"[{ranks[0]} … {ranks[-1]}, {len(ranks)}]"
    return f"{cause.kind} {named} since {cause.since}: {100 * cause.cost_s / wall_s:.1f} %"


# Cause → its ranks and the emulated devices. Trainings run under bsp, in which the uneven lengths
# of PLAID's recordings are another cause.
REAL: dict[str, tuple[list[int], dict[str, Any]]] = {
    "node": ([2], emulation([1, 1, 3, 1])),
    "data": ([], emulation([1, 1, 1, 1])),
    "transient": (
        [1],
        emulation([1, 1, 1, 1])
        | {"slowdowns": [{"ranks": [1], "factor": 4.0, "first_step": 30, "steps": 20}]},
    ),
    "input": ([3], emulation([1, 1, 1, 1]) | {"data_s": [0, 0, 0, 0.15]}),
}
REAL_STEPS = (10, 69)


def real(stack: Stack, kind: str) -> dict[str, Any]:
    """Train PLAID with one cause, and query the server's verdict."""
    ranks, devices = REAL[kind]
    body = {
        "name": f"verdict-{kind}",
        "script": str(example("plaid") / "train.py"),
        "args": ["--epochs", "1000"],
        "nproc": len(devices["a_s"]),
        "policy": "bsp",
        "env": {"PACELINE_EMULATE": json.dumps(devices)},
    }
    run = stack.api("POST", "/runs", body)["id"]
    first, last = REAL_STEPS
    wait(stack.api, run, lambda now: (now["step"] or 0) >= last, timeout_s=180)
    verdict = stack.api("GET", f"/runs/{run}/verdict?from={first}&to={last}")
    stack.api("POST", f"/runs/{run}/stop", {"force": True})
    # Ignore the lengths of PLAID's recordings, which are a cause in each of these runs.
    others = [cause for cause in verdict["causes"] if cause["kind"] != "data"]
    named = [(cause["kind"], cause["ranks"]) for cause in others]
    right = named == ([] if kind == "data" else [(kind, ranks)])
    return {"kind": kind, "ranks": ranks, "right": right, "verdict": verdict}


def table_of(rows: Sequence[dict[str, Any]], misses: int) -> str:
    """Return the figures by kind of scenario, and the misses."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        costs = percent([good for row in mine for good in row["costs"]])
        onsets = percent([good for row in mine for good in row["onsets"]])
        right = f"{sum(row['right'] for row in mine):3}/{len(mine):<3}"
        lines.append(f"{name:64} {right} cost {costs:4.0f} % onset {onsets:4.0f} %")
    lines += [
        f"MISS {row['name']}, seed {row['seed']}, {row['world']} ranks, {row['steps']} steps:\n"
        f"  named {row['named']}\n  true {row['true']}"
        for row in [row for row in rows if not row["right"]][:misses]
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    asking = parser(__doc__)
    asking.add_argument("--real", action="store_true", help="also run four real trainings")
    asking.add_argument("--seed", type=int, default=SEED, help="seed of the first draw")
    asking.add_argument("--each", type=int, default=4, help="draws of each scenario")
    asking.add_argument("--misses", type=int, default=20, help="misses to print")
    options = asking.parse_args()
    each = 1 if options.quick else options.each
    specs = scenarios()
    rows = [
        {**judged(make(spec, options.seed + each * at + turn)), "healthy": spec["healthy"]}
        for at, spec in enumerate(specs)
        for turn in range(each)
    ]
    healthy = [row for row in rows if row["healthy"]]
    single = [row for row in rows if len(row["true"]) == 1]
    double = [row for row in rows if len(row["true"]) > 1]
    onsets, costs = ([good for row in rows for good in row[of]] for of in ("onsets", "costs"))
    checks = [
        Check("cause and ranks right, %", percent([row["right"] for row in single]), 97, ">="),
        Check("two at once, all named, %", percent([row["all_named"] for row in double]), 90, ">="),
        Check("false alarms, %", 100 - percent([row["right"] for row in healthy]), 1, "<="),
        Check(f"onset within {NEAR} steps, %", percent(onsets), 90, ">="),
        Check("cost within 10 % or 0.5 % of the wall time, %", percent(costs), 95, ">="),
    ]
    table = table_of(rows, options.misses)
    table += f"\ntwo at once, nothing else named: {percent([row['right'] for row in double]):.1f} %"
    results: dict[str, Any] = {"scenarios": rows}
    if options.real:
        with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), 0) as stack:
            results["real"] = [real(stack, kind) for kind in REAL]
        right = sum(training["right"] for training in results["real"])
        checks.append(Check("of 4 real trainings right", right, 4, ">="))
        for training in results["real"]:
            table += (
                f"\nreal {training['kind']} {training['ranks']}: {training['verdict']['words']}"
            )
    config = {"seed": options.seed, "each": each, "healthy": len(healthy)}
    finish(options, config, results, checks, table)


if __name__ == "__main__":
    main()
