"""Relaxed gradient synchronisation in real training on real ranks, whose devices are emulated.

`scenarios/synchronisers.yaml` lists the scenarios (random delays, one slow rank, two groups of
speeds, sequences of uneven length), the presets and PyTorch's own means that train in each, and the
expected results. The figures are updates and gradients per second, time to a target loss, accuracy
and staleness. In some scenarios a real control plane plans batches and synchronisation.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from harness import Check, finish, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tasks import Task, task_of
from trainings import RATE, WARM, Trained, Work, train

from paceline import policies
from paceline.core.cost import Features
from paceline.core.emulation import Emulation
from paceline.core.pool import is_pooled
from paceline.node.spool import drain
from paceline.planning.offer import segment_steps
from paceline.policies.base import Feedback, Floats
from paceline.wire import ALLREDUCE, TELEMETRY, RoundBatch, RoundRecord, RunState, State, decode
from paceline.wire.bus import connect, publish
from paceline.wire.synchronisation import Hierarchical, Partial, Synchronisation
from paceline_backend.server.stack import Stack
from support.ranks import Ranks

# Number of emulated steps that choosers get as feedback.
_CHOSEN_STEPS = 64


class Contender(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Training method: a preset of Paceline, or PyTorch's own way; see the file of scenarios."""

    preset: str | None = None
    parameters: dict[str, Any] = {}
    uneven_steps: bool = True
    how: str = "paceline"
    rate: float | None = None
    auto: bool = False
    warm: int | None = None


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Task, devices, contenders and expected results; see the file of scenarios."""

    name: str
    steps: int
    devices: dict[str, list[float]]
    contenders: list[str]
    task: str = "digits"
    warm: int = WARM
    rate: float = RATE
    planned: bool = False
    named_only: bool = False
    checks: list[tuple[str, str, str, str, float]] = []
    accuracy: list[str] = []
    pace: list[str] = []
    soonest: tuple[str, float] | None = None

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.devices["b_s"])

    def emulation(self, seed: int) -> Emulation:
        """Return the ranks' devices."""
        given = {"a_s": [0.0] * self.world, **self.devices}
        low, high = given.pop("delay_s", (0.0, 0.0))
        return Emulation(**given, delay_s=(low, high), seed=seed)

    def warm_of(self, contender: Contender) -> int:
        """Return the number of steps before the first step that counts."""
        later = self.warm and contender.warm
        return self.warm if later is None else later


class _File(msgspec.Struct):
    contenders: dict[str, Contender]
    scenarios: dict[str, Scenario]
    quick: dict[str, Scenario]


_FILE = Path(__file__).with_name("scenarios") / "synchronisers.yaml"
_READ = msgspec.yaml.decode(_FILE.read_bytes(), type=_File)
CONTENDERS, SCENARIOS, QUICK = _READ.contenders, _READ.scenarios, _READ.quick


@dataclass
class Run:
    """Figures of a training.

    Args:
        seconds: time of the counted part, from the first rank's start until all ranks were
            synchronised.
        updates_s: changes of rank 0's parameters per second.
        gradients_s: applied gradients per second, in local batches of equal size, without dropped
            ones.
        weight_s: like `gradients_s`, but if a rank contributes the mean of several gradients to a
            round, they count as one gradient.
        target_s: seconds until the model reached the target loss (see `trainings.Watch`), or None
            if it never did.
        loss: held-out loss after training.
        accuracy: held-out accuracy after training.
        staleness: number of gradients in rounds by age: entry n counts those that are n rounds old,
            and the last entry also older ones.
        dropped: number of samples whose gradients were too old.
        response_s: median seconds from a round's end until the next round was called.
        reduced_s: median seconds from a round's call until its sum was complete.
        batches: number of batches that each rank trained.
    """

    seconds: float
    updates_s: float
    gradients_s: float
    weight_s: float
    target_s: float | None
    loss: float
    accuracy: float
    staleness: list[int]
    dropped: int
    response_s: float
    reduced_s: float
    batches: list[int] = field(default_factory=list)

    @property
    def age(self) -> float:
        """Mean staleness, in rounds."""
        return sum(age * n for age, n in enumerate(self.staleness)) / max(1, sum(self.staleness))


def run_of(
    ranks: list[Trained], rounds: list[RoundRecord], task: Task, *, means: bool = False
) -> Run:
    """Return the figures of a training.

    With `means`, all gradients that a rank contributes to a round count as one.
    """
    began = min(rank.began for rank in ranks)
    seconds = max(rank.ended for rank in ranks) - began
    rounds = [
        record for record in rounds if record.ended_at >= min(rank.began_at for rank in ranks)
    ]
    dropped = sum(record.dropped for record in rounds)
    gradients = sum(rank.steps for rank in ranks) - dropped / task.batch
    return Run(
        seconds,
        ranks[0].updates / seconds,
        gradients / seconds,
        (sum(record.contributors for record in rounds) if means else gradients) / seconds,
        None if (at := ranks[0].target_at) is None else at - began,
        ranks[0].loss,
        ranks[0].accuracy,
        [sum(ages) for ages in zip_longest(*(record.staleness for record in rounds), fillvalue=0)],
        dropped,
        statistics.median([record.waited_s for record in rounds] or [0.0]),
        statistics.median([record.reduced_s for record in rounds] or [0.0]),
        [rank.steps for rank in ranks],
    )


def alone(pool: Ranks, scenario: Scenario, contender: Contender, seed: int) -> Run:
    """Train without a control plane, with equal batches and the contender's synchronisation."""
    what = _synchroniser(scenario, contender, seed)
    with tempfile.TemporaryDirectory() as spool:
        environment = {"PACELINE_RUN": "benchmark", "PACELINE_SPOOL": spool}
        ranks = _on(pool, scenario, contender, seed, what, environment)
        if contender.how == "paceline":
            # Otherwise a planner of the product has planned segments with another synchronisation.
            assert sum(rank.steps for rank in ranks) == scenario.world * scenario.steps
        entries: list[dict[bytes, bytes]] = []
        drain(Path(spool), entries.append, include_open=True)
    messages = [decode(entry)[1] for entry in entries]
    rounds = [record for m in messages if isinstance(m, RoundBatch) for record in m.records]
    means = isinstance(what, Partial | Hierarchical) and what.parameters.mean
    return run_of(ranks, rounds, task_of(scenario.task), means=means)


def _synchroniser(scenario: Scenario, contender: Contender, seed: int) -> Synchronisation:
    """Return a contender's synchronisation. Choosers get emulated steps as feedback."""
    if contender.preset is None:
        return ALLREDUCE
    what = policies.make(contender.preset, contender.parameters).synchroniser
    if isinstance(what, Synchronisation):
        return what
    task, world = task_of(scenario.task), scenario.world
    times = _times_s(scenario, seed)
    rows = np.full(times.size, task.batch)
    size = np.full(times.size, float(np.mean(task.sizes)))
    steps, ranks = np.divmod(np.arange(times.size), world)
    seen = Feedback(steps, ranks, rows, rows * size, times.ravel(), rows * size**2, size)
    return what.choose(seen, world, {}).synchroniser


def _segment(scenario: Scenario, contender: Contender, seed: int, what: Synchronisation) -> int:
    """Return the number of steps of a relaxed segment, by the controller's rule."""
    times_s = _times_s(scenario, seed).mean(axis=0)
    shares = contender.uneven_steps and is_pooled(what)
    step_s = scenario.world / (1 / times_s).sum() if shares else times_s.max()
    return segment_steps(float(step_s), relaxed=True)


def _times_s(scenario: Scenario, seed: int) -> Floats:
    """Return times of each rank's steps with samples of mean size, [steps, W]."""
    task, devices = task_of(scenario.task), scenario.emulation(seed)
    rows = np.full(scenario.world, float(task.batch))
    size = np.full(scenario.world, float(np.mean(task.sizes)))
    batch = Features(rows, rows * size, size, size)
    return np.array([devices.compute_s(step, batch) for step in range(_CHOSEN_STEPS)])


def planned(pool: Ranks, stack: Stack, scenario: Scenario, contender: Contender, seed: int) -> Run:
    """Train under a real control plane."""
    body = {
        "script": __file__,
        "nproc": scenario.world,
        "policy": contender.preset,
        "parameters": contender.parameters,
        "launch": False,
    }
    run = stack.api("POST", "/runs", body)["id"]
    if contender.auto:
        stack.api("PUT", f"/runs/{run}/auto", {"mode": "switch", "relaxed": True})
    bus = stack.api("GET", "/version")["bus"]
    environment = {"PACELINE_RUN": run, "PACELINE_BUS": bus}
    ranks = _on(pool, scenario, contender, seed, ALLREDUCE, environment)
    # End the run as a launcher would.
    with connect(bus) as client:
        ended = RunState(State.FINISHED, time.time(), "", exit_code=0)
        publish(client, TELEMETRY, ended, run)
    if contender.auto:
        switches = stack.api("GET", f"/runs/{run}/switches")
        print(*[(s["policy"], s["effective_step"]) for s in switches], file=sys.stderr)
    rows = stack.api("GET", f"/runs/{run}/rounds?limit=100000")
    rounds = [RoundRecord(**row) for row in rows]
    return run_of(ranks, rounds, task_of(scenario.task), means=contender.preset == "rna")


def _on(
    pool: Ranks,
    scenario: Scenario,
    contender: Contender,
    seed: int,
    what: Synchronisation,
    environment: dict[str, str],
) -> list[Trained]:
    work = Work(
        scenario.task,
        contender.how,
        seed,
        scenario.steps,
        scenario.warm_of(contender),
        what,
        _segment(scenario, contender, seed, what),
        contender.rate or scenario.rate,
        contender.uneven_steps,
    )
    devices = json.dumps(scenario.emulation(seed).as_dict())
    return pool.run(train, work, env={"PACELINE_EMULATE": devices, **environment}, timeout_s=900.0)


# Contender → its run with each seed.
Runs = dict[str, list[Run]]


def mean(runs: Iterable[Run], name: str) -> float:
    """Return the mean of a figure over seeds, or infinity if the figure of any seed is None."""
    values = [getattr(run, name) for run in runs]
    return statistics.fmean(math.inf if value is None else value for value in values)


def compare(
    scenario: Scenario, seeds: int, train_one: Callable[[Scenario, Contender, int], Run]
) -> Runs:
    """Train all contenders seed by seed, so that other load on the machine affects all of them."""
    runs: Runs = {name: [] for name in scenario.contenders}
    for seed in range(seeds):
        for name in scenario.contenders:
            print(f"{scenario.name}, seed {seed}: {name}", file=sys.stderr)
            runs[name].append(train_one(scenario, CONTENDERS[name], seed))
    return runs


def compared(scenarios: Iterable[Scenario], seeds: int) -> dict[str, Runs]:
    """Train all scenarios. Consecutive scenarios with the same number of ranks share processes."""
    results: dict[str, Runs] = {}
    for world, group in groupby(scenarios, key=lambda scenario: scenario.world):
        with contextlib.ExitStack() as held:
            pool = Ranks(world)
            held.callback(pool.stop)
            stack: Stack | None = None
            for scenario in group:
                train_one = partial(alone, pool)
                if scenario.planned:
                    folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
                    stack = stack or held.enter_context(Stack(folder, 0))
                    train_one = partial(planned, pool, stack)
                results[scenario.name] = compare(scenario, seeds, train_one)
    return results


def soonest(runs: Runs) -> str:
    """Return the contender that reaches the target first, of those about as accurate as `bsp`.

    Their accuracy is at most one percentage point below that of `bsp`.
    """
    least = mean(runs["bsp"], "accuracy") - 0.01
    good = [name for name, rows in runs.items() if mean(rows, "accuracy") >= least]
    return min(good, key=lambda name: mean(runs[name], "target_s"))


def checks_of(scenario: Scenario, runs: Runs) -> list[Check]:
    """Return the scenario's checks of the contenders that trained."""
    checks = []
    where = f", {scenario.name}"
    for contender, figure, other, op, bound in scenario.checks:
        if {contender, other} <= runs.keys():
            value = mean(runs[contender], figure) / mean(runs[other], figure)
            checks.append(Check(f"{contender}'s {figure} over {other}'s{where}", value, bound, op))
    for name in runs.keys() & scenario.accuracy:
        lost = mean(runs["bsp"], "accuracy") - mean(runs[name], "accuracy")
        checks.append(Check(f"accuracy that {name} loses to bsp{where}", lost, 0.01, "<="))
    batch, slow_s = task_of(scenario.task).batch, scenario.devices["b_s"][-1]
    for name in runs.keys() & scenario.pace:
        paces = [(r.batches[-1] - r.dropped / batch) * slow_s / r.seconds for r in runs[name]]
        label = f"the slow rank's share of its own pace, {name}{where}"
        checks.append(Check(label, min(paces), 0.8, ">="))
    if scenario.soonest is not None and scenario.soonest[0] in runs:
        name, bound = scenario.soonest
        first = soonest(runs)
        over = mean(runs[name], "target_s") / mean(runs[first], "target_s")
        checks.append(Check(f"{name}'s target_s over {first}'s{where}", over, bound, "<="))
    return checks


# Heading of a column → name of the figure, and number of decimals.
_FIGURES = {
    "updates/s": ("updates_s", 1),
    "gradients/s": ("gradients_s", 1),
    "weight/s": ("weight_s", 1),
    "target (s)": ("target_s", 2),
    "accuracy": ("accuracy", 3),
    "staleness": ("age", 2),
    "dropped": ("dropped", 0),
}


def table_of(results: Mapping[str, Runs]) -> str:
    """Return a table of the figures, as means over seeds."""
    lines = []
    for scenario, runs in results.items():
        lines += ["", f"{scenario} ({len(next(iter(runs.values())))} seeds)"]
        lines.append(" " * 28 + "".join(f"{head:>12}" for head in _FIGURES))
        for name, rows in runs.items():
            cells = [f"{mean(rows, of):.{digits}f}" for of, digits in _FIGURES.values()]
            lines.append(f"{name:<28}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines[1:])


def with_only(scenario: Scenario, names: Sequence[str]) -> Scenario:
    """Return the scenario with only `bsp` and these contenders."""
    return msgspec.structs.replace(scenario, contenders=list(dict.fromkeys(["bsp", *names])))


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--seeds", type=int, default=5, help="number of seeds; default: %(default)s"
    )
    arguments.add_argument(
        "--only", nargs="+", choices=SCENARIOS, metavar="NAME", help=", ".join(SCENARIOS)
    )
    arguments.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        metavar="NAME",
        help="train only these and bsp",
    )
    options = arguments.parse_args()
    seeds = 1 if options.quick else options.seeds
    usual = [name for name, scenario in SCENARIOS.items() if not scenario.named_only]
    scenarios = [*QUICK.values()]
    if not options.quick:
        scenarios = [SCENARIOS[name] for name in options.only or usual]
    if options.contenders:
        scenarios = [with_only(scenario, options.contenders) for scenario in scenarios]
    results = compared(scenarios, seeds)
    config = {
        "seeds": seeds,
        "emulated": True,
        "worlds": {scenario.name: scenario.world for scenario in scenarios},
        "steps": {scenario.name: scenario.steps for scenario in scenarios},
    }
    figures = {
        scenario: {name: [vars(row) for row in rows] for name, rows in runs.items()}
        for scenario, runs in results.items()
    }
    checks = [check for each in scenarios for check in checks_of(each, results[each.name])]
    finish(options, config, {"scenarios": figures}, checks, table_of(results))


if __name__ == "__main__":
    main()
