"""Training on speech of very uneven length in padded batches, on two real ranks without emulation.

examples/speech is trained with plain DDP, with DDP on batches of similar lengths, with DDP on plain
DDP's global batches, sorted by length and cut where the padded cost is equal, and with `paceline`
in exact and free mode under a real control plane. The sorted cut is the fairest contender: it has
the global batches of exact mode, needs no server, and uses the true cost of a batch from the start.
It does not use the ranks' speeds.

The contenders train in turn, seed by seed, from the same parameters. Exact mode learns that a batch
costs as much as its padded form, or gets that as a parameter (`cost=padded`). The table has seconds
per epoch, including loading and padding, ratios as mean and range over seeds, and held-out accuracy
after the last epoch. `load_before` is the machine's load at the start of the benchmark, which is
near 0 on an idle machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Check, finish, parser, wait

from paceline_backend.server.stack import Stack

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "speech"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paceline" / "speech"
WORLD = 2
# Number of first epochs, which do not count. An epoch has five steps. In the first two to five
# steps the costs of batches are unknown: ranks get equal counts, and steps are as slow as plain
# DDP's.
START = 3
# Maximum time of a training in seconds.
MOST_S = 600.0

DDP, GROUPED, CUT = "plain DDP", "length-grouped DDP", "sorted-and-cut DDP"
EXACT, PADDED, FREE = "exact", "exact, cost=padded", "free, cost=padded"
# Options of train_ddp.py.
PLAIN = {DDP: (), GROUPED: ("--grouped",), CUT: ("--cut",)}
# Parameters of the preset `paceline`.
PLANNED = {
    EXACT: {"mode": "exact"},
    PADDED: {"mode": "exact", "cost": "padded"},
    FREE: {"mode": "free", "cost": "padded"},
}


@dataclass(frozen=True)
class Size:
    """Extent of the benchmark: epochs, samples per rank and step, seeds, and contenders."""

    epochs: int = 8
    batch: int = 256
    seeds: int = 3
    contenders: tuple[str, ...] = (DDP, GROUPED, CUT, EXACT, PADDED, FREE)


QUICK = Size(epochs=5, seeds=1, contenders=(DDP, CUT, PADDED))


@dataclass
class Training:
    """Result of a training: final held-out accuracy, and time of each epoch in seconds."""

    accuracy: float
    epochs_s: list[float]


# Contender → its training with each seed.
Results = dict[str, list[Training]]


def arguments_of(size: Size, data: Path, seed: int, result: Path) -> list[str]:
    """Return the options of a training, which train.py and train_ddp.py share."""
    values = {
        "data": data,
        "epochs": size.epochs,
        "batch": size.batch,
        "seed": seed,
        "result": result,
    }
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def train_plain(arguments: list[str]) -> None:
    """Run train_ddp.py under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={WORLD}", str(EXAMPLE / "train_ddp.py"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S)
    if ended.returncode:
        raise RuntimeError(f"train_ddp.py failed:\n{ended.stderr}")


def train_planned(stack: Stack, arguments: list[str], parameters: Mapping[str, Any]) -> None:
    """Run train.py under a control plane."""
    body = {
        "name": "speech",
        "script": str(EXAMPLE / "train.py"),
        "args": arguments,
        "nproc": WORLD,
        "policy": "paceline",
        "parameters": dict(parameters),
    }
    run = stack.api("POST", "/runs", body)["id"]
    ended = wait(stack.api, run, lambda now: now["ended_at"] is not None, timeout_s=MOST_S)
    if ended["state"] != "finished":
        raise RuntimeError(f"train.py {ended['state']}: {ended['message']}")


def train_all(size: Size, data: Path) -> Results:
    """Train all contenders, seed by seed."""
    results: Results = {name: [] for name in size.contenders}
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), 0) as stack:
        result = Path(folder) / "result.json"
        for seed in range(size.seeds):
            arguments = arguments_of(size, data, seed, result)
            for name in size.contenders:
                print(f"seed {seed}: {name}", file=sys.stderr)
                if name in PLAIN:
                    train_plain([*arguments, *PLAIN[name]])
                else:
                    train_planned(stack, arguments, PLANNED[name])
                results[name].append(Training(**json.loads(result.read_text())))
                result.unlink()
    return results


def epoch_s(trainings: list[Training]) -> float:
    """Return the median time of an epoch, without the first `START` epochs of each training."""
    return statistics.median(s for training in trainings for s in training.epochs_s[START:])


def total_s(trainings: list[Training]) -> float:
    """Return the mean time of a whole training, without the start of processes."""
    return statistics.fmean(sum(training.epochs_s) for training in trainings)


def accuracy(trainings: list[Training]) -> float:
    """Return the mean accuracy over seeds."""
    return statistics.fmean(training.accuracy for training in trainings)


def over(slower: list[Training], faster: list[Training]) -> dict[str, float]:
    """Return the ratio of epoch times, `slower` ÷ `faster`: over all seeds, least, and most."""
    pairs = zip(slower, faster, strict=True)
    ratios = [epoch_s([slow]) / epoch_s([fast]) for slow, fast in pairs]
    return {"all": epoch_s(slower) / epoch_s(faster), "least": min(ratios), "most": max(ratios)}


def figures_of(results: Results) -> dict[str, Any]:
    """Return each contender's figures and trainings."""
    return {
        name: {
            "epoch_s": epoch_s(trainings),
            "epoch_s_by_seed": [epoch_s([training]) for training in trainings],
            "total_s": total_s(trainings),
            "accuracy": accuracy(trainings),
            **{
                f"epoch_of_{other}": over(results[other], trainings)
                for other in (DDP, GROUPED, CUT)
                if other in results
            },
            "total_over_ddp": total_s(results[DDP]) / total_s(trainings),
            "trainings": [vars(training) for training in trainings],
        }
        for name, trainings in results.items()
    }


def checks_of(results: Results) -> list[Check]:
    """Return checks of exact mode against the other contenders that were trained."""
    checks = []
    for name in (EXACT, PADDED):
        if name not in results:
            continue
        exact_s = epoch_s(results[name])
        speedup = epoch_s(results[DDP]) / exact_s
        checks.append(Check(f"{name}: plain DDP's epoch over its own", speedup, 3, ">="))
        if GROUPED in results:
            speedup = epoch_s(results[GROUPED]) / exact_s
            checks.append(
                Check(f"{name}: length-grouped DDP's epoch over its own", speedup, 1, ">=")
            )
        if CUT in results:
            speedup = over(results[CUT], results[name])["all"]
            checks.append(
                Check(f"{name}: sorted-and-cut DDP's epoch over its own", speedup, 0.9, ">=")
            )
        pairs = zip(results[DDP], results[name], strict=True)
        apart = max(abs(plain.accuracy - exact.accuracy) for plain, exact in pairs)
        checks.append(Check(f"{name}: accuracy apart from plain DDP's, most", apart, 0.005, "<="))
    return checks


def table_of(results: Results) -> str:
    """Return a table of the figures."""
    shown = [name for name in (CUT, GROUPED, DDP) if name in results]
    lines = [f"{'':<20}{'s/epoch':>10}" + "".join(f"{f'x {name}':>26}" for name in shown)]
    lines[0] += f"{'total s':>10}{'accuracy':>10}   by seed"
    for name, figures in figures_of(results).items():
        ratios = [figures[f"epoch_of_{other}"] for other in shown]
        cells = [f"{r['all']:.2f} ({r['least']:.2f} to {r['most']:.2f})" for r in ratios]
        line = f"{name:<20}{figures['epoch_s']:>10.2f}" + "".join(f"{cell:>26}" for cell in cells)
        line += f"{figures['total_s']:>10.2f}{figures['accuracy']:>10.3f}   "
        lines.append(line + " ".join(f"{training.accuracy:.3f}" for training in results[name]))
    lines += [
        f"s/epoch: median from epoch {START + 1} on; total s: all epochs, mean over seeds.",
        "x: how many times as long the named contender's epoch takes; in brackets by seed.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--data", type=Path, help="folder of the recordings; default: fetch them"
    )
    options = arguments.parse_args()
    data = options.data or CACHE
    if options.data is None and subprocess.run([EXAMPLE / "fetch.sh", data]).returncode:
        sys.exit(3)
    size = QUICK if options.quick else Size()
    load_before = os.getloadavg()[0]
    results = train_all(size, data.resolve())
    config = {**vars(size), "ranks": WORLD, "start_epochs": START, "load_before": load_before}
    finish(options, config, figures_of(results), checks_of(results), table_of(results))


if __name__ == "__main__":
    main()
