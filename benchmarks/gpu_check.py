"""Checks on a GPU: times, gradients, synchronisers, overhead, copies and mixed precision.

All ranks share the first GPU: three ranks under gloo, and a single rank under NCCL, which refuses
two ranks on one device. Without a GPU the program reports that and exits with 0. ``--device cpu``
runs the same checks on the CPU, where times mean little. All parts together take at most 8 minutes.
A check whose name ends in "(time)" needs a device and a host that do nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Check, finish, parser, report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import gpu_parts
from support.gpu_parts import TIME, WORLD, Figures, Kit, Outcome, Part, Result, in_turn

__all__ = ["PARTS", "TIME", "Check", "Kit", "Outcome", "main", "run_parts", "table_of"]

RESULTS = Path(__file__).parent / "results"
OUTPUT = "gpu.json"

# Name → the part, and its time limit in seconds.
PARTS: dict[str, tuple[Part, float]] = {
    "timing": (gpu_parts.timing, 90.0),
    "nccl": (gpu_parts.nccl, 90.0),
    "gradients": (gpu_parts.gradients, 60.0),
    "synchronisers": (gpu_parts.synchronisers, 120.0),
    "kinds": (gpu_parts.kinds, 90.0),
    "overhead": (gpu_parts.overhead, 60.0),
    "copies": (gpu_parts.copies, 90.0),
    "mixed-precision": (gpu_parts.mixed_precision, 60.0),
    "memory": (gpu_parts.memory, 60.0),
    "compiled": (gpu_parts.compiled, 100.0),
}


def run_parts(kit: Kit, names: Sequence[str]) -> Result:
    """Run parts. A part that fails or hangs is a failed check, and the other parts still run."""
    return in_turn({name: partial(_timed, kit, name) for name in names})


def _timed(kit: Kit, name: str) -> Result:
    part, limit_s = PARTS[name]
    print(f"{name} …", file=sys.stderr, flush=True)
    began = time.monotonic()
    kit.begin(limit_s)
    figures, checks = part(kit)
    return figures | {"seconds": time.monotonic() - began}, checks


def table_of(results: Figures) -> str:
    """Return a table with a line per figure."""
    lines = []
    for name, figures in results.items():
        lines.append(name)
        lines += [f"  {key}: {_text(value)}" for key, value in figures.items()]
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(part)}" for key, part in value.items())
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def reason_to_skip(kind: str) -> str | None:
    """Return the reason why this machine cannot be checked, or None."""
    if kind == "cpu":
        return None
    if not torch.cuda.is_available():
        return f"no GPU: torch {torch.__version__} finds no CUDA device"
    return None


def config_of(kind: str) -> Figures:
    """Return the device, and the versions of torch and CUDA."""
    made: Figures = {"device": kind, "torch": torch.__version__, "world": WORLD}
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        made |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return made


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line's options."""
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument(
        "--only", choices=PARTS, action="append", help="run only this part; may be repeated"
    )
    made.add_argument(
        "--out", type=Path, help=f"JSON file; default on a GPU: benchmarks/results/{OUTPUT}"
    )
    return made.parse_args(arguments)


def main() -> None:
    """Run the checks."""
    options = options_of()
    if why := reason_to_skip(options.device):
        finish(options, {"device": options.device}, {"skipped": why}, [], f"skipped: {why}")
    config = config_of(options.device) | {"quick": options.quick}
    kit = Kit(options.device, quick=options.quick)
    try:
        results, checks = run_parts(kit, options.only or [*PARTS])
    finally:
        kit.close()
    out = options.out or (RESULTS / OUTPUT if kit.cuda and not options.only else None)
    if out is not None:
        out.write_text(json.dumps(report(config, results, checks), indent=1) + "\n")
    finish(options, config, results, checks, table_of(results))


if __name__ == "__main__":
    main()
