"""Measurements of CHRONICA's rows that need learning."""

from __future__ import annotations

import statistics
from functools import cache

import msgspec
import numpy as np
from papers import SYSTEMS

from figures.chronica_runs import EQUAL, FEW, UNEVEN, testbed
from figures.learning import NETWORKS, Learnt, Weigh, by_load, learn, plain
from figures.row import Chart, Line, Measured
from figures.simulated import Run, run, with_sizes

# A video for each digit to learn.
VIDEOS, STEPS, SEEDS = 1198, 160, 2
# Held-out loss to reach.
TARGET = 0.5
SHOWN = ("TensorFlow", "BOA", "CHRONICA")


@cache
def _ran(cluster: str, dif: float, system: str, seed: int) -> Run:
    of = with_sizes(testbed(cluster, dif), samples=VIDEOS)
    of = msgspec.structs.replace(of, epochs=None, steps=STEPS, seed=seed)
    return run(of, *SYSTEMS[system])


@cache
def _learnt(
    cluster: str, dif: float, system: str, weigh: Weigh, network: str = "two layers"
) -> list[Learnt]:
    return [learn(_ran(cluster, dif, system, seed), weigh, network, seed) for seed in range(SEEDS)]


def _weigh(system: str) -> Weigh:
    return by_load if system == "CHRONICA" else plain


def _reached(of: list[Learnt], target: float = TARGET) -> float:
    return statistics.fmean(each.reached(target) for each in of)


def _loss(of: list[Learnt]) -> list[float]:
    mean: list[float] = np.mean([each.loss for each in of], axis=0).round(4).tolist()
    return mean


def figure_2() -> Measured:
    """Measure steps to a held-out loss with plain means, by DIF."""
    values, lines = {}, []
    for dif in FEW:
        of = _learnt(EQUAL, dif, "TensorFlow", plain)
        values[f"steps to a loss of {TARGET}, DIF {dif}"] = _reached(of)
        lines.append(Line(f"DIF {dif}", of[0].steps.tolist(), _loss(of)))
    return Measured(values, Chart("step", "held-out loss", lines))


def _over_time(dif: float, system: str, network: str, label: str) -> tuple[Line, float]:
    """Return the loss over time, and the seconds to the target."""
    of = _learnt(EQUAL, dif, system, _weigh(system), network)
    seconds = [np.append(0.0, _ran(EQUAL, dif, system, s).step_s.cumsum()) for s in range(SEEDS)]
    at = np.mean([each[of[0].steps] for each in seconds], axis=0)
    reached = [
        float(np.interp(each.reached(_target(network)), np.arange(len(clock)), clock))
        for each, clock in zip(of, seconds, strict=True)
    ]
    return Line(f"{system}, {label}", at.round(2).tolist(), _loss(of)), statistics.fmean(reached)


def _target(network: str) -> float:
    return 0.8 if network == "one layer" else TARGET


def figure_10() -> Measured:
    """Measure seconds to the target by DIF and system."""
    values, lines = {}, []
    for dif in FEW:
        for system in SHOWN:
            line, seconds = _over_time(dif, system, "two layers", f"DIF {dif}")
            lines.append(line)
            values[f"s to a loss of {TARGET}, {system}, DIF {dif}"] = seconds
    return Measured(values, Chart("virtual s", "held-out loss", lines))


def figure_11() -> Measured:
    """Measure seconds to the target for four networks at DIF 64."""
    values, lines = {}, []
    for network in NETWORKS:
        for system in SHOWN:
            line, seconds = _over_time(64, system, network, network)
            lines.append(line)
            values[f"s to a loss of {_target(network)}, {network}, {system}"] = seconds
    return Measured(values, Chart("virtual s", "held-out loss", lines))


def figure_13() -> Measured:
    """Measure how many steps compensated gradients save to the target, over plain means."""
    values, lines = {}, []
    for cluster in (EQUAL, UNEVEN):
        steps = {}
        for label, weigh in (("compensated", by_load), ("plain mean", plain)):
            of = _learnt(cluster, 64, "CHRONICA", weigh)
            steps[label] = _reached(of)
            lines.append(Line(f"{label}, {cluster}", of[0].steps.tolist(), _loss(of)))
        values[f"fewer steps, {cluster} workers, %"] = 100 * (
            1 - steps["compensated"] / steps["plain mean"]
        )
    equal = {
        label: _reached(_learnt(EQUAL, 64, "TensorFlow", weigh))
        for label, weigh in (("compensated", by_load), ("plain mean", plain))
    }
    values["fewer steps, TensorFlow's batches on equal workers, %"] = 100 * (
        1 - equal["compensated"] / equal["plain mean"]
    )
    return Measured(values, Chart("step", "held-out loss", lines))
