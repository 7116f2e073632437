"""Measurements of SATA's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from papers import scenario

from figures.learning import by_samples, learn
from figures.recorded import mean, trainings
from figures.row import Chart, Line, Measured
from figures.simulated import Run, labelled, run, trained, with_devices, with_sizes
from paceline.policies.presets.sata import reweighted
from paceline_backend.simulator import Scenario, Simulation
from paceline_backend.simulator.scenario import Change

# TFLOPS in single precision, from the manufacturers' data sheets, because the papers give no times.
TFLOPS = {"GTX 1080 Ti": 11.3, "RTX 2080 Ti": 13.4, "V100": 15.7}
EPOCHS = 8
# Local batch of a worker.
BATCH = 128
# Held-out loss to reach.
TARGET = 0.2


def cluster(gpus: Sequence[str], samples: int = 12_800) -> Scenario:
    """Return workers with speeds proportional to their peaks.

    The 2080 Ti is as fast as in the straggler's scenario.
    """
    of = with_sizes(scenario("sata-straggler-2x", epochs=EPOCHS), samples=samples)
    factors: list[float] = [TFLOPS["RTX 2080 Ti"] / TFLOPS[gpu] for gpu in gpus]
    of = with_devices(of, factors=factors)
    return msgspec.structs.replace(of, workers=len(gpus), global_batch=BATCH * len(gpus))


def adapted(of: Scenario, shares: Sequence[float]) -> Run:
    """Run SATA with the given shares in the first epoch, as fixed batches of these capacities."""
    steps = -(-of.sizes.samples // of.global_batch)
    first = msgspec.structs.replace(
        of,
        policy="static-batching",
        parameters={"capacity": list(shares)},
        switches=[Change(steps, "sata")],
    )
    return trained(Simulation.of(first))


def _by_epoch(of: Scenario, starts: Mapping[str, Sequence[float]]) -> Measured:
    values: dict[str, float] = {}
    lines = []
    for name, shares in starts.items():
        ran = adapted(of, shares)
        epochs = range(EPOCHS)
        per = [ran.epoch == epoch for epoch in epochs]
        seconds = [float(ran.step_s[mine].sum()) for mine in per]
        gap = [float(np.ptp(ran.compute_s[mine].mean(axis=0))) for mine in per]
        share = [np.median(ran.share()[mine], axis=0) for mine in per]
        values |= {
            f"{name}: epoch 1, s": seconds[0],
            f"{name}: last epoch, s": seconds[-1],
            f"{name}: gap of computing times, epoch 1, ms": 1e3 * gap[0],
            f"{name}: gap of computing times, last epoch, ms": 1e3 * gap[-1],
            f"{name}: share of worker 1, last epoch": float(share[-1][0]),
        }
        settled = next(k for k in epochs if np.abs(share[k] - share[-1]).max() < 0.01)
        values[f"{name}: shares are steady from epoch"] = settled + 1
        lines.append(Line(name, [k + 1 for k in epochs], seconds))
    return Measured(values, Chart("epoch", "s per epoch", lines))


def figure_1() -> Measured:
    """Compute Eq. 8 for shares of a half and times of 2 and 6."""
    after = reweighted(np.array([0.5, 0.5]), np.array([0.5, 0.5]), np.array([2.0, 6.0]))
    return Measured(labelled(("share of worker 1", "share of worker 2"), after))


def figure_2() -> Measured:
    """Measure the samples of each worker's subset by epoch, on one GPU of each type."""
    of = cluster(list(TFLOPS))
    ran = adapted(of, [1.0, 1.0, 1.0])
    lines = []
    table = [ran.features.samples[ran.epoch == epoch].sum(axis=0) for epoch in range(EPOCHS)]
    for worker, gpu in enumerate(TFLOPS):
        subset = [int(row[worker]) for row in table]
        lines.append(Line(gpu, list(range(1, EPOCHS + 1)), subset))
    values = {f"{line.name}, samples of epoch {k}": float(line.y[k - 1] or 0) for line in lines
              for k in (1, EPOCHS)}  # fmt: skip
    return Measured(values, Chart("epoch", "samples", lines))


def figure_3() -> Measured:
    """Measure a 2080 Ti and a 1080 Ti, from two initial shares."""
    of = cluster(["RTX 2080 Ti", "GTX 1080 Ti"])
    return _by_epoch(of, {"from 1 : 1": [1, 1], "from 1 : 4": [1, 4]})


def figure_4() -> Measured:
    """Measure two 2080 Ti and a V100, from three initial shares."""
    of = cluster(["RTX 2080 Ti", "RTX 2080 Ti", "V100"])
    starts = {"from 1 : 1 : 1": [1, 1, 1], "from 4 : 1 : 1": [4, 1, 1], "from 1 : 2 : 6": [1, 2, 6]}
    return _by_epoch(of, starts)


def figure_5() -> Measured:
    """Measure the last epoch on three groups of GPUs, with equal and with adapted shares."""
    groups = {
        "2080 Ti, 1080 Ti": ["RTX 2080 Ti", "GTX 1080 Ti"],
        "2080 Ti, V100": ["RTX 2080 Ti", "V100"],
        "1080 Ti, 2080 Ti, V100": ["GTX 1080 Ti", "RTX 2080 Ti", "V100"],
    }
    values: dict[str, float] = {}
    bars: dict[str, list[float]] = {"equal shares": [], "SATA": []}
    for name, gpus in groups.items():
        of = cluster(gpus)
        equal = trained(Simulation.of(msgspec.structs.replace(of, policy="bsp")))
        own = adapted(of, [1.0] * len(gpus))
        for label, ran in (("equal shares", equal), ("SATA", own)):
            bars[label].append(ran.epochs_s[-1])
        values[f"{name}: time saved, %"] = 100 * (1 - own.epochs_s[-1] / equal.epochs_s[-1])
    lines = [Line(label, list(groups), seconds) for label, seconds in bars.items()]
    return Measured(values, Chart("", "s per epoch", lines, bars=True))


LEARNT = {"All-Reduce": "bsp", "SATA": "sata"}


def figure_6() -> Measured:
    """Measure loss over virtual time; AD-PSGD's time to a target is from records of real ranks."""
    values: dict[str, float] = {}
    lines: list[Line] = []
    for factor in (2, 10):
        of = with_sizes(scenario(f"sata-straggler-{factor}x", epochs=10), samples=1198)
        # A sample represents 16 of the paper's 1,024 per global batch.
        of = msgspec.structs.replace(with_devices(of, unit_s=16 * 0.74e-3), global_batch=64)
        seconds = {}
        for label, policy in LEARNT.items():
            ran = run(of, policy)
            learnt = learn(ran, by_samples, noise=0.0)
            clock = np.append(0.0, ran.step_s.cumsum())
            at = clock[learnt.steps]
            lines.append(Line(f"{label}, {factor}x", at.round(3).tolist(), learnt.loss.tolist()))
            steps = learnt.reached(TARGET)
            seconds[label] = float(np.interp(steps, np.arange(len(clock)), clock))
            values[f"{label}, {factor}x, s to a loss of {TARGET}"] = seconds[label]
        values[f"SATA over All-Reduce, {factor}x, time to the loss"] = (
            seconds["SATA"] / seconds["All-Reduce"]
        )
        for label, record, preset in (
            ("AD-PSGD", "synchronisers-own-batches", "ad-psgd, own batches"),
            ("AD-PSGD with shared batches", "synchronisers-slow", "ad-psgd"),
        ):
            runs = trainings(record, f"one {factor}x slower")
            reached = [mean(runs[name], "target_s") for name in (preset, "bsp")]
            values[f"{label} over All-Reduce, {factor}x, time to the loss, real ranks"] = (
                reached[0] / reached[1]
            )
    return Measured(values, Chart("virtual s", "held-out loss", lines))


def figure_7() -> Measured:
    """Measure samples per second relative to All-Reduce and AD-PSGD, after the first epoch.

    Under AD-PSGD each worker trains its own equal share of the epoch, as in the paper. The product
    also lets fast workers take over batches of slow ones, by default.
    """
    systems = {
        "All-Reduce": ("bsp", True),
        "AD-PSGD": ("ad-psgd", False),
        "AD-PSGD with shared batches": ("ad-psgd", True),
        "SATA": ("sata", True),
    }
    values: dict[str, float] = {}
    bars: dict[str, list[float]] = {label: [] for label in systems}
    for factor in (2, 5, 10):
        of = with_sizes(scenario(f"sata-straggler-{factor}x", epochs=4), samples=25_000)
        rates = {}
        for label, (policy, uneven_steps) in systems.items():
            ran = run(of, policy, uneven_steps=uneven_steps)
            rates[label] = 1 / sum(ran.epochs_s[1:])
            bars[label].append(rates[label] / rates["All-Reduce"])
        for label in [*systems][:-1]:
            values[f"SATA over {label}, {factor}x"] = rates["SATA"] / rates[label]
    lines = [Line(label, ["2x", "5x", "10x"], each) for label, each in bars.items()]
    lines.append(Line("SATA, paper", ["2x", "5x"], [3.3, 3.3], paper=True))
    return Measured(values, Chart("the straggler's slowdown", "speed-up", lines, bars=True))
