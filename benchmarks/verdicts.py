"""Whether verdicts name the right causes, the right ranks, the right step and the right cost.

The scenarios are in `strangers/verdicts.py`: somebody wrote them who had read docs/verdicts.md and
nothing of the code. Each scenario tells its truth; the cost of a cause is exact, because the same
random numbers are played without the cause.

A verdict is right if it names exactly the kinds of cause that there are, with exactly their ranks.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import Check, finish, parser
from virtual import module_at

from paceline_backend.demo import emulation, example
from paceline_backend.insight.verdict import ObservedSteps, TimeLoss, Verdict, judge
from paceline_backend.server.stack import Stack

SEED = 1_000_000
CASES = Path(__file__).with_name("strangers") / "verdicts.py"
NEAR = 10  # steps by which a told onset may be off
SIGMAS = 2.0  # onsets of smaller steps are not counted


def observed(case: Any) -> ObservedSteps:
    """What a scenario's ranks report."""
    return ObservedSteps(
        np.arange(len(case.first)),
        *(
            np.asarray(getattr(case, name), float)
            for name in ("samples", "load", "squares", "longest", "data_s", "compute_s", "sync_s")
        ),
        np.asarray(case.between_s, float),
        np.asarray(case.first, bool),
        np.zeros(len(case.first), bool),
        tuple(case.nodes),
    )


def by_kind(causes: Sequence[Any]) -> dict[str, set[int]]:
    """Kind → all its ranks."""
    kinds: dict[str, set[int]] = defaultdict(set)
    for cause in causes:
        kinds[cause.kind] |= set(cause.ranks)
    return dict(kinds)


def of_truth(truth: Any, verdict: Verdict) -> TimeLoss | None:
    """The cause that a verdict names for a true one; None: it names none."""
    same = [cause for cause in verdict.causes if cause.kind == truth.kind]
    mine = set(truth.ranks)
    return max(same, key=lambda cause: len(mine & set(cause.ranks)), default=None)


def judged(case: Any) -> dict[str, Any]:
    """A scenario, and how right its verdict is."""
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
        "world": case.samples.shape[1],
        "steps": len(case.first),
        "right": named == true,
        "all_named": all(kind in named and named[kind] >= ranks for kind, ranks in true.items()),
        "onsets": onsets,
        "costs": costs,
        "told": [_shown(cause, verdict.wall_s) for cause in verdict.causes],
        "true": [_shown(truth, verdict.wall_s) for truth in case.truths],
    }


def _shown(cause: Any, wall_s: float) -> str:
    ranks = sorted(cause.ranks)
    named = str(ranks) if len(ranks) <= 6 else f"[{ranks[0]} … {ranks[-1]}, {len(ranks)}]"
    return f"{cause.kind} {named} since {cause.since}: {100 * cause.cost_s / wall_s:.1f} %"


# Cause → guilty ranks and emulated devices. Trainings run under bsp, where the uneven lengths of
# PLAID's recordings are a cause by themselves.
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
    """Trains PLAID with one cause and asks the server for the verdict."""
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
    deadline = time.monotonic() + 180
    while (stack.api("GET", f"/runs/{run}")["step"] or 0) < last:
        if time.monotonic() > deadline:
            raise TimeoutError(f"run {run} did not reach step {last} in 180 s")
        time.sleep(0.2)
    verdict = stack.api("GET", f"/runs/{run}/verdict?from={first}&to={last}")
    stack.api("POST", f"/runs/{run}/stop", {"force": True})
    # The lengths of PLAID's recordings are a cause in each of these runs.
    others = [cause for cause in verdict["causes"] if cause["kind"] != "data"]
    named = [(cause["kind"], cause["ranks"]) for cause in others]
    right = named == ([] if kind == "data" else [(kind, ranks)])
    return {"kind": kind, "ranks": ranks, "right": right, "verdict": verdict}


def percent(values: Sequence[bool]) -> float:
    """How many are True, in percent."""
    return 100 * float(np.mean(values)) if values else 100.0


def table_of(rows: Sequence[dict[str, Any]], misses: int) -> str:
    """By scenario, and the misses."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        right = sum(row["right"] for row in mine)
        costs = percent([good for row in mine for good in row["costs"]])
        onsets = percent([good for row in mine for good in row["onsets"]])
        lines.append(
            f"{name:64} {right:3}/{len(mine):<3} cost {costs:4.0f} % onset {onsets:4.0f} %"
        )
    wrong = [row for row in rows if not row["right"]]
    lines += [
        f"MISS {row['name']}, seed {row['seed']}, {row['world']} ranks, {row['steps']} steps:\n"
        f"  told {row['told']}\n  true {row['true']}"
        for row in wrong[:misses]
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs the benchmark."""
    asking = parser(__doc__)
    asking.add_argument("--real", action="store_true", help="also four real trainings")
    asking.add_argument("--seed", type=int, default=SEED, help="seed of the first scenario")
    asking.add_argument("--cases", type=Path, default=CASES, help="file with the scenarios")
    asking.add_argument("--each", type=int, default=24, help="scenarios of each kind")
    asking.add_argument("--misses", type=int, default=20, help="misses to print")
    options = asking.parse_args()
    module = module_at(options.cases)
    each = 3 if options.quick else options.each
    rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for sick, kinds in ((True, module.KINDS), (False, module.HEALTHY)):
        many = each if sick else -(-300 // len(kinds)) if not options.quick else each
        for at, make in enumerate(kinds.values()):
            for k in range(many):
                seed = options.seed + 1000 * at + k + (500_000 if not sick else 0)
                rows[sick].append(judged(make(np.random.default_rng(seed), seed)))
    single = [row for row in rows[True] if len(row["true"]) == 1]
    double = [row for row in rows[True] if len(row["true"]) > 1]
    onsets = [good for row in rows[True] for good in row["onsets"]]
    costs = [good for row in rows[True] for good in row["costs"]]
    checks = [
        Check("cause and ranks right, %", percent([row["right"] for row in single]), 97, ">="),
        Check("two at once, all named, %", percent([row["all_named"] for row in double]), 90, ">="),
        Check("false alarms, %", 100 - percent([row["right"] for row in rows[False]]), 1, "<="),
        Check(f"onset within {NEAR} steps, %", percent(onsets), 90, ">="),
        Check("cost within 10 % or 0.5 % of the wall time, %", percent(costs), 95, ">="),
    ]
    everything = rows[True] + rows[False]
    table = table_of(everything, options.misses)
    table += f"\ntwo at once, nothing else named: {percent([row['right'] for row in double]):.1f} %"
    results: dict[str, Any] = {"scenarios": everything}
    if options.real:
        with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), 0) as stack:
            results["real"] = [real(stack, kind) for kind in REAL]
        checks.append(
            Check("of 4 real trainings right", sum(x["right"] for x in results["real"]), 4, ">=")
        )
        for training in results["real"]:
            table += (
                f"\nreal {training['kind']} {training['ranks']}: {training['verdict']['words']}"
            )
    finish(
        options,
        {"seed": options.seed, "with_cause": len(rows[True]), "healthy": len(rows[False])},
        results,
        checks,
        table,
    )


if __name__ == "__main__":
    main()
