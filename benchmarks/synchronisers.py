"""Relaxed synchronisers in real training on real ranks, whose devices are emulated.

The scenarios are random delays, one slow rank, two groups of speeds, and sequences of uneven
length. The figures are updates and gradients a second, time to a target loss, accuracy and
staleness, with PyTorch's own synchronisers as peers. In another scenario a real control plane
plans batches and synchroniser together.
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
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from harness import Check, finish, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from contenders import (
    AUTO,
    COMPOSED,
    DELAYS,
    EVEN,
    EVEN_LARGE,
    FROM_START,
    GROUPS,
    MIXED,
    OWN,
    QUICK,
    SCENARIOS,
    SCHEDULERS,
    SPEECH,
    Contender,
    Scenario,
)
from foretold import Profile, step_s
from tasks import Task, task_of
from trainings import Trained, Work, train

from paceline.core.cost import Features
from paceline.core.pool import is_pooled
from paceline.node.spool import drain
from paceline.wire import (
    ALLREDUCE,
    TELEMETRY,
    RoundBatch,
    RoundRecord,
    RunState,
    State,
    StepBatch,
    decode,
)
from paceline.wire.bus import connect, publish
from paceline.wire.synchronisation import Hierarchical, Partial, Synchronisation
from paceline_backend import policies
from paceline_backend.planning.offer import segment_steps
from paceline_backend.policies.base import Feedback, Floats
from paceline_backend.server.stack import Stack
from support.ranks import Ranks

_CHOSEN_STEPS = 64  # emulated steps that choosers get as feedback


@dataclass
class Run:
    """The figures of one training.

    Args:
        seconds: time of the counted part, from the first rank's begin until all had met.
        updates_s: changes of rank 0's parameters a second.
        gradients_s: gradients applied a second, in local batches of equal shares, without dropped
            ones.
        weight_s: `gradients_s` with one difference: where a rank gives a round the mean of several
            gradients, they count as one gradient.
        target_s: time until ranks had the target loss, see `trainings.Watch`; None: never.
        loss: held-out loss after training.
        accuracy: held-out accuracy after training.
        staleness: gradients in rounds by age: entry n counts those n rounds old, the last entry
            also older ones.
        dropped: samples whose gradients were too old.
        response_s: median time from a round's end until the next round was called.
        reduced_s: median time from a round's call until its sum was there.
        batches: batches that each rank trained.
        profile: profile of the training's steps; None: not kept.
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
    batches: list[int]
    profile: Profile | None = None

    @property
    def figures(self) -> dict[str, Any]:
        """All figures as they are kept in results, without the profile."""
        return {name: value for name, value in vars(self).items() if name != "profile"}

    @property
    def age(self) -> float:
        """Mean staleness, in rounds."""
        return sum(age * n for age, n in enumerate(self.staleness)) / max(1, sum(self.staleness))


def run_of(
    ranks: list[Trained], rounds: list[RoundRecord], task: Task, *, means: bool = False
) -> Run:
    """The figures of a training.

    Args:
        ranks: what each rank saw.
        rounds: the rounds that ranks reported.
        task: what was learnt.
        means: whether all gradients that a rank gives to a round count as one.
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


def coasted(pool: Ranks, scenario: Scenario, contender: Contender, seed: int) -> Run:
    """A training without a control plane: equal batches, and a given synchroniser."""
    what = _synchroniser(scenario, contender, seed)
    with tempfile.TemporaryDirectory() as spool:
        environment = {"PACELINE_RUN": "benchmark", "PACELINE_SPOOL": spool}
        ranks = _on(pool, scenario, contender, seed, what, environment)
        entries: list[dict[bytes, bytes]] = []
        drain(Path(spool), entries.append, include_open=True)
    messages = [decode(entry)[1] for entry in entries]
    rounds = [record for m in messages if isinstance(m, RoundBatch) for record in m.records]
    means = isinstance(what, Partial | Hierarchical) and what.parameters.mean
    run = run_of(ranks, rounds, task_of(scenario.task), means=means)
    if contender.preset is not None:
        steps = [record for m in messages if isinstance(m, StepBatch) for record in m.records]
        run.profile = Profile.of(steps, scenario.warm, len(ranks))
    return run


def _synchroniser(scenario: Scenario, contender: Contender, seed: int) -> Synchronisation:
    """A contender's synchroniser.

    If its policy has a chooser, the chooser gets `_CHOSEN_STEPS` emulated steps as feedback.
    """
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


def _segment(scenario: Scenario, seed: int, what: Synchronisation) -> int:
    """Steps in a segment of a relaxed synchroniser, by the controller's rule."""
    times_s = _times_s(scenario, seed).mean(axis=0)
    shares = is_pooled(what)
    step_s = scenario.world / (1 / times_s).sum() if shares else times_s.max()
    return segment_steps(float(step_s), relaxed=True)


def _times_s(scenario: Scenario, seed: int) -> Floats:
    """Times of each rank's steps with samples of mean size, [steps, W]."""
    task, devices = task_of(scenario.task), scenario.devices(seed)
    rows = np.full(scenario.world, float(task.batch))
    size = np.full(scenario.world, float(np.mean(task.sizes)))
    batch = Features(rows, rows * size, size, size)
    return np.array([devices.compute_s(step, batch) for step in range(_CHOSEN_STEPS)])


def planned(pool: Ranks, stack: Stack, scenario: Scenario, contender: Contender, seed: int) -> Run:
    """A training under a real control plane."""
    body = {
        "script": __file__,
        "nproc": scenario.world,
        "policy": contender.preset,
        "parameters": dict(contender.parameters),
        "launch": False,
    }
    run = stack.api("POST", "/runs", body)["id"]
    if contender.auto:
        stack.api("PUT", f"/runs/{run}/auto", {"mode": "switch", "relaxed": True})
    bus = stack.api("GET", "/version")["bus"]
    environment = {"PACELINE_RUN": run, "PACELINE_BUS": bus}
    ranks = _on(pool, scenario, contender, seed, ALLREDUCE, environment)
    with connect(bus) as client:  # as a launcher would end the run
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
    steps, warm = scenario.steps, scenario.warm if contender.warm is None else contender.warm
    segment = _segment(scenario, seed, what)
    work = Work(scenario.task, contender.how, seed, steps, warm, what, segment, contender.rate)
    devices = json.dumps(scenario.devices(seed).as_dict())
    return pool.run(train, work, env={"PACELINE_EMULATE": devices, **environment}, timeout_s=900.0)


Runs = dict[str, list[Run]]  # contender → its run with each seed


def mean(runs: Iterable[Run], name: str) -> float:
    """Mean of a figure over seeds; infinite if the figure of any seed is None."""
    values = [getattr(run, name) for run in runs]
    return statistics.fmean(math.inf if value is None else value for value in values)


def compare(
    scenario: Scenario, seeds: int, train_one: Callable[[Scenario, Contender, int], Run]
) -> Runs:
    """Trains all contenders seed by seed, so that other load on the machine hits all of them."""
    runs: Runs = {name: [] for name in scenario.contenders}
    for seed in range(seeds):
        for name, contender in scenario.contenders.items():
            print(f"{scenario.name}, seed {seed}: {name}", file=sys.stderr)
            runs[name].append(train_one(scenario, contender, seed))
    return runs


def simulated(scenario: Scenario, runs: Runs) -> dict[str, float]:
    """Each preset's simulated time of a step over the measured one."""
    ratios = {}
    for name, rows in runs.items():
        if (contender := scenario.contenders[name]).preset is None:
            continue
        times = []
        for seed, row in enumerate(rows):
            what = _synchroniser(scenario, contender, seed)
            like = "osa" if what.name in ("averaging", "pairwise") else "rna"
            if like not in runs:
                like = name
            reduced, alone = runs["bsp"][seed].profile, runs[like][seed].profile
            assert reduced is not None and alone is not None
            segment, sample_s = _segment(scenario, seed, what), _sample_s(scenario)
            times.append(step_s(what, reduced, alone, row.reduced_s, segment, seed, sample_s))
        ratios[name] = statistics.fmean(times) * scenario.steps / mean(rows, "seconds")
    return ratios


def _sample_s(scenario: Scenario) -> Floats:
    """Time of a sample of mean size on each rank, [W].

    The devices of scenarios that are foretold charge samples by size only.
    """
    return np.array(scenario.devices(0).a_s) * float(np.mean(task_of(scenario.task).sizes))


def composition(runs: Runs) -> dict[str, Any]:
    """The best composition beside the better of its two parts, by time to the target.

    The first seed decides which composition is the best. The other seeds measure how good it is.
    """
    pairs = {f"{y} on {s}": (y, s) for s in SCHEDULERS for y in COMPOSED}
    best = min(pairs, key=lambda name: mean(runs[name][:1], "target_s"))
    runs = {name: rows[1:] or rows for name, rows in runs.items()}
    alone = min(pairs[best], key=lambda name: mean(runs[name], "target_s"))
    return {
        "best": best,
        "alone": alone,
        "time_to_target": mean(runs[best], "target_s") / mean(runs[alone], "target_s"),
        "gradients_s": mean(runs[best], "gradients_s") / mean(runs[alone], "gradients_s"),
        "over_bsp": mean(runs[best], "gradients_s") / mean(runs["bsp"], "gradients_s"),
    }


def soonest(runs: Runs) -> str:
    """Who has the target first, of those that end within a point of `bsp`'s accuracy."""
    least = mean(runs["bsp"], "accuracy") - 0.01
    good = [name for name, rows in runs.items() if mean(rows, "accuracy") >= least]
    return min(good, key=lambda name: mean(runs[name], "target_s"))


def _own_checks(results: Mapping[str, Runs]) -> list[Check]:
    """Our own preset beside the best, by time to the target, where a control plane planned."""
    checks = []
    for scenario, runs in results.items():
        if OWN in runs:
            name = soonest(runs)
            over = mean(runs[OWN], "target_s") / mean(runs[name], "target_s")
            checks.append(Check(f"{OWN}'s target_s over {name}'s, {scenario}", over, 1.1, "<="))
            lost = mean(runs["bsp"], "accuracy") - mean(runs[OWN], "accuracy")
            checks.append(Check(f"accuracy that {OWN} loses to bsp, {scenario}", lost, 0.01, "<="))
    for when, scenarios in (("once it has chosen", SCENARIOS), ("from the start", FROM_START)):
        of_auto = [
            runs
            for scenario in scenarios.values()
            if AUTO in (runs := results.get(scenario.name, {}))
        ]
        chosen = [
            mean(runs[AUTO], "target_s") / mean(runs[soonest(runs)], "target_s") for runs in of_auto
        ]
        if chosen:
            name = f"target_s of {AUTO}, over the soonest's, {when}, mean"
            checks.append(Check(name, statistics.fmean(chosen), 1.15, "<="))
    return checks


def _slow_checks(scenario: Scenario, runs: Runs, times: int) -> list[Check]:
    """What relaxed presets promise where one rank is so many times slower throughout."""
    checks = []

    def check(what: str, value: float, bound: float, op: str) -> None:
        checks.append(Check(f"{what}, {scenario.name}", value, bound, op))

    rate, target = {5: (2.5, 0.5), 10: (4.0, 0.25)}[times]
    bsp, join = runs["bsp"], runs["torch Join"]
    slow_s, batch = scenario.devices(0).b_s[-1], task_of(scenario.task).batch
    for name in ("rna", "ad-psgd", "n-soft"):
        rows = runs[name]
        gradients = mean(rows, "gradients_s") / mean(bsp, "gradients_s")
        check(f"{name}'s gradients_s over bsp's", gradients, rate, ">=")
        target_s = mean(rows, "target_s")
        check(f"{name}'s target_s over bsp's", target_s / mean(bsp, "target_s"), target, "<=")
        check(f"{name}'s target_s over Join's", target_s / mean(join, "target_s"), 1.0, "<=")
        lost = mean(bsp, "accuracy") - mean(rows, "accuracy")
        check(f"accuracy that {name} loses to bsp", lost, 0.01, "<=")
        applied = [(row.batches[-1] - row.dropped / batch) * slow_s / row.seconds for row in rows]
        check(f"the slow rank's share of its own pace, {name}", min(applied), 0.8, ">=")
    return checks


def checks_of(
    results: Mapping[str, Runs], foretold: Mapping[str, Mapping[str, float]]
) -> list[Check]:
    """What was promised of the scenarios that ran."""
    checks = _own_checks(results)

    def check(
        scenario: str, figure: str, contender: str, other: str, bound: float, op: str
    ) -> None:
        if {contender, other} <= results.get(scenario, {}).keys():
            runs = results[scenario]
            value = mean(runs[contender], figure) / mean(runs[other], figure)
            checks.append(
                Check(f"{contender}'s {figure} over {other}'s, {scenario}", value, bound, op)
            )

    check(DELAYS, "updates_s", "rna", "bsp", 1.8, ">=")
    check(DELAYS, "gradients_s", "rna", "bsp", 1.5, ">=")
    if "torch Join" in results.get(DELAYS, {}):  # not in a quick run: its steps are too few
        check(DELAYS, "target_s", "rna", "bsp", 1.0, "<=")
        check(DELAYS, "target_s", "rna", "eager-sgd", 1.0, "<=")
        lost = mean(results[DELAYS]["bsp"], "accuracy") - mean(results[DELAYS]["rna"], "accuracy")
        checks.append(Check(f"accuracy that rna loses to bsp, {DELAYS}", lost, 0.01, "<="))
    for even in (EVEN, EVEN_LARGE):
        check(even, "seconds", "rna", "bsp", 1.05, "<=")
    # The ratio shrinks where groups are further apart, so only the first scenario has this bound.
    check(GROUPS[0], "gradients_s", "rna-hierarchical", "bsp", 1.2, ">=")
    for name in ("rna", "ad-psgd"):
        # An epoch's work in 0.6 of the time.
        check(f"{SPEECH}, planned", "gradients_s", name, "bsp", 1 / 0.6, ">=")
    for apart in GROUPS:
        for other in ("bsp", "rna"):
            check(apart, "target_s", "rna-hierarchical", other, 1.0, "<=")
    if MIXED in results:
        composed = composition(results[MIXED])
        name = f"time to the target of {composed['best']} over {composed['alone']}'s alone, {MIXED}"
        checks.append(Check(name, composed["time_to_target"], 1.0, "<="))
    for key, times in (("5x-long", 5), ("10x-long", 10)):
        long = SCENARIOS[key]
        if len(results.get(long.name, {})) == len(long.contenders):
            checks += _slow_checks(long, results[long.name], times)
    for scenario, ratios in foretold.items():
        worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
        name = f"error of the simulated time of a step, {scenario}: most, {worst}"
        checks.append(Check(name, abs(ratios[worst] - 1), 0.1, "<="))
    return checks


_RATES = ("updates_s", "gradients_s", "weight_s")


def table_of(results: Mapping[str, Runs]) -> str:
    """The figures for people: means over seeds."""
    lines = []
    for scenario, runs in results.items():
        seeds = len(next(iter(runs.values())))
        lines += ["", f"{scenario} ({seeds} seeds)"]
        heads = ("updates/s", "gradients/s", "weight/s", "target (s)")
        heads += ("accuracy", "staleness", "dropped")
        lines.append(" " * 28 + "".join(f"{head:>12}" for head in heads))
        for name, rows in runs.items():
            target_s = mean(rows, "target_s")
            cells = [f"{mean(rows, figure):.1f}" for figure in _RATES]
            cells += [f"{target_s:.2f}" if target_s < math.inf else "-"]
            cells += [f"{mean(rows, 'accuracy'):.3f}", f"{mean(rows, 'age'):.2f}"]
            cells += [f"{mean(rows, 'dropped'):.0f}"]
            lines.append(f"{name:<28}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines[1:])


def _with_only(scenario: Scenario, names: Sequence[str]) -> Scenario:
    """The scenario with these contenders and bsp, without the figures that need others."""
    contenders = {
        name: contender
        for name, contender in scenario.contenders.items()
        if name in ("bsp", *names)
    }
    return replace(scenario, foretold=False, contenders=contenders)


def _compared(scenarios: Iterable[Scenario], seeds: int) -> dict[str, Runs]:
    """The runs of each scenario; scenarios with equally many ranks in a row share their ranks."""
    results: dict[str, Runs] = {}
    for world, group in groupby(scenarios, key=lambda scenario: scenario.world):
        with contextlib.ExitStack() as held:
            pool = Ranks(world)
            held.callback(pool.stop)
            stack: Stack | None = None
            for scenario in group:
                train_one = partial(coasted, pool)
                if scenario.planned:
                    folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
                    stack = stack or held.enter_context(Stack(folder, 0))
                    train_one = partial(planned, pool, stack)
                results[scenario.name] = compare(scenario, seeds, train_one)
    return results


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=5, help="how many; %(default)s")
    every = SCENARIOS | FROM_START
    help_ = f"{', '.join(SCENARIOS)}; only if named: {', '.join(FROM_START)}"
    arguments.add_argument("--only", nargs="+", choices=every, metavar="NAME", help=help_)
    arguments.add_argument(
        "--contenders", nargs="+", metavar="NAME", help="only these, and bsp; nothing is foretold"
    )
    options = arguments.parse_args()
    seeds = 1 if options.quick else options.seeds
    wanted = QUICK if options.quick else {name: every[name] for name in options.only or SCENARIOS}
    scenarios = list(wanted.values())
    if options.contenders:
        scenarios = [_with_only(scenario, options.contenders) for scenario in scenarios]
    results = _compared(scenarios, seeds)
    foretold = {
        scenario.name: simulated(scenario, results[scenario.name])
        for scenario in scenarios
        if scenario.foretold
    }
    lines = [table_of(results)]
    for name, ratios in foretold.items():
        rows = "  ".join(f"{preset} {ratio:.2f}" for preset, ratio in ratios.items())
        lines.append(f"simulated over real, {name}: {rows}")
    more: dict[str, Any] = {}
    if MIXED in results:
        more["composition"] = composition(results[MIXED])
        lines.append(
            "\n{best}: {time_to_target:.2f} of {alone}'s time to the target, {gradients_s:.2f} "
            "times its gradients/s, {over_bsp:.2f} times bsp's".format(**more["composition"])
        )
    finish(
        options,
        {
            "seeds": seeds,
            "emulated": True,
            "worlds": {scenario.name: scenario.world for scenario in scenarios},
            "steps": {scenario.name: scenario.steps for scenario in scenarios},
        },
        {
            "scenarios": {
                scenario: {name: [row.figures for row in rows] for name, rows in runs.items()}
                for scenario, runs in results.items()
            },
            "simulated_over_real": foretold,
            **more,
        },
        checks_of(results, foretold),
        "\n".join(lines),
    )


if __name__ == "__main__":
    main()
