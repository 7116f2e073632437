"""Measurements of RNA's rows, except its theorems."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from papers import scenario
from tasks import ucf101

from figures.recorded import mean, results, trainings
from figures.row import Chart, Line, Measured
from figures.simulated import Run, run
from paceline.core.cost import Cost
from paceline.core.rounds import Drift
from paceline.policies.presets.rna_hierarchical import groups
from paceline.wire import ALLREDUCE
from paceline.wire.synchronisation import convert
from paceline_backend.simulator import Scenario
from paceline_backend.simulator.scenario import Communication, Devices
from paceline_backend.simulator.sizes import Sizes
from paceline_backend.simulator.sync import Costs, Work, make


def random_delays(steps: int) -> Scenario:
    """Return Section 8.1's eight workers, each 0 to 50 ms slower in each step."""
    return scenario("rna-random-delays", steps=steps)


# Number of weights.
MODELS = {"ResNet-56": 0.85e6, "VGG-16": 138e6}
TEN_GBIT = 1.25e9


def figure_1() -> Measured:
    """Measure three workers that compute for 40 ms, two of them delayed by 10 and 40 ms."""
    values: dict[str, float] = {}
    names: list[str] = []
    computes: list[float] = []
    waits: list[float] = []
    for model, weights in MODELS.items():
        of = Scenario(
            model, 3, 384, Sizes("constant", samples=50_000), Devices(0.0, [0.04, 0.05, 0.08]),
            steps=50, communication=Communication(5e-5, 4 * weights, TEN_GBIT),
        )  # fmt: skip
        ran = run(of, "bsp")
        computing, step = ran.compute_s.mean(axis=0), float(ran.step_s.mean())
        for worker, own in enumerate(computing, 1):
            values[f"{model}, worker {worker} computes, %"] = 100 * float(own) / step
        values[f"{model}, worker 3 over worker 1, computing"] = float(computing[2] / computing[0])
        names += [f"{model}, w{k}" for k in (1, 2, 3)]
        computes += (1e3 * computing).tolist()
        waits += (1e3 * (step - computing)).tolist()
    lines = [Line("computing", names, computes), Line("waiting", names, waits)]
    return Measured(values, Chart("", "ms of an iteration", lines, bars=True))


def figure_2() -> Measured:
    """Draw lengths like UCF101's, and measure times of a worker's batches of 32."""
    sizes = ucf101(13_320)
    values: dict[str, float] = {}
    lines: list[Line] = []
    drawn = sizes.draw(0)
    values |= {
        "frames, mean": float(drawn.mean()),
        "frames, standard deviation": float(drawn.std(ddof=1)),
        "frames, least": float(drawn.min()),
        "frames, most": float(drawn.max()),
    }
    for label, cost in (("summed", Cost()), ("padded", Cost(padded=True))):
        of = Scenario("lstm", 1, 32, sizes, Devices(1e-3, cost=cost), epochs=2)
        times = run(of, "bsp").compute_s[:, 0]
        # Fit the time of a frame to the paper's mean.
        times = 1219 / times.mean() * times
        values |= {
            f"batch, {label}, mean, ms": float(times.mean()),
            f"batch, {label}, standard deviation, ms": float(times.std(ddof=1)),
            f"batch, {label}, least, ms": float(times.min()),
            f"batch, {label}, most, ms": float(times.max()),
        }
        at = list(range(0, 101, 5))
        lines.append(Line(f"batches, {label}", at, np.percentile(times, at).round().tolist()))
    lines.append(Line("least, mean and most, paper", [0, 60, 100], [156, 1219, 8000], paper=True))
    return Measured(values, Chart("percentile", "ms of a batch", lines))


# Fig. 3: A is fast, B slow, C in between; C calls.
BARS_S = np.array([[0.02, 0.06, 0.03], [0.02, 0.02, 0.03]])


def figure_3() -> Measured:
    """Measure the waits of three workers in two steps. C calls the first round."""
    work = Work(0, BARS_S, np.ones((2, 3), np.int64), np.zeros((2, 3)), Costs())
    blocking = make(ALLREDUCE, 3, 0).run(np.zeros(3), work)
    rules = convert("partial", {"probes": 1, "staleness": 4, "mean": True})
    lines = (make(rules, 3, seed).run(np.zeros(3), work) for seed in range(100))
    partial = next(line for line in lines if line.rounds[0].ended_at == BARS_S[0, 2])
    values = {}
    for label, line in (("blocking", blocking), ("non-blocking", partial)):
        for worker, name in enumerate("ABC"):
            values[f"{label}: {name} waits after its first step, ms"] = 1e3 * float(
                line.wait_s[0, worker]
            )
    values["non-blocking: first round called after, ms"] = 1e3 * partial.rounds[0].ended_at
    values["non-blocking: workers that gave to it"] = float(partial.rounds[0].contributors)
    return Measured(values)


def figure_4() -> Measured:
    """Compute the weights of a worker's successive gradients in its contribution."""
    drift, values = Drift(staleness=4, mean=True), {}
    for names in (("older", "newer"), ("oldest", "second", "newest")):
        for name, weight in zip(names, drift.weights(len(names)), strict=True):
            values[f"weight of the {name} of {len(names)} gradients"] = weight
    return Measured(values)


def figure_5() -> Measured:
    """Group eight workers with delays of 0 to 50 and 50 to 100 ms by the printed rule."""
    delays = np.array([0.025] * 4 + [0.075] * 4)
    values = {}
    for computing_ms in (0, 5, 50):
        times = delays + computing_ms / 1e3
        label = f"computing for {computing_ms} ms"
        values[f"groups, {label}"] = float(len(groups(times)))
        values[f"groups, {label}, spread 0.7"] = float(len(groups(times, 0.7)))
    values["groups, computing for 5 ms, 200 ms apart"] = float(
        len(groups(np.array([0.03] * 4 + [0.23] * 4)))
    )
    return Measured(values)


# The paper's model → a record of `benchmarks/synchronisers.py` and its scenario.
SETTINGS = {
    "ResNet50": ("synchronisers-delays", "0-50 ms at random"),
    "ResNet50 (H)": ("synchronisers-groups", "two groups, 50 ms apart"),
    "LSTM": ("synchronisers-videos", "videos of uneven length"),
}
# The same for rows with times. The times of the LSTM on videos were measured on a busy machine, so
# these rows show the LSTM on PLAID until `synchronisers-videos` is measured on an idle one.
TIMED = SETTINGS | {"LSTM": ("synchronisers-lengths", "uneven lengths")}
APPROACHES = {
    "Horovod": "bsp",
    "eager-SGD": "eager-sgd",
    "AD-PSGD": "ad-psgd",
    "RNA": "rna",
    "RNA-H": "rna-hierarchical",
}


def figure_6() -> Measured:
    """Compute each approach's speed-up over the all-reduce, in time to the target loss."""
    values: dict[str, float] = {}
    lines: list[Line] = []
    for setting, (record, name) in TIMED.items():
        runs = trainings(record, name)
        base = mean(runs["bsp"], "target_s")
        for approach, preset in APPROACHES.items():
            values[f"{setting}, {approach}"] = base / mean(runs[preset], "target_s")
    for approach in APPROACHES:
        ours = [values[f"{setting}, {approach}"] for setting in TIMED]
        lines.append(Line(approach, list(TIMED), ours))
    lines.append(Line("RNA, paper", list(TIMED), [1.7, 1.5, 1.6], paper=True))
    return Measured(values, Chart("", "speed-up over Horovod", lines, bars=True))


def figure_7() -> Measured:
    """Return seconds to the target, held-out loss and accuracy of an LSTM."""
    runs = trainings(*TIMED["LSTM"])
    values, seconds = {}, []
    for approach, preset in APPROACHES.items():
        of = runs[preset]
        seconds.append(mean(of, "target_s"))
        values[f"{approach}, s to the target"] = seconds[-1]
        values[f"{approach}, held-out loss"] = mean(of, "loss")
        values[f"{approach}, held-out accuracy, %"] = 100 * mean(of, "accuracy")
    values["RNA's speed-up to the target"] = seconds[0] / seconds[3]
    lines = [Line("s to the target", list(APPROACHES), seconds)]
    return Measured(values, Chart("", "s", lines, bars=True))


def table_3() -> Measured:
    """Return held-out accuracies after training."""
    values = {}
    for setting, (record, name) in SETTINGS.items():
        runs = trainings(record, name)
        for approach, preset in APPROACHES.items():
            values[f"{approach}, {setting}, %"] = 100 * mean(runs[preset], "accuracy")
    return Measured(values)


def table_4() -> Measured:
    """Return updates to the target, relative to the all-reduce, and held-out accuracy."""
    values = {}
    for setting in ("ResNet50", "LSTM"):
        runs = trainings(*TIMED[setting])
        updates = {
            approach: mean(runs[preset], "updates_s") * mean(runs[preset], "target_s")
            for approach, preset in APPROACHES.items()
            if approach != "RNA-H"
        }
        for approach, count in updates.items():
            values[f"{setting}, {approach}, iterations over Horovod's"] = count / updates["Horovod"]
            accuracy = 100 * mean(runs[APPROACHES[approach]], "accuracy")
            values[f"{setting}, {approach}, accuracy, %"] = accuracy
    return Measured(values)


def transformer(world: int, delays: bool) -> Scenario:
    """Return a scenario with a Transformer's gradients and 160 padded sentences per worker.

    Sentences have 25 tokens on average.
    """
    sizes = Sizes("lognormal", samples=160 * world * 64, mean=25.0, dif=15.0, max=256.0)
    devices = Devices(1e-5, 0.01, cost=Cost(padded=True), noise=0.02)
    if delays:
        devices = msgspec.structs.replace(devices, delay_s=(0.0, 0.05))
    # EDR InfiniBand.
    fast = Communication(2e-6, 4 * 61_362_176, 12.5e9)
    return Scenario("transformer", world, 160 * world, sizes, devices, epochs=2, communication=fast)


PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "Horovod": ("bsp", {}),
    "eager-SGD": ("eager-sgd", {}),
    "AD-PSGD": ("ad-psgd", {}),
    "RNA": ("rna", {}),
}


def _updates_s(ran: Run, world: int, approach: str) -> float:
    # Without rounds of all workers, an iteration is a worker's step.
    steps = len(ran.step_s)
    count = len(ran.rounds) if approach in ("RNA", "eager-SGD") else steps
    return count / ran.ended_s


def figure_8() -> Measured:
    """Measure iterations and samples per second relative to Horovod, on 16 workers."""
    values: dict[str, float] = {}
    lines: list[Line] = []
    for label, delays in (("even", False), ("uneven", True)):
        of = transformer(16, delays)
        runs = {name: run(of, *preset) for name, preset in PRESETS.items()}
        for name, ran in runs.items():
            each = _updates_s(ran, 16, name) / _updates_s(runs["Horovod"], 16, "Horovod")
            values[f"{name}, {label}, per iteration"] = each
            values[f"{name}, {label}, samples/s"] = ran.samples_s() / runs["Horovod"].samples_s()
        names = list(PRESETS)
        lines.append(Line(f"per iteration, {label}", names,
                          [values[f"{n}, {label}, per iteration"] for n in names]))  # fmt: skip
        lines.append(Line(f"samples/s, {label}", names,
                          [values[f"{n}, {label}, samples/s"] for n in names]))  # fmt: skip
    lines.append(Line("per iteration, even, paper", list(PRESETS), [1, 1.9, 1.4, 2.6], paper=True))
    return Measured(values, Chart("", "over Horovod", lines, bars=True))


def figure_9() -> Measured:
    """Measure samples per second by number of workers, with delays."""
    values: dict[str, float] = {}
    lines: list[Line] = []
    worlds = (4, 8, 16, 32)
    for name, preset in PRESETS.items():
        rates = [run(transformer(world, True), *preset).samples_s() for world in worlds]
        lines.append(Line(name, worlds, [round(each) for each in rates]))
        values[f"{name}, 4 processes, samples/s"] = rates[0]
        values[f"{name}, 32 processes, samples/s"] = rates[-1]
        values[f"{name}, 32 over 4 processes"] = rates[-1] / rates[0]
    return Measured(values, Chart("processes", "samples/s", lines))


def _probes(count: str) -> str:
    return "probe" if count == "1" else "probes"


def figure_10() -> Measured:
    """Read a record, because the program that measured it no longer exists."""
    response = results("probes")["response"]
    values: dict[str, float] = {}
    lines: list[Line] = []
    for setting, by_probes in response.items():
        at = sorted(by_probes, key=int)
        lines.append(Line(setting, at, [by_probes[n]["median_ms"] for n in at]))
        values |= {f"{setting}, {n} {_probes(n)}, ms": by_probes[n]["median_ms"] for n in at}
    lines.append(Line("paper", ["1", "2"], [28.0, 12.0], paper=True))
    return Measured(values, Chart("probes", "median response time, ms", lines))
