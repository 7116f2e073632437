"""A chain of random switches among all presets, in one run on four real ranks, emulated speeds.

Each policy trains some steps; of every step the gradient is compared with that of a single process
over the same global batch. Then coverage is checked, and every plan made again from the database.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import Check, finish, parser

from paceline_backend.stack import Stack

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.chains import EMULATE, STEPS, Chained, random_chain, run_chain


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--switches", type=int, help="how many; 20, or 4 with --quick")
    arguments.add_argument("--seed", type=int, default=7)
    options = arguments.parse_args()
    names = random_chain(options.switches or (4 if options.quick else 20), options.seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder) / "data", 0) as stack:
        ran = run_chain(stack, names, Path(folder))
    took_s = time.monotonic() - began
    done = sum(step is not None for step in ran.effective_steps[1:])
    lines = ["switch                                 first step  after (s)"]
    for (one, next_), step, wait_s in zip(
        pairwise(names), ran.effective_steps[1:], ran.waits_s, strict=True
    ):
        lines.append(f"{f'{one} to {next_}':<38} {step:>10} {wait_s:>10.2f}")
    finish(
        options,
        {"policies": names, "steps": STEPS, "emulated": EMULATE, "seed": options.seed},
        {
            "seconds": took_s,
            "steps": len(ran.errors),
            "effective_steps": ran.effective_steps,
            "switch_s": ran.waits_s,
            "switch_median_s": statistics.median(ran.waits_s),
            "planned_segments": ran.planned,
        },
        [
            Check("switches done", done, len(names) - 1, ">="),
            Check("epochs whose coverage is not exact", _inexact(ran.coverage), 0, "<="),
            Check("largest relative error of a gradient", max(ran.errors.values()), 1e-5, "<="),
            Check("plans that come out otherwise", _changed(ran), 0, "<="),
        ],
        "\n".join([*lines, f"{len(ran.errors)} steps in {took_s:.0f} s"]),
    )


def _inexact(coverage: dict[str, Any]) -> int:
    return sum(not epoch["exact"] for epoch in coverage["epochs"])


def _changed(ran: Chained) -> int:
    return ran.replay.segments - ran.replay.identical


if __name__ == "__main__":
    main()
