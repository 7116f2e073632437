"""Steps as ranks would report them, for verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline import policies
from paceline_backend.insight.verdict import ObservedSteps
from paceline_backend.simulator import Scenario, Simulation

FIRST = 100  # number of the first step


def observed(
    world: int = 6,
    steps: int = 100,
    *,
    noise: float = 0.02,
    load: Any = 40.0,
    speed: Any = 1.0,
    data_s: Any = 0.001,
    samples: Any = 4.0,
    reduce_s: Any = 0.002,
    between_s: Any = 0.001,
    nodes: Sequence[str] = (),
    apart: bool = False,
) -> ObservedSteps:
    """Steps of 2 ms a size unit; what is given may be [W], [K, W] or, without ranks, [K].

    Each eighth step is the first of its segment.
    """
    shape = (steps, world)
    rng = np.random.default_rng(world)
    loads = np.broadcast_to(np.asarray(load, float), shape)
    usual_s = 2e-3 * loads * np.asarray(speed, float)
    compute_s = usual_s * (1 + noise * rng.standard_normal(shape))
    data = np.broadcast_to(np.asarray(data_s, float), shape)
    ready = data + compute_s
    reduced = np.broadcast_to(np.asarray(reduce_s, float), steps)[:, None]
    return ObservedSteps(
        step=np.arange(FIRST, FIRST + steps),
        samples=np.broadcast_to(np.asarray(samples, float), shape),
        load=loads,
        squares=loads**2 / 4,
        longest=loads / 4,
        data_s=data,
        compute_s=compute_s,
        sync_s=reduced + (0.0 * ready if apart else ready.max(axis=1, keepdims=True) - ready),
        between_s=np.broadcast_to(np.asarray(between_s, float), steps),
        first=np.arange(steps) % 8 == 0,
        apart=np.full(steps, apart),
        nodes=nodes,
    )


def slow(rank: int, factor: float, world: int = 6) -> np.ndarray:
    """Speeds of which one rank's is lower."""
    return np.where(np.arange(world) == rank, factor, 1.0)


def in_steps(
    first: int, last: int, rank: int, factor: float, world: int = 6, steps: int = 100
) -> np.ndarray:
    """Speeds of which one is lower in some steps, [K, W]."""
    speed = np.ones((steps, world))
    speed[first : last + 1, rank] = factor
    return speed


def simulated(scenario: Scenario) -> ObservedSteps:
    """What the ranks of a simulation report."""
    simulation, ran = Simulation.of(scenario), []
    while not simulation.finished:
        ran.append(simulation.advance())

    def of(what: str) -> np.ndarray:
        return np.concatenate([getattr(each, what) for each in ran])

    def of_batches(what: str) -> np.ndarray:
        return np.concatenate([getattr(each.features, what) for each in ran]).astype(float)

    firsts = [each.plan.first_step for each in ran]
    versions = np.array([each.plan.version for each in ran])
    count = len(of("step_s"))
    return ObservedSteps(
        step=np.arange(count),
        samples=of_batches("samples"),
        load=of_batches("load"),
        squares=of_batches("squares"),
        longest=of_batches("longest"),
        data_s=of("data_s"),
        compute_s=of("compute_s"),
        sync_s=of("wait_s") + of("communication_s"),
        between_s=np.zeros(count),
        first=np.isin(np.arange(count), firsts),
        apart=np.zeros(count, bool),
        switched=[firsts[at] for at in np.flatnonzero(np.diff(versions)) + 1],
        policy=ran[-1].plan.policy,
        balances=policies.make(ran[-1].plan.policy).criteria.by_cost_and_speed,
    )


def written(rows: dict[str, Any]) -> ObservedSteps:
    """What ranks report by a recipe of `benchmarks/scenarios/advice.yaml`."""
    random = np.random.default_rng(rows["seed"])
    shape = rows["steps"], len(rows["load"])
    load = np.array(rows["load"]) * random.uniform(1 - rows["spread"], 1 + rows["spread"], shape)
    samples = np.broadcast_to(np.array(rows["samples"], float), shape).copy()
    factor = np.ones(shape)
    if slow := rows.get("slow"):
        factor[slow["first_step"] :, slow["ranks"]] = slow["factor"]
    compute_s = load * np.array(rows["seconds_per_element"]) * factor + rows["step_s"]
    compute_s *= 1 + rows["noise"] * random.standard_normal(shape)
    return ObservedSteps(
        step=np.arange(shape[0]),
        samples=samples,
        load=load,
        squares=load**2 / samples,
        longest=load / samples,
        data_s=np.zeros(shape),
        compute_s=compute_s,
        sync_s=compute_s.max(axis=1, keepdims=True) - compute_s + rows["reduction_s"],
        between_s=np.zeros(shape[0]),
        first=np.zeros(shape[0], bool),
        apart=np.zeros(shape[0], bool),
        nodes=tuple(rows["nodes"]),
        policy=rows["policy"],
    )
