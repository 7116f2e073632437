"""Chains of random switches, each in one run on four real ranks, whose speeds are emulated.

Each policy trains some steps. Where a step's gradients were all-reduced, the result is compared
with the gradient of a single process over the same global batch. Coverage is checked, and every
plan is made again from the database.

With `--presets all`, relaxed presets are drawn, too. Then the chain's final held-out loss is
compared with the losses of runs under `bsp` after as many epochs with other seeds. The chain's loss
may be at most as high as 99 of 100 further runs would be: mean + t · sd · √(1 + 1/N), the upper
prediction limit of N runs, where t is the 0.99 quantile of Student's distribution.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import Check, finish, parser
from scipy.stats import t

from paceline_backend import policies
from paceline_backend.server.stack import Stack

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.chains import EMULATE, STEPS, Chained, random_chain, run_bsp, run_chain, synchronous


@dataclass(frozen=True)
class Setting:
    """How much is done.

    Args:
        switches: switches of a chain.
        steps: the fewest steps of each policy.
        chains: how many chains run; together they split one random sequence of presets.
        plain: how many runs under `bsp` there are; the first ones have the chains' seeds.
    """

    switches: int
    steps: int
    chains: int = 1
    plain: int = 0


# Relaxed presets have segments of up to 64 steps, but an epoch has 25.
SETTINGS = {"synchronous": Setting(20, STEPS), "all": Setting(12, 40, chains=3, plain=8)}
QUICK = {"synchronous": Setting(4, STEPS), "all": Setting(4, 25)}


def limit(losses: list[float]) -> float:
    """What 99 of 100 further losses would not exceed, judging by the given losses."""
    n = len(losses)
    width = float(t.ppf(0.99, n - 1)) * math.sqrt(1 + 1 / n)
    return statistics.fmean(losses) + width * statistics.stdev(losses)


def result(
    names: list[str], ran: Chained, seed: int, plain: dict[int, list[float]]
) -> dict[str, Any]:
    """One chain's figures.

    Args:
        names: the chain's policies.
        ran: what the chain did.
        seed: the seed of the training.
        plain: seed → losses after each epoch of a run under `bsp`.
    """
    epochs = ran.coverage["epochs"]
    figures = {
        "policies": names,
        "seed": seed,
        "steps": ran.steps,
        "all_reduced_steps": len(ran.errors),
        "gradient_error": max(ran.errors.values()),
        "effective_steps": ran.effective_steps,
        "switches": sum(step is not None for step in ran.effective_steps[1:]),
        "switch_s": ran.waits_s,
        "switch_median_s": statistics.median(ran.waits_s),
        "planned_segments": ran.planned,
        "changed_plans": ran.replay.segments - ran.replay.identical,
        "epochs": len(epochs),
        "inexact_epochs": sum(not epoch["exact"] for epoch in epochs),
        "missing": sum(epoch["missing"] for epoch in epochs),
        "duplicated": sum(epoch["duplicated"] for epoch in epochs),
        "dropped": ran.coverage["dropped"],
        "loss": ran.losses[-1],
    }
    if plain:
        after = {other: losses[len(ran.losses) - 1] for other, losses in plain.items()}
        same_seed = after.pop(seed)
        losses = list(after.values())
        figures["bsp"] = {
            "same_seed": same_seed,
            "losses": losses,
            "mean": statistics.fmean(losses),
            "sd": statistics.stdev(losses),
            "limit": limit(losses),
        }
    return figures


def checks_of(rows: list[dict[str, Any]], switches: int) -> list[Check]:
    """What was promised of all chains together, and of each chain's loss."""

    def total(figure: str) -> int:
        return sum(row[figure] for row in rows)

    checks = [
        Check("switches done", total("switches"), switches, ">="),
        Check("epochs whose coverage is not exact", total("inexact_epochs"), 0, "<="),
        Check("samples missing", total("missing"), 0, "<="),
        Check("samples used twice", total("duplicated"), 0, "<="),
        Check(
            "largest relative error of a gradient",
            max(row["gradient_error"] for row in rows),
            1e-5,
            "<=",
        ),
        Check("plans that come out otherwise", total("changed_plans"), 0, "<="),
    ]
    for number, row in enumerate(rows, 1):
        if "bsp" in row:
            name = f"chain {number}'s held-out loss, at most bsp's limit"
            checks.append(Check(name, row["loss"], row["bsp"]["limit"], "<="))
    return checks


def table_of(rows: list[dict[str, Any]]) -> str:
    """The figures for people."""
    lines = []
    for row in rows:
        lines.append("switch                                 first step  after (s)")
        for (policy, next_policy), step, wait_s in zip(
            pairwise(row["policies"]), row["effective_steps"][1:], row["switch_s"], strict=True
        ):
            lines.append(f"{f'{policy} to {next_policy}':<38} {step:>10} {wait_s:>10.2f}")
        lines.append(
            "{steps} steps, {all_reduced_steps} of them all-reduced, {epochs} epochs; "
            "gradients of {dropped} samples dropped; held-out loss {loss:.4f}".format(**row)
        )
        if "bsp" in row:
            least, most = min(row["bsp"]["losses"]), max(row["bsp"]["losses"])
            lines.append(
                "under bsp with the same seed {same_seed:.4f}, with others {mean:.4f} ± {sd:.4f}, "
                "{least:.4f} to {most:.4f}".format(**row["bsp"], least=least, most=most)
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--presets", choices=SETTINGS, default="synchronous")
    arguments.add_argument(
        "--switches", type=int, help="switches of a chain; 20, or 12 of all presets"
    )
    arguments.add_argument("--seed", type=int, default=7)
    options = arguments.parse_args()
    setting = (QUICK if options.quick else SETTINGS)[options.presets]
    switches = options.switches or setting.switches
    known = policies.names() if options.presets == "all" else synchronous()
    names = random_chain(known, setting.chains * switches, options.seed)
    parts = [names[at : at + switches + 1] for at in range(0, len(names) - 1, switches)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder) / "data", 0) as stack:
        chains = [
            run_chain(stack, part, Path(folder) / f"chain {seed}", setting.steps, seed)
            for seed, part in enumerate(parts, options.seed)
        ]
        epochs = max(len(ran.losses) for ran in chains)
        plain = {
            seed: run_bsp(stack, Path(folder) / f"bsp {seed}", epochs, seed)
            for seed in range(options.seed, options.seed + setting.plain)
        }
    took_s = time.monotonic() - began
    rows = [
        result(part, ran, seed, plain)
        for seed, (part, ran) in enumerate(zip(parts, chains, strict=True), options.seed)
    ]
    finish(
        options,
        {
            "presets": known,
            "switches": switches,
            "steps": setting.steps,
            "emulated": EMULATE,
            "seed": options.seed,
        },
        {"seconds": took_s, "chains": rows},
        checks_of(rows, len(names) - 1),
        f"{table_of(rows)}{took_s:.0f} s",
    )


if __name__ == "__main__":
    main()
