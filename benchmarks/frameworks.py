"""Hugging Face's Trainer with Paceline, beside Trainer with its own samplers.

Four real ranks train a tiny language model on texts of very uneven length. `transformers.Trainer`
trains under torchrun with its default sampler and with `group_by_length`, and
`paceline.transformers.Trainer` under a real control plane in exact and in free mode; nobody tells
it speeds or costs, only the texts' lengths. All have the same model, texts, seed and samples a
step. Devices are emulated: a batch takes ``a_j · Λ' + b`` seconds, where Λ' is the sum of its
lengths (a collator without padding) or, if padded, samples times the longest length. The model's
own work is hidden in that time; the optimiser, the all-reduce and Trainer's loop come on top.

The first epoch, in which speeds are learned, does not count. Of the others (one, unless --epochs
says more) the figure is the median of samples a second, from one epoch's last step to the next
one's, so all that happens between epochs is in it. An epoch has 50 steps, so that `group_by_length`
sorts pools as large as in long epochs. Bounds are of the emulated times alone:

- exact mode: the sum over steps of a bound for the step's own global batch. Summed lengths:
  `bounds.indivisible_s`, or the longest text on a fast rank. Padded: `bounds.padded_step_s`, the
  least time of all divisions.
- free mode: of the epoch's samples in as many steps, whichever meet, `bounds.indivisible_s`;
  padded: the larger of that and `bounds.padded_s`. The latter lets a step's ranks end at different
  times, and nobody knows how near to it one can come, so free mode has no goal there.

`group_by_length` composes batches, too, so exact mode, which does not, cannot always be ahead of
it: where even the bound for the global batches is behind, there is no check. With --quick there
are two ranks, and steps are so short that the goals beside the bounds are left out.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bounds import Floats, indivisible_s, padded_s, padded_step_s
from harness import Check, finish, parser
from switch import wait

from paceline.core.cost import Cost, features
from paceline.core.emulation import Emulation
from paceline_backend.server.stack import Stack
from paceline_backend.simulator.sizes import Sizes

SCRIPT = Path(__file__).with_name("frameworks_script.py")
START = 1  # first epochs, which do not count
BATCH = 8  # samples of a rank in a step
FIXED_S = 0.01  # b
MEAN, DIF, LONGEST = 64.0, 48.0, 512  # tokens of texts
MOST_S = 1_800.0  # longest time of the trainings of one start
EXACT_GOAL, FREE_GOAL = 0.97, 0.95

SAMPLER, GROUPED = "sampler", "group_by_length"
EXACT, FREE = "paceline exact", "paceline free"
PLAIN, OURS = (SAMPLER, GROUPED), {EXACT: {"mode": "exact"}, FREE: {"mode": "free"}}


@dataclass(frozen=True)
class Setting:
    """Devices.

    Args:
        slow: how much longer each rank takes.
        padded: whether a batch costs as much as its padded form.
    """

    slow: tuple[float, ...]
    padded: bool

    def devices(self, mean_load: float, step_s: float) -> Emulation:
        """Devices on which a perfectly divided step takes a time.

        Args:
            mean_load: tokens of a global batch.
            step_s: that time.
        """
        a = (step_s - FIXED_S) * sum(1 / factor for factor in self.slow) / mean_load
        return Emulation(
            [a * factor for factor in self.slow],
            [FIXED_S] * len(self.slow),
            cost=Cost(padded=self.padded),
        )

    def __str__(self) -> str:
        speeds = "equal" if len(set(self.slow)) == 1 else "one half as fast"
        return f"{speeds}, {'padded' if self.padded else 'sum'}"


UNEVEN, EQUAL = (1.0, 1.0, 1.0, 2.0), (1.0,) * 4
SETTINGS = tuple(Setting(slow, padded) for slow in (UNEVEN, EQUAL) for padded in (False, True))
QUICK_SETTINGS = (Setting((1.0, 2.0), False),)


@dataclass(frozen=True)
class Size:
    """How much is trained.

    Args:
        steps: of an epoch.
        epochs: the first ones do not count.
        step_s: time of a perfectly divided step.
    """

    steps: int = 50
    epochs: int = 2
    step_s: float = 0.8


QUICK = Size(steps=8, epochs=3, step_s=0.2)


@dataclass
class Training:
    """What one way of training gave.

    Args:
        batches: lengths of the texts that each rank had in each step, step by step.
        epochs_s: time of each epoch that counts.
        loss: in the end.
    """

    batches: list[list[list[int]]]
    epochs_s: list[float]
    loss: float

    def step(self, step: int) -> Floats:
        """Sorted lengths of a step's global batch."""
        return np.sort(np.concatenate([np.array(part, float) for part in self.batches[step]]))

    def epochs(self, steps: int) -> Iterable[list[Floats]]:
        """The global batches of each epoch that counts."""
        for start in range(START * steps, len(self.batches), steps):
            yield [self.step(step) for step in range(start, start + steps)]

    def devices_s(self, epoch: int, steps: int, devices: Emulation) -> float:
        """How long an epoch takes on the devices alone, as its batches were divided."""
        took_s = 0.0
        for step in range(epoch * steps, (epoch + 1) * steps):
            parts = self.batches[step]
            sizes = np.concatenate([np.array(part, float) for part in parts])
            batch = features(sizes, np.array([len(part) for part in parts]))
            took_s += float(devices.compute_s(step, batch).max())
        return took_s


def plain(folder: Path, devices: Emulation) -> None:
    """Trains as Trainer does, under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc-per-node={len(devices.a_s)}", str(SCRIPT), str(folder), *PLAIN]
    ended = subprocess.run(
        launcher,
        env={**os.environ, **variables(devices)},
        capture_output=True,
        text=True,
        timeout=MOST_S,
    )
    if ended.returncode:
        raise RuntimeError(f"Trainer failed:\n{ended.stderr}")


def planned(stack: Stack, folder: Path, devices: Emulation, name: str) -> None:
    """Trains with Paceline, under a control plane."""
    body = {
        "name": name,
        "script": str(SCRIPT),
        "args": [str(folder), "paceline"],
        "nproc": len(devices.a_s),
        "policy": "paceline",
        "parameters": OURS[name],
        "env": variables(devices),
    }
    run = stack.api("POST", "/runs", body)["id"]
    # Answers take the server processor time that the ranks lack, so few are asked for.
    ended = wait(stack.api, run, lambda now: now["ended_at"] is not None, MOST_S, every_s=2.0)
    if ended["state"] != "finished":
        raise RuntimeError(f"{name}: the run {ended['state']}: {ended['message']}")


def variables(devices: Emulation) -> dict[str, str]:
    """Of the ranks."""
    return {
        "PACELINE_EMULATE": json.dumps(devices.as_dict()),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def read(folder: Path, way: str, world: int, steps: int) -> Training:
    """What the ranks left."""
    ranks = [json.loads((folder / f"{way}-{rank}.json").read_text()) for rank in range(world)]
    ended = np.max([rank["ended"] for rank in ranks], axis=0)[steps * START - 1 :: steps]
    return Training(
        batches=[list(parts) for parts in zip(*(rank["had"] for rank in ranks), strict=True)],
        epochs_s=np.diff(ended).tolist(),
        loss=ranks[0]["loss"],
    )


def measure(stack: Stack, folder: Path, setting: Setting, size: Size) -> dict[str, Any]:
    """All ways of training in one setting, and their figures."""
    folder.mkdir()
    world = len(setting.slow)
    drawn = Sizes(
        distribution="lognormal", samples=size.steps * world * BATCH, mean=MEAN, dif=DIF
    ).draw(seed=0)
    lengths = np.clip(np.round(drawn), 4, LONGEST).astype(int).tolist()
    work = {"lengths": lengths, "batch": BATCH, "epochs": size.epochs}
    (folder / "work.json").write_text(json.dumps(work))
    devices = setting.devices(sum(lengths) / size.steps, size.step_s)
    trainings: dict[str, Training] = {}
    plain(folder, devices)
    for way in PLAIN:
        trainings[way] = read(folder, way, world, size.steps)
    for name in OURS:
        planned(stack, folder, devices, name)
        trainings[name] = read(folder, "paceline", world, size.steps)
    return figures(trainings, setting, devices, size.steps, np.sort(lengths))


def figures(
    trainings: dict[str, Training],
    setting: Setting,
    devices: Emulation,
    steps: int,
    lengths: Floats,
) -> dict[str, Any]:
    """Samples a second of each way, and its share of the bounds."""
    speeds = {
        way: len(lengths) / statistics.median(made.epochs_s) for way, made in trainings.items()
    }
    lowest_s = epoch_bound_s(lengths, steps, devices)
    rows = {
        way: {
            "samples_per_s": speeds[way],
            "over_sampler": speeds[way] / speeds[SAMPLER],
            "over_group_by_length": speeds[way] / speeds[GROUPED],
            "of_own_batches_bound": statistics.median(
                sum(step_bound_s(step, devices) for step in epoch) / epoch_s
                for epoch, epoch_s in zip(made.epochs(steps), made.epochs_s, strict=True)
            ),
            "of_lower_bound": lowest_s / statistics.median(made.epochs_s),
            "of_devices": statistics.median(
                made.devices_s(epoch, steps, devices) / epoch_s
                for epoch, epoch_s in enumerate(made.epochs_s, START)
            ),
            "epochs_s": made.epochs_s,
            "loss": made.loss,
        }
        for way, made in trainings.items()
    }
    sampler, exact = trainings[SAMPLER], trainings[EXACT]
    return {
        "setting": asdict(setting),
        "ways": rows,
        "inexact_epochs": sum(
            not np.array_equal(np.sort(np.concatenate(epoch)), lengths)
            for made in trainings.values()
            for epoch in made.epochs(steps)
        ),
        "other_batches": sum(
            not np.array_equal(sampler.step(step), exact.step(step))
            for step in range(len(sampler.batches))
        ),
        "loss_apart": abs(sampler.loss - exact.loss),
    }


def step_bound_s(sizes: Floats, devices: Emulation) -> float:
    """A lower bound on a step's time, for its global batch."""
    a_s, fixed_s = np.array(devices.a_s), devices.b_s[0]
    if devices.cost.padded:
        return padded_step_s(sizes, a_s, fixed_s)
    longest_s = float(sizes.max() * a_s.min()) + fixed_s
    return max(indivisible_s(sizes, 1, a_s, fixed_s), longest_s)


def epoch_bound_s(sizes: Floats, steps: int, devices: Emulation) -> float:
    """A lower bound on an epoch's time, whichever samples meet."""
    a_s, fixed_s = np.array(devices.a_s), devices.b_s[0]
    bound = indivisible_s(sizes, steps, a_s, fixed_s)
    return max(bound, padded_s(sizes, steps, a_s, fixed_s)) if devices.cost.padded else bound


def checks_of(results: dict[str, Any], *, quick: bool) -> list[Check]:
    """What was promised."""
    checks = []
    for name, row in results.items():
        exact, free = row["ways"][EXACT], row["ways"][FREE]
        checks += [
            Check(f"{name}: exact over Trainer's sampler", exact["over_sampler"], 1, ">="),
            Check(f"{name}: free over Trainer's sampler", free["over_sampler"], 1, ">="),
            Check(f"{name}: free over group_by_length", free["over_group_by_length"], 1, ">="),
        ]
        most = exact["over_group_by_length"] / exact["of_own_batches_bound"]
        if most > 1:
            ahead = exact["over_group_by_length"]
            checks.append(Check(f"{name}: exact over group_by_length", ahead, 1, ">="))
        checks += [
            Check(f"{name}: epochs that miss samples", row["inexact_epochs"], 0, "<="),
            Check(f"{name}: exact, batches unlike the sampler's", row["other_batches"], 0, "<="),
            Check(f"{name}: exact's final loss apart", row["loss_apart"], 1e-5, "<="),
        ]
        if quick:
            continue
        share = exact["of_own_batches_bound"]
        checks.append(Check(f"{name}: exact, of its batches' bound", share, EXACT_GOAL, ">="))
        if not row["setting"]["padded"]:
            share = free["of_lower_bound"]
            checks.append(Check(f"{name}: free, of the lower bound", share, FREE_GOAL, ">="))
    return checks


def table_of(results: dict[str, Any]) -> str:
    """The figures for people."""
    heads = ("samples/s", "/ sampler", "/ grouped", "own bound", "low bound", "of devices", "loss")
    lines = []
    for name, row in results.items():
        lines.append(f"{name:<26}" + "".join(f"{head:>11}" for head in heads))
        for way, made in row["ways"].items():
            cells = [f"{made['samples_per_s']:.1f}"]
            cells += [f"{made[key]:.3f}" for key in ("over_sampler", "over_group_by_length")]
            shares = ("of_own_batches_bound", "of_lower_bound", "of_devices")
            cells += [f"{made[key]:.3f}" for key in shares]
            cells.append(f"{made['loss']:.5f}")
            lines.append(f"  {way:<24}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    names = [str(setting) for setting in SETTINGS]
    arguments.add_argument("--only", choices=names, action="append", help="a setting")
    arguments.add_argument("--epochs", type=int, default=Size.epochs, help="%(default)s")
    options = arguments.parse_args()
    size = replace(Size(), epochs=options.epochs)
    settings = [setting for setting in SETTINGS if str(setting) in (options.only or names)]
    if options.quick:
        size, settings = QUICK, list(QUICK_SETTINGS)
    results = {}
    with tempfile.TemporaryDirectory() as made, Stack(Path(made, "stack"), 0) as stack:
        for number, setting in enumerate(settings):
            print(setting, file=sys.stderr)
            folder = Path(made, f"setting-{number}")
            results[str(setting)] = measure(stack, folder, setting, size)
    config = {**asdict(size), "start": START, "batch": BATCH, "fixed_s": FIXED_S, "mean": MEAN}
    config |= {"dif": DIF, "longest": LONGEST}
    checks = checks_of(results, quick=options.quick)
    finish(options, config, results, checks, table_of(results))


if __name__ == "__main__":
    main()
