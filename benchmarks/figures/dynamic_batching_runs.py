"""Measurements of dynamic batching's rows."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import msgspec
import numpy as np
import torch
from papers import scenario
from scipy.optimize import brentq

from figures.learning import NETWORKS
from figures.row import Chart, Line, Measured
from figures.simulated import run, with_devices, with_sizes
from paceline.policies.presets.ep4ddl import shortened
from paceline_backend.simulator import Scenario
from paceline_backend.simulator.scenario import Communication

LEVELS = (1, 2, 4, 6, 8, 10)
# Share of computing in a step on the even cluster. The paper only states which workload computes
# much.
COMPUTING = {"ResNet-50": 0.97, "MNIST CNN": 0.7, "Linear regression": 0.1}
# Time of a sample on one core.
UNIT_S = 0.1
# Number of runs of Fig. 4, with different noise.
SEEDS = 10
# Lines of Fig. 6.
POLICIES = {"uniform": "bsp", "variable": "static-batching", "dynamic": "dynamic-batching"}


# Gain of variable batches with ResNet-50 at level 10, from the text; `fitted_serial` uses it.
PAPERS_GAIN = 2.4


def cores(at: int) -> list[float]:
    """Return the workers' numbers of cores at a heterogeneity level."""
    of = scenario(f"dynamic-batching-h{at}").devices
    return [1 / factor for factor in of.factors]  # type: ignore[operator]


def level(at: int, workload: str = "ResNet-50", serial: float = 0.0) -> Scenario:
    """Return three workers with 39 cores at a heterogeneity level.

    By Amdahl's law, a sample takes k cores `serial` + (1 − `serial`) / k of the time on one core.
    Exchanges take the part of a step of the even cluster that computing does not take.
    """
    of = with_sizes(scenario(f"dynamic-batching-h{at}", epochs=2), samples=4_800)
    even_s = UNIT_S * of.global_batch / of.workers * float(shortened(np.array(13), serial))
    rest = Communication(fixed_s=even_s * (1 / COMPUTING[workload] - 1))
    factors = shortened(np.array(cores(at)), serial).tolist()
    of = with_devices(of, step_s=0.0, factors=factors)
    return msgspec.structs.replace(of, communication=rest)


def seconds(of: Scenario, policy: str, capacity: list[float] | None = None) -> float:
    """Return seconds of the second epoch. `capacity` are the speeds for the static policy, [W]."""
    parameters = {"capacity": capacity} if policy == "static-batching" else {}
    return run(of, policy, parameters).epochs_s[1]


@cache
def at_level(at: int, workload: str, policy: str, serial: float) -> float:
    """Return seconds of the second epoch at a heterogeneity level."""
    return seconds(level(at, workload, serial), policy, cores(at))


def gain(at: int, workload: str, serial: float, policy: str = "static-batching") -> float:
    """Return the time with uniform batches ÷ the time under `policy` at a heterogeneity level."""
    uniform_s = at_level(at, workload, "bsp", serial)
    return uniform_s / at_level(at, workload, policy, serial)


@cache
def fitted_serial() -> float:
    """Fit the serial share of Amdahl's law to the paper's gain for ResNet-50 at level 10."""
    return float(brentq(lambda s: gain(10, "ResNet-50", s) - PAPERS_GAIN, 0.01, 0.5, xtol=1e-4))


def figure_1() -> Measured:
    """Measure uniform batches: seconds relative to the even cluster."""
    serial = fitted_serial()
    values: dict[str, float] = {}
    lines: list[Line] = []
    for workload in COMPUTING:
        even = at_level(1, workload, "bsp", serial)
        ratios = [at_level(at, workload, "bsp", serial) / even for at in LEVELS]
        values |= {f"{workload}, H {at}": x for at, x in zip(LEVELS[1:], ratios[1:], strict=True)}
        lines.append(Line(workload, LEVELS, ratios))
    return Measured(values, Chart("heterogeneity level", "time over the even cluster's", lines))


def figure_2() -> Measured:
    """Measure waits of two workers, one three times as fast, with uniform and variable batches."""
    of = with_devices(level(1), factors=[1 / 5, 1 / 15])
    of = msgspec.structs.replace(of, workers=2, global_batch=128)
    values = {}
    for label, policy in (("uniform", "bsp"), ("variable", "dynamic-batching")):
        ran = run(of, policy)
        second = ran.epoch == 1
        for worker, name in enumerate(("slower", "faster")):
            wait = ran.wait_s[second, worker].sum() / ran.step_s[second].sum()
            values[f"{label}, {name} worker waits, %"] = 100 * float(wait)
            batch = float(np.median(ran.features.samples[second, worker]))
            values[f"{label}, {name} worker, samples"] = batch
    return Measured(values)


QUANTILES = tuple(range(0, 101, 5))


def figure_3() -> Measured:
    """Measure iteration times of workers with 3, 5 and 12 cores."""
    of = with_devices(level(1), factors=[1 / 3, 1 / 5, 1 / 12], noise=0.05)
    values: dict[str, float] = {}
    lines: list[Line] = []
    for label, policy in (("uniform", "bsp"), ("variable", "static-batching")):
        ran = run(of, policy, {"capacity": [3.0, 5.0, 12.0]} if policy != "bsp" else {})
        second = ran.compute_s[ran.epoch == 1]
        for worker, count in enumerate((3, 5, 12)):
            name = f"{label}, {count} cores"
            values[f"{name}, median s"] = float(np.median(second[:, worker]))
            spread = np.percentile(second[:, worker], QUANTILES).round(3).tolist()
            lines.append(Line(name, QUANTILES, spread))
    return Measured(values, Chart("percentile", "s of an iteration", lines))


def figure_4() -> Measured:
    """Measure adjustments of batches that are equal at first, with and without the dead band."""
    of = with_devices(level(1), factors=[1 / 3, 1 / 5, 1 / 12], noise=0.05)
    of = msgspec.structs.replace(of, epochs=None, steps=120, global_batch=300)
    settings: dict[str, dict[str, Any]] = {
        "dead band of 0.05": {},
        "no dead band": {"dead_band": 0.0},
        "neither dead band nor smoothing": {"dead_band": 0.0, "smoothing": 1.0, "every_steps": 1},
    }
    values: dict[str, float] = {}
    lines: list[Line] = []
    for label, parameters in settings.items():
        counted = []
        for seed in range(SEEDS):
            seeded = msgspec.structs.replace(of, seed=seed)
            samples = run(seeded, "dynamic-batching", parameters).features.samples
            counted.append(int((np.diff(samples, axis=0) != 0).any(axis=1).sum()))
            if seed == 0 and label != "no dead band":
                for worker, count in enumerate((3, 5, 12)):
                    name = f"{label}, {count} cores"
                    lines.append(Line(name, list(range(len(samples))), samples[:, worker].tolist()))
        values[f"{label}: adjustments in 120 steps, median"] = float(np.median(counted))
        values[f"{label}: adjustments in 120 steps, most"] = float(max(counted))
    return Measured(values, Chart("step", "samples", lines))


def figure_5() -> Measured:
    """Measure samples per second of a small convolutional network on a thread of this machine."""
    torch.set_num_threads(1)
    model, loss = NETWORKS["convolution"](), torch.nn.CrossEntropyLoss()
    sizes = [2**p for p in range(15)]
    rates = []
    for size in sizes:
        inputs, classes = torch.randn(size, 64), torch.randint(10, (size,))
        times = []
        for _ in range(5):
            began = time.perf_counter()
            loss(model(inputs), classes).backward()
            times.append(time.perf_counter() - began)
        rates.append(size / min(times))
    best = int(np.argmax(rates))
    values = {
        "batch of one, samples/s": rates[0],
        "best, samples/s": rates[best],
        "best batch, samples": float(sizes[best]),
        f"batch of {sizes[-1]} over the best": rates[-1] / rates[best],
    }
    line = Line("convolution network", sizes, [round(each) for each in rates])
    return Measured(values, Chart("batch size", "samples/s", [line]))


def figure_6() -> Measured:
    """Measure uniform against variable batches by level, and both against the even cluster.

    The global batches are the same, and so is the number of steps to an accuracy. Variable batches
    are in proportion to cores, as in the paper; dynamic ones follow the workers' times.
    """
    serial = fitted_serial()
    values = {"serial share": serial}
    lines: list[Line] = []
    for workload in COMPUTING:
        even = at_level(1, workload, "bsp", serial)
        for label, policy in POLICIES.items():
            ratios = [at_level(at, workload, policy, serial) / even for at in LEVELS]
            lines.append(Line(f"{workload}, {label}", LEVELS, ratios))
            if policy == "bsp":
                continue
            for at in (2, 6, 10):
                of = "gain" if label == "variable" else f"{label}, gain"
                values[f"{workload}, {of} at H {at}"] = gain(at, workload, serial, policy)
            values[f"{workload}, {label} at H 6 over even"] = ratios[LEVELS.index(6)]
    lines.append(Line("variable, paper", [6, 6, 6], [2.0, 4.0, 1.05], paper=True))
    return Measured(values, Chart("heterogeneity level", "time over the even cluster's", lines))


def figure_7() -> Measured:
    """Measure a P100 with a Xeon (0.813 : 0.187 by their FLOPs), and two T4 with two P4."""
    clusters = {
        "GPU and CPU": [1 / 0.813, 1 / 0.187],
        # TFLOPS in single precision.
        "two T4, two P4": [1 / 8.1] * 2 + [1 / 5.5] * 2,
    }
    values, bars = {}, []
    for name, factors in clusters.items():
        for workload in ("ResNet-50", "MNIST CNN"):
            if name != "GPU and CPU" and workload != "ResNet-50":
                continue
            of = with_devices(level(1, workload), factors=factors)
            of = msgspec.structs.replace(of, workers=len(factors), global_batch=64 * len(factors))
            even_s = UNIT_S * of.global_batch / sum(1 / factor for factor in factors)
            rest = Communication(fixed_s=even_s * (1 / COMPUTING[workload] - 1))
            of = msgspec.structs.replace(of, communication=rest)
            uniform = seconds(of, "bsp")
            for label, policy in (("variable", "static-batching"), ("dynamic", "dynamic-batching")):
                speeds = [1 / factor for factor in factors]
                values[f"{name}, {workload}, {label}"] = uniform / seconds(of, policy, speeds)
            label = f"{name}, {workload}, dynamic over variable"
            values[label] = (
                values[f"{name}, {workload}, dynamic"] / values[f"{name}, {workload}, variable"]
            )
            slow = max(factors) * sum(1 / factor for factor in factors) / len(factors)
            values[f"{name}, the most that balance can gain"] = slow
            bars.append((f"{name}, {workload}", values[f"{name}, {workload}, variable"],
                         values[f"{name}, {workload}, dynamic"]))  # fmt: skip
    names = [bar[0] for bar in bars]
    lines = [
        Line("variable", names, [b[1] for b in bars]),
        Line("dynamic", names, [b[2] for b in bars]),
    ]
    lines.append(Line("variable, paper", names, [4.0, 1.2, 4.5], paper=True))
    return Measured(values, Chart("", "speed-up over uniform batches", lines, bars=True))


def asp() -> Measured:
    """Measure `n-soft` with n = M, in which each gradient is an update, at level 6."""
    of = level(6)
    values = {}
    for label, batches in (("uniform", "bsp"), ("variable", "dynamic-batching")):
        ran = run(of, "n-soft", {"n": 3, "batches": batches, "staleness": 64})
        ages = np.sum([np.pad(r.staleness, (0, 80 - len(r.staleness))) for r in ran.rounds], axis=0)
        values[f"{label}, mean staleness, updates"] = float(ages @ np.arange(80) / ages.sum())
        values[f"{label}, samples/s"] = ran.samples_s()
        values[f"BSP, {label}, samples/s"] = run(of, batches).samples_s()
    return Measured(values)
