"""Measurements of CHRONICA's rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import msgspec
import numpy as np
from papers import SYSTEMS, TABLE_4, TABLE_5, calibrated, scenario

from figures.recorded import results
from figures.row import Chart, Line, Measured
from figures.simulated import Floats, Run, run, with_devices, with_sizes
from paceline.policies import Feedback, Models, Problem
from paceline.policies.predict.linear import PerSamplePredictor
from paceline.policies.presets.chronica import (
    ChronicaShuffler,
    PaperScheduler,
)
from paceline_backend.simulator import Scenario
from paceline_backend.simulator.sizes import Sizes

DIFS = tuple(TABLE_4)
FEW = (0, 16, 64)
EQUAL, UNEVEN = "equal", "uneven"
# Ratio of an M60's step to a T4's, by their single-precision peaks.
SLOWER = 1.7
# EP4DDL is left out: its batches are TensorFlow's, and threads change nothing on these devices.
# In Table IV's record, it takes as long as TensorFlow.
SHOWN = ("TensorFlow", "BOA", "CHRONICA", "free")


@cache
def testbed(cluster: str, dif: float = 64.0, epochs: int = 2) -> Scenario:
    """Return eight workers fitted to Table IV. In the uneven cluster four of them are M60s."""
    fitted = _fitted()
    if cluster == UNEVEN:
        fitted = with_devices(fitted, factors=[1.0] * 4 + [SLOWER] * 4)
    return msgspec.structs.replace(with_sizes(fitted, dif=dif), epochs=epochs)


@cache
def _fitted() -> Scenario:
    return calibrated(scenario("chronica-homogeneous", epochs=2))


@cache
def ran(cluster: str, dif: float, system: str) -> Run:
    """Run a system on a cluster for two epochs."""
    return run(testbed(cluster, dif), *SYSTEMS[system])


def second_epoch(of: Run) -> float:
    """Return seconds of the second epoch. Policies learn in the first."""
    return of.epochs_s[1]


def model(name: str, seconds: float) -> float:
    """Convert ResNet-50's seconds to a model's, by a speed and a cost fitted to Table V."""
    paper = TABLE_5[name]
    ours = {system: second_epoch(ran(EQUAL, 64, system)) for system in ("TensorFlow", "CHRONICA")}
    unit = (paper["TensorFlow"] - paper["CHRONICA"]) / (ours["TensorFlow"] - ours["CHRONICA"])
    return unit * seconds + paper["CHRONICA"] - unit * ours["CHRONICA"]


def figure_1() -> Measured:
    """Measure job time and the largest load of a worker, relative to DIF 0."""
    values: dict[str, float] = {}
    lines: list[Line] = []
    for cluster in (EQUAL, UNEVEN):
        runs = [ran(cluster, dif, "TensorFlow") for dif in DIFS]
        seconds = [second_epoch(each) for each in runs]
        for name in TABLE_5:
            times = [model(name, each) for each in seconds]
            ratios = [each / times[0] for each in times]
            lines.append(Line(f"{name}, {cluster}", DIFS, ratios))
            values |= {f"time, {name}, {cluster}, DIF 64": ratios[-1]}
        if cluster == EQUAL:
            values |= {
                f"time, ResNet-50, equal, DIF {dif}": second / seconds[0]
                for dif, second in zip(DIFS, seconds, strict=True)
            }
        peaks = [float(each.features.load.max()) for each in runs]
        values[f"peak load, {cluster}, DIF 64"] = peaks[-1] / peaks[0]
    paper = [TABLE_4[dif]["TensorFlow"] / TABLE_4[0]["TensorFlow"] for dif in DIFS]
    lines.append(Line("Table IV, ResNet-50, equal", DIFS, paper, paper=True))
    return Measured(values, Chart("DIF", "time over that at DIF 0", lines))


def _problem(held: list[list[float]], batch: int, seed: int = 0) -> Problem:
    sizes = np.array([size for mine in held for size in mine])
    placement = np.repeat(np.arange(len(held)), [len(mine) for mine in held])
    left = np.arange(len(sizes))
    return Problem(
        sizes, left, left, placement, epoch=0, first_step=0, steps=1,
        global_batch=batch, world=len(held), seed=seed,
    )  # fmt: skip


def picks() -> Measured:
    """Compute the picks of Figs. 3 and 5.

    The first pick is random, so search for the seed whose draw starts with 156.
    """
    held = [[171.0, 129.0, 117.0, 105.0], [156.0, 88.0, 139.0]]
    models = Models(np.ones(2), np.zeros(2), np.zeros(2))
    for seed in range(200):
        case = _problem(held, 4, seed)
        (step,) = PaperScheduler().schedule(case, models).parts
        first, second = ([float(x) for x in case.sizes[part]] for part in step)
        if (first, second) == ([129.0, 105.0], [156.0, 88.0]):
            return Measured({"worker 1, s": sum(first), "worker 2, s": sum(second)})
    raise AssertionError("no draw begins with 156")


def figure_4() -> Measured:
    """Compute the ETT of size 49 before and after feedback moves (a, b) from (3, 3) to (5, 2)."""
    load = np.array([10.0, 49.0, 118.0])
    values = {}
    for when, a, b in (("before", 3.0, 3.0), ("after", 5.0, 2.0)):
        steps, ones = np.arange(3), np.ones(3, np.int64)
        seen = Feedback(steps, np.zeros(3, np.int64), ones, load, a * load + b, load**2, load)
        fitted = PerSamplePredictor().fit(seen, world=1)
        values[f"{when}, s"] = float(fitted.a[0] * 49 + fitted.c[0] + fitted.b[0])
    return Measured(values)


def figure_6() -> Measured:
    """Compute totals after the shuffler has moved samples, starting with 678 and 806."""
    models = Models(np.array([1.0, 0.5]), np.array([0.0, 25.5]), np.zeros(2))
    case = _problem([[300.0, 378.0], [39.0, 27.0, 671.0, 671.0]], 3)
    cost = models.a[:, None] * case.sizes + models.c[:, None]
    before = case.placement
    after = ChronicaShuffler(paper=True).shuffle(case, models)
    return Measured(
        {
            "samples moved": float((after != before).sum()),
            "worker 1 before, s": float(cost[0, before == 0].sum()),
            "worker 2 before, s": float(cost[1, before == 1].sum()),
            "worker 1 after, s": float(cost[0, after == 0].sum()),
            "worker 2 after, s": float(cost[1, after == 1].sum()),
        }
    )


def figure_7() -> Measured:
    """Measure step DIF, the standard deviation of loads, at DIF 64 on equal workers."""
    values: dict[str, float] = {}
    lines: list[Line] = []
    for system in SHOWN:
        of = ran(EQUAL, 64, system)
        spread = of.features.load.std(axis=1, ddof=1)[of.epoch == 1]
        values[f"{system}, mean"] = float(spread.mean())
        lines.append(Line(system, list(range(60)), spread[:60].round(1).tolist()))
    return Measured(values, Chart("step of the second epoch", "step DIF, frames", lines))


def figure_8() -> Measured:
    """Measure seconds relative to TensorFlow at DIF 0, on both clusters."""
    values: dict[str, float] = {}
    lines: list[Line] = []
    for cluster in (EQUAL, UNEVEN):
        base = second_epoch(ran(cluster, 0, "TensorFlow"))
        for system in SHOWN:
            ratios = [second_epoch(ran(cluster, dif, system)) / base for dif in FEW]
            lines.append(Line(f"{system}, {cluster}", FEW, ratios))
            values[f"{system}, {cluster}, DIF 64"] = ratios[-1]
    of = [second_epoch(ran(EQUAL, 64, system)) for system in ("CHRONICA", "TensorFlow")]
    values["CHRONICA below EP4DDL at DIF 64, %"] = 100 * (1 - of[0] / of[1])
    lines += [
        Line(f"{system}, Table IV", FEW, [TABLE_4[d][system] / 234 for d in FEW], paper=True)
        for system in ("TensorFlow", "BOA", "CHRONICA")
    ]
    return Measured(values, Chart("DIF", "time over TensorFlow's at DIF 0", lines))


def figure_9() -> Measured:
    """Measure |expected − actual| time of a worker's step, mean over workers, at DIF 64."""
    short = msgspec.structs.replace(testbed(EQUAL), epochs=None, steps=120)
    values: dict[str, float] = {}
    lines: list[Line] = []
    for system in ("BOA", "EP4DDL", "CHRONICA", "levelled", "exact"):
        of = run(short, *SYSTEMS[system])
        error = np.abs(of.ett_s - of.compute_s)
        known = ~np.isnan(error).all(axis=1)
        mean = np.full(len(error), np.nan)
        mean[known] = np.nanmean(error[known], axis=1)
        values[f"{system}, mean of steps 60 to 119, ms"] = 1e3 * float(np.nanmean(mean[60:]))
        shown = [None if np.isnan(each) else round(float(each), 4) for each in mean]
        lines.append(Line(system, list(range(len(shown))), shown))
    chart = Chart("step", "mean |expected − actual|, s", lines, log_y=True)
    return Measured(values, chart)


def figure_12() -> Measured:
    """Measure seconds relative to TensorFlow by model, on both clusters at DIF 64."""
    values: dict[str, float] = {}
    lines: list[Line] = []
    for cluster in (EQUAL, UNEVEN):
        for system in SHOWN:
            ratios = []
            for name in TABLE_5:
                base = model(name, second_epoch(ran(cluster, 64, "TensorFlow")))
                ratios.append(model(name, second_epoch(ran(cluster, 64, system))) / base)
            values |= {
                f"{system}, {name}, {cluster}": ratio
                for name, ratio in zip(TABLE_5, ratios, strict=True)
                if system in ("BOA", "CHRONICA", "free")
            }
            lines.append(Line(f"{system}, {cluster}", list(TABLE_5), ratios))
    return Measured(values, Chart("", "time over TensorFlow's", lines, bars=True))


WORLDS = (1, 8, 32)
VIDEOS = 1024


def figure_14() -> Measured:
    """Measure speed-ups over one T4 with TensorFlow, local batch 4, DIF 64, in the second epoch."""
    values: dict[str, float] = {}
    lines: list[Line] = []
    for cluster in (EQUAL, UNEVEN):
        base = 0.0
        for system in ("TensorFlow", "BOA", "CHRONICA"):
            speeds = []
            for world in WORLDS:
                fast = (world + 1) // 2 if cluster == UNEVEN else world
                factors = [1.0] * fast + [SLOWER] * (world - fast)
                of = with_devices(with_sizes(testbed(EQUAL), samples=VIDEOS), factors=factors)
                of = msgspec.structs.replace(of, workers=world, global_batch=4 * world)
                speeds.append(VIDEOS / second_epoch(run(of, *SYSTEMS[system])))
            base = base or speeds[0]
            lines.append(Line(f"{system}, {cluster}", WORLDS, [each / base for each in speeds]))
            values[f"{system}, {cluster}, 32 workers"] = speeds[-1] / base
    seconds = results("papers")["chronica_heterogeneous"]["ours_s"]
    for system in ("CHRONICA", "free"):
        label = f"{system} over EP4DDL, 32 uneven workers"
        values[label] = seconds["EP4DDL"] / seconds[system]
    return Measured(values, Chart("workers", "speed-up over one", lines))


# Table I: samples, DIF. The table has no mean sizes.
DATA_SETS = {
    "UCF101": (13_320, 3.73),
    "Charades": (9_848, 9.44),
    "DAVIS": (50, 18.36),
    "HACS": (504_716, 64.13),
    "COIN": (11_827, 70.02),
    "YouTube-BoundingBoxes": (285_412, 212.64),
    "Sports-1M": (1_133_158, 539.75),
}


def table_1() -> Measured:
    """Measure DIF of sizes that the simulator draws per data set, and of PLAID's recordings."""
    from tasks import task_of

    values = {}
    for name, (samples, dif) in DATA_SETS.items():
        drawn = Sizes("lognormal", samples=samples, mean=186.0, dif=dif).draw(0)
        values[f"{name}, drawn"] = float(drawn.std(ddof=1))
    sizes: Floats = np.array(task_of("plaid").sizes, np.float64)
    values["PLAID, real, points"] = float(sizes.std(ddof=1))
    return Measured(values)


def _rows(record: Iterable[Mapping[str, Any]], key: str, word: str) -> Measured:
    values: dict[str, float] = {}
    lines: dict[str, list[float]] = {}
    for row in record:
        for system, seconds in row["ours_s"].items():
            values[f"{system}, {word}{row[key]}"] = seconds
            lines.setdefault(system, []).append(seconds)
    at = [row[key] for row in record]
    drawn = [Line(system, at, seconds) for system, seconds in lines.items()]
    for system in ("TensorFlow", "BOA", "EP4DDL", "CHRONICA"):
        seconds = [row["paper_s"][system] for row in record]
        drawn.append(Line(f"{system}, paper", at, seconds, paper=True))
    return Measured(values, Chart(word.strip(), "s per epoch", drawn, bars=not word))


def table_4() -> Measured:
    """Read the record of `benchmarks/papers.py`."""
    return _rows(results("papers")["chronica_table_4"], "dif", "DIF ")


def table_5() -> Measured:
    """Read the record of `benchmarks/papers.py`."""
    return _rows(results("papers")["chronica_table_5"], "model", "")


def table_6() -> Measured:
    """Measure real planning time relative to virtual training time, at MobileNetV1's speed."""
    values = {}
    speed = 85 / 247
    resnet = testbed(EQUAL).devices
    assert isinstance(resnet.unit_s, float)
    assert isinstance(resnet.step_s, float)
    for world in (8, 32):
        of = with_devices(
            testbed(EQUAL), unit_s=speed * resnet.unit_s, step_s=speed * resnet.step_s
        )
        of = msgspec.structs.replace(of, workers=world, global_batch=4 * world)
        done = run(of, *SYSTEMS["CHRONICA"])
        shuffling = sum(seconds for seconds, shuffled in done.plans if shuffled)
        planning = sum(seconds for seconds, _ in done.plans) - shuffling
        total = done.ended_s
        values[f"schedule, {world} workers, %"] = 100 * planning / total
        values[f"segments with a shuffle, {world} workers, %"] = 100 * shuffling / total
        values[f"training, {world} workers, %"] = 100 * (1 - (planning + shuffling) / total)
    return Measured(values)
