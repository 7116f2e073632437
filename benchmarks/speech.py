"""Speech of very uneven length in padded batches on two real ranks; nothing is emulated.

examples/speech is trained with plain DDP, with DDP on batches of similar lengths, and with
`paceline` in its exact and its free mode under a real control plane. The contenders train in turn,
seed by seed, from the same parameters. Exact mode finds out by itself that a batch costs as much as
its padded form, or is told from the start (`cost=padded`). The table has seconds per epoch, loading
and padding included, and held-out accuracy after the last epoch.
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

from harness import Check, finish, parser
from switch import wait

from paceline_backend.server.stack import Stack

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "speech"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paceline" / "speech"
WORLD = 2
# In the first two to five steps the costs of batches are not known yet: ranks get equal counts, and
# steps are as slow as plain DDP's. An epoch has five steps.
START = 3  # first epochs, which do not count
MOST_S = 600.0  # longest time of a training

DDP, GROUPED = "plain DDP", "length-grouped DDP"
EXACT, PADDED, FREE = "exact", "exact, cost=padded", "free, cost=padded"
PLAIN = {DDP: (), GROUPED: ("--grouped",)}  # options of train_ddp.py
PLANNED = {  # parameters of the preset `paceline`
    EXACT: {"mode": "exact"},
    PADDED: {"mode": "exact", "cost": "padded"},
    FREE: {"mode": "free", "cost": "padded"},
}


@dataclass(frozen=True)
class Size:
    """How much is trained: epochs, samples of a rank in a step, seeds, and which contenders."""

    epochs: int = 8
    batch: int = 256
    seeds: int = 3
    contenders: tuple[str, ...] = (DDP, GROUPED, EXACT, PADDED, FREE)


QUICK = Size(epochs=5, seeds=1, contenders=(DDP, PADDED))


@dataclass
class Training:
    """What one training gave.

    Args:
        accuracy: held-out, after the last epoch.
        epochs_s: time of each epoch.
    """

    accuracy: float
    epochs_s: list[float]


Results = dict[str, list[Training]]  # contender → its training with each seed


def arguments_of(size: Size, data: Path, seed: int, result: Path) -> list[str]:
    """Options of a training, which train.py and train_ddp.py share."""
    values = {
        "data": data,
        "epochs": size.epochs,
        "batch": size.batch,
        "seed": seed,
        "result": result,
    }
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def train_plain(arguments: list[str]) -> None:
    """Runs train_ddp.py under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={WORLD}", str(EXAMPLE / "train_ddp.py"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S)
    if ended.returncode:
        raise RuntimeError(f"train_ddp.py failed:\n{ended.stderr}")


def train_planned(stack: Stack, arguments: list[str], parameters: Mapping[str, Any]) -> None:
    """Runs train.py under a control plane."""
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
    """Trains all contenders, seed by seed."""
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
    """Median time of an epoch after the first ones."""
    return statistics.median(s for training in trainings for s in training.epochs_s[START:])


def total_s(trainings: list[Training]) -> float:
    """Mean time of a whole training, without the start of processes."""
    return statistics.fmean(sum(training.epochs_s) for training in trainings)


def accuracy(trainings: list[Training]) -> float:
    """Mean accuracy over seeds."""
    return statistics.fmean(training.accuracy for training in trainings)


def figures_of(results: Results) -> dict[str, Any]:
    """Each contender's figures, and what each of its trainings gave."""
    return {
        name: {
            "epoch_s": epoch_s(trainings),
            "total_s": total_s(trainings),
            "accuracy": accuracy(trainings),
            "epoch_over_ddp": epoch_s(results[DDP]) / epoch_s(trainings),
            "total_over_ddp": total_s(results[DDP]) / total_s(trainings),
            "trainings": [vars(training) for training in trainings],
        }
        for name, trainings in results.items()
    }


def checks_of(results: Results) -> list[Check]:
    """The promises about exact mode, for the contenders that were trained."""
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
        pairs = zip(results[DDP], results[name], strict=True)
        apart = max(abs(plain.accuracy - exact.accuracy) for plain, exact in pairs)
        checks.append(Check(f"{name}: accuracy apart from plain DDP's, most", apart, 0.005, "<="))
    return checks


def table_of(results: Results) -> str:
    """The figures for people."""
    heads = ("s/epoch", "speed-up", "s in all", "speed-up", "accuracy", "by seed")
    lines = [" " * 20 + "".join(f"{head:>10}" for head in heads)]
    for name, figures in figures_of(results).items():
        cells = [f"{figures['epoch_s']:.2f}", f"{figures['epoch_over_ddp']:.2f}"]
        cells += [f"{figures['total_s']:.2f}", f"{figures['total_over_ddp']:.2f}"]
        cells += [f"{figures['accuracy']:.3f}"]
        seeds = " ".join(f"{training.accuracy:.3f}" for training in results[name])
        lines.append(f"{name:<20}" + "".join(f"{cell:>10}" for cell in cells) + f"   {seeds}")
    note = f"s/epoch: median from epoch {START + 1} on; s in all: all epochs, mean over seeds"
    return "\n".join([*lines, note])


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--data", type=Path, help="the recordings; fetched when it is left out")
    options = arguments.parse_args()
    data = options.data or CACHE
    if options.data is None and subprocess.run([EXAMPLE / "fetch.sh", data]).returncode:
        sys.exit(3)
    size = QUICK if options.quick else Size()
    results = train_all(size, data.resolve())
    config = {**vars(size), "ranks": WORLD, "start_epochs": START}
    finish(options, config, figures_of(results), checks_of(results), table_of(results))


if __name__ == "__main__":
    main()
