"""Relaxed synchronisers in real training on real ranks, whose devices are emulated.

Under random delays, with one slow rank, with two groups of speeds, and with sequences of uneven
length: updates and gradients a second, time to a target loss, accuracy, staleness; beside PyTorch's
own. Then batches of a scheduler with a synchroniser, planned by a real control plane.
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
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from harness import Check, finish, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from trainings import WARM, Task, Trained, Work, task_of, train

from paceline.bus import connect, publish
from paceline.emulation import Emulation
from paceline.spool import drain
from paceline.wire import (
    ALLREDUCE,
    TELEMETRY,
    RoundBatch,
    RoundRecord,
    RunState,
    Synchronisation,
    decode,
)
from paceline_backend import policies
from paceline_backend.stack import Stack
from support.ranks import Ranks

WORLD, EVEN_WORLD = 8, 4
QUICK_STEPS = 48


@dataclass(frozen=True)
class Contender:
    """How to train.

    Args:
        preset: Paceline's; None: PyTorch's own.
        parameters: the preset's.
        how: see `trainings.Work`.
    """

    preset: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    how: str = "paceline"


# Presets that are not installed are left out.
CONTENDERS = {
    "bsp": Contender("bsp"),
    "rna": Contender("rna"),
    "rna-hierarchical": Contender("rna-hierarchical"),
    "eager-sgd": Contender("eager-sgd"),
    "eager-sgd, solo": Contender("eager-sgd", {"mode": "solo"}),
    "n-soft": Contender("n-soft"),
    "ssp": Contender("ssp"),
    "backup-workers": Contender("backup-workers"),
    "local-sgd": Contender("local-sgd"),
    "osa": Contender("osa"),
    "ad-psgd": Contender("ad-psgd"),
    "flexrr": Contender("flexrr"),
    "torch DDP": Contender(how="ddp"),
    "torch Join": Contender(how="join"),
    "torch PostLocalSGD": Contender(how="post-local"),
}
# Planned by a control plane: they need to know how fast ranks are.
SCHEDULERS = ("paceline", "lbb")
COMPOSED = ("rna", "local-sgd")
PLANNED = {
    "bsp": Contender("bsp"),
    "adaptive": Contender("adaptive"),
    **{name: Contender(name) for name in SCHEDULERS + COMPOSED},
    **{f"{y} on {s}": Contender(y, {"batches": s}) for s in SCHEDULERS for y in COMPOSED},
}
QUICK = ("bsp", "rna", "eager-sgd", "local-sgd", "torch DDP")


@dataclass(frozen=True)
class Scenario:
    """A setting.

    Args:
        name: of it.
        task: what is learnt.
        steps: counted ones.
        devices: seed → what ranks compute on.
        seeds: most of them.
        warm: steps before.
    """

    name: str
    task: str
    steps: int
    devices: Callable[[int], Emulation]
    seeds: int = 2
    warm: int = WARM


def _steps(
    *b_s: float, most_s: float = 0.0, sample_s: Sequence[float] = ()
) -> Callable[[int], Emulation]:
    """Devices on which a rank's step takes so long, and 0 to `most_s` longer at random."""
    nothing = [0.0] * len(b_s)
    return lambda seed: Emulation(
        nothing, list(b_s), list(sample_s), delay_s=(0.0, most_s), seed=seed
    )


DELAYS, GROUPS, MIXED = "0-50 ms at random", "two groups", "one 5x slower, and 0-50 ms at random"
SCENARIOS = (
    # RNA, section 8.1; for the mixed heterogeneity of its section 8.2 half of the ranks 50 ms more.
    Scenario(DELAYS, "digits", 128, _steps(*[0.005] * 8, most_s=0.05), seeds=5),
    Scenario(GROUPS, "digits", 96, _steps(*[0.005] * 4, *[0.055] * 4, most_s=0.05)),
    # SATA: one rank so many times slower.
    Scenario("one 2x slower", "digits", 96, _steps(*[0.006] * 7, 0.012)),
    Scenario("one 5x slower", "digits", 96, _steps(*[0.006] * 7, 0.03)),
    Scenario("one 10x slower", "digits", 96, _steps(*[0.006] * 7, 0.06)),
    # PLAID's recordings have 324 points in the mean; four in a batch.
    Scenario(
        "uneven lengths",
        "plaid",
        96,
        lambda seed: Emulation([5e-5] * WORLD, [0.005] * WORLD, seed=seed),
    ),
)
SLOW_AND_DELAYED = _steps(*[0.005] * 8, most_s=0.05, sample_s=[*[0.002] * 7, 0.01])
PLANNED_SCENARIO = Scenario(MIXED, "digits", 96, SLOW_AND_DELAYED, warm=96)
EVEN = (
    Scenario("no stragglers", "digits", 256, _steps(*[0.02] * EVEN_WORLD), seeds=3),
    Scenario(
        "no stragglers, 1.1 M parameters",
        "wide digits",
        64,
        _steps(*[0.1] * EVEN_WORLD),
        seeds=3,
    ),
)


@dataclass
class Run:
    """The figures of one training.

    Args:
        seconds: of the counted part, from the first rank's begin until all had met.
        updates_s: changes of rank 0's parameters a second.
        gradients_s: ranks' gradients applied a second, in local batches of equal shares; those
            dropped do not count.
        target_s: until rank 0's replica had the target loss; None: it never had.
        loss: held-out, in the end.
        accuracy: the same.
        staleness: of gradients in rounds, by how many rounds old; the last: or older.
        dropped: samples whose gradients were too old.
        response_s: median time from a round's end until the next was called,
        reduced_s: and of a round then.
    """

    seconds: float
    updates_s: float
    gradients_s: float
    target_s: float | None
    loss: float
    accuracy: float
    staleness: list[int]
    dropped: int
    response_s: float
    reduced_s: float

    @property
    def age(self) -> float:
        """Mean staleness, in rounds."""
        return sum(age * n for age, n in enumerate(self.staleness)) / max(1, sum(self.staleness))


def run_of(ranks: list[Trained], rounds: list[RoundRecord], task: Task) -> Run:
    """The figures of a training, from what each rank saw and what was told of rounds."""
    began = min(one.began for one in ranks)
    seconds = max(one.ended for one in ranks) - began
    rounds = [one for one in rounds if one.ended_at >= ranks[0].began_at]
    dropped = sum(one.dropped for one in rounds)
    return Run(
        seconds,
        ranks[0].updates / seconds,
        (sum(one.steps for one in ranks) - dropped / task.batch) / seconds,
        next((at - began for at, loss in ranks[0].curve if loss <= task.target), None),
        ranks[0].curve[-1][1],
        ranks[0].accuracy,
        [sum(ages) for ages in zip_longest(*(one.staleness for one in rounds), fillvalue=0)],
        dropped,
        statistics.median([one.waited_s for one in rounds] or [0.0]),
        statistics.median([one.reduced_s for one in rounds] or [0.0]),
    )


def coasted(pool: Ranks, scenario: Scenario, contender: Contender, seed: int) -> Run:
    """A training that no control plane plans: equal batches, its synchroniser given."""
    what = ALLREDUCE
    if contender.preset is not None:
        what = policies.make(contender.preset, contender.parameters).synchroniser
    with tempfile.TemporaryDirectory() as spool:
        environment = {"PACELINE_RUN": "benchmark", "PACELINE_SPOOL": spool}
        ranks = _on(pool, scenario, contender.how, seed, what, environment)
        entries: list[dict[bytes, bytes]] = []
        drain(Path(spool), entries.append, include_open=True)
    messages = [decode(entry)[1] for entry in entries]
    rounds = [one for m in messages if isinstance(m, RoundBatch) for one in m.records]
    return run_of(ranks, rounds, task_of(scenario.task))


def planned(pool: Ranks, stack: Stack, scenario: Scenario, contender: Contender, seed: int) -> Run:
    """A training under a real control plane."""
    body = {
        "script": __file__,
        "nproc": WORLD,
        "policy": contender.preset,
        "parameters": dict(contender.parameters),
        "launch": False,
    }
    run = stack.api("POST", "/runs", body)["id"]
    bus = stack.api("GET", "/version")["bus"]
    environment = {"PACELINE_RUN": run, "PACELINE_BUS": bus}
    ranks = _on(pool, scenario, "paceline", seed, ALLREDUCE, environment)
    with connect(bus) as client:  # as a launcher would
        ended = RunState("finished", time.time(), "", exit_code=0)
        publish(client, TELEMETRY, ended, run)
    told = stack.api("GET", f"/runs/{run}/rounds?limit=100000")
    return run_of(ranks, [RoundRecord(**one) for one in told], task_of(scenario.task))


def _on(
    pool: Ranks,
    scenario: Scenario,
    how: str,
    seed: int,
    what: Synchronisation,
    environment: dict[str, str],
) -> list[Trained]:
    work = Work(scenario.task, how, seed, scenario.steps, scenario.warm, what)
    devices = json.dumps(scenario.devices(seed).as_dict())
    return pool.run(train, work, env={"PACELINE_EMULATE": devices, **environment}, timeout_s=180.0)


Runs = dict[str, list[Run]]  # contender → of each seed


def mean(runs: Iterable[Run], name: str) -> float:
    """Of a figure, over seeds; not finite if one of them has none."""
    values = [getattr(run, name) for run in runs]
    return statistics.fmean(math.inf if value is None else value for value in values)


def compare(
    scenario: Scenario,
    contenders: Mapping[str, Contender],
    seeds: int,
    train_one: Callable[[Scenario, Contender, int], Run],
) -> Runs:
    """All contenders that are installed, seed by seed, so that what else runs here is alike."""
    found = {
        name: one
        for name, one in contenders.items()
        if one.preset is None or one.preset in policies.names()
    }
    runs: Runs = {name: [] for name in found}
    for seed in range(min(seeds, scenario.seeds)):
        for name, contender in found.items():
            print(f"{scenario.name}, seed {seed}: {name}", file=sys.stderr)
            runs[name].append(train_one(scenario, contender, seed))
    return runs


def composition(runs: Runs) -> dict[str, Any]:
    """The best of the compositions, beside the better of its two parts, by time to the target."""
    pairs = {f"{y} on {s}": (y, s) for s in SCHEDULERS for y in COMPOSED}
    best = min(pairs, key=lambda name: mean(runs[name], "target_s"))
    alone = min(pairs[best], key=lambda name: mean(runs[name], "target_s"))
    return {
        "best": best,
        "alone": alone,
        "time_to_target": mean(runs[best], "target_s") / mean(runs[alone], "target_s"),
        "gradients_s": mean(runs[best], "gradients_s") / mean(runs[alone], "gradients_s"),
        "over_bsp": mean(runs[best], "gradients_s") / mean(runs["bsp"], "gradients_s"),
    }


def checks_of(results: Mapping[str, Runs], quick: bool) -> list[Check]:
    """What was promised."""

    def ratio(scenario: str, figure: str, one: str, other: str) -> float:
        runs = results[scenario]
        return mean(runs[one], figure) / mean(runs[other], figure)

    even = EVEN[0].name
    checks = [
        Check("rna's updates/s over bsp's", ratio(DELAYS, "updates_s", "rna", "bsp"), 1.8, ">="),
        Check(
            "rna's gradients/s over bsp's", ratio(DELAYS, "gradients_s", "rna", "bsp"), 1.5, ">="
        ),
        Check(f"rna's time over bsp's, {even}", ratio(even, "seconds", "rna", "bsp"), 1.05, "<="),
    ]
    if quick:
        return checks
    delayed = results[DELAYS]
    for other in ("bsp", "eager-sgd"):
        value = ratio(DELAYS, "target_s", "rna", other)
        checks.append(Check(f"rna's time to the target loss over {other}'s", value, 1.0, "<="))
    lost = mean(delayed["bsp"], "accuracy") - mean(delayed["rna"], "accuracy")
    checks.append(Check("accuracy that rna loses to bsp", lost, 0.01, "<="))
    if "rna-hierarchical" in delayed:
        value = ratio(GROUPS, "gradients_s", "rna-hierarchical", "rna")
        name = f"rna-hierarchical's gradients/s over rna's, {GROUPS}"
        checks.append(Check(name, value, 1.2, ">="))
    found = composition(results[MIXED])
    name = f"time to the target of {found['best']} over {found['alone']}'s alone"
    return [*checks, Check(name, found["time_to_target"], 1.0, "<=")]


def table_of(results: Mapping[str, Runs]) -> str:
    """For people: means over seeds."""
    lines = []
    for scenario, runs in results.items():
        seeds = len(next(iter(runs.values())))
        lines += ["", f"{scenario} ({seeds} seeds)"]
        heads = ("updates/s", "gradients/s", "target (s)", "accuracy", "staleness", "dropped")
        lines.append(" " * 24 + "".join(f"{head:>12}" for head in heads))
        for name, rows in runs.items():
            target_s = mean(rows, "target_s")
            cells = [f"{mean(rows, figure):.1f}" for figure in ("updates_s", "gradients_s")]
            cells += [f"{target_s:.2f}" if target_s < math.inf else "-"]
            cells += [f"{mean(rows, 'accuracy'):.3f}", f"{mean(rows, 'age'):.2f}"]
            cells += [f"{mean(rows, 'dropped'):.0f}"]
            lines.append(f"{name:<24}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines[1:])


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=5, help="at most; %(default)s")
    options = arguments.parse_args()
    seeds = 1 if options.quick else options.seeds
    results: dict[str, Runs] = {}
    with contextlib.ExitStack() as held:
        pool = Ranks(WORLD)
        held.callback(pool.stop)
        alone = partial(coasted, pool)
        if options.quick:
            delayed = replace(SCENARIOS[0], steps=QUICK_STEPS)
            few = {name: CONTENDERS[name] for name in QUICK}
            results[DELAYS] = compare(delayed, few, seeds, alone)
        else:
            for scenario in SCENARIOS:
                results[scenario.name] = compare(scenario, CONTENDERS, seeds, alone)
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            stack = held.enter_context(Stack(folder, 0))
            together = partial(planned, pool, stack)
            results[MIXED] = compare(PLANNED_SCENARIO, PLANNED, seeds, together)
    pool = Ranks(EVEN_WORLD)
    try:
        two = {name: CONTENDERS[name] for name in ("bsp", "rna", "torch DDP")}
        for scenario in EVEN[:1] if options.quick else EVEN:
            results[scenario.name] = compare(scenario, two, seeds, partial(coasted, pool))
    finally:
        pool.stop()
    lines = [table_of(results)]
    more: dict[str, Any] = {}
    if not options.quick:
        more["composition"] = composition(results[MIXED])
        lines.append(
            "\n{best}: {time_to_target:.2f} of {alone}'s time to the target, {gradients_s:.2f} "
            "times its gradients/s, {over_bsp:.2f} times bsp's".format(**more["composition"])
        )
    finish(
        options,
        {
            "world": WORLD,
            "seeds": seeds,
            "emulated": True,
            "steps": {one.name: one.steps for one in SCENARIOS},
        },
        {
            "scenarios": {
                scenario: {name: [asdict(row) for row in rows] for name, rows in runs.items()}
                for scenario, runs in results.items()
            },
            **more,
        },
        checks_of(results, options.quick),
        "\n".join(lines),
    )


if __name__ == "__main__":
    main()
