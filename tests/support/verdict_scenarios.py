"""Synthetic step timings with known causes, for tests of verdicts and `benchmarks/verdicts.py`.

`benchmarks/scenarios/verdicts.json` lists the scenarios: what ranks, batches and noise are like,
and what each cause changes, on which ranks and in which steps. People who had read docs/verdicts.md
and nothing of the code described the kinds; the numbers were drawn once and kept. The seed draws
everything else: the noise, the sizes of samples, the times of loaders and reductions. The cost of a
cause is exact: it is the run time less the run time of the same random numbers without that cause.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Rng = np.random.Generator
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Spec = Mapping[str, Any]
SCENARIOS = Path(__file__).parents[2] / "benchmarks" / "scenarios" / "verdicts.json"
# What effects change: seconds [K, W] of pauses and loading, [K, 1] of reductions and between steps.
QUANTITIES = ("pause", "data", "reduce", "between")


@dataclass(frozen=True)
class Truth:
    """A cause as a verdict should name it.

    Args:
        since: the first step that shows it; None: the first step of all.
        cost_s: what it adds to the run time.
        sigmas: size of that first step in standard deviations of the noise; None: no such step.
    """

    kind: str
    ranks: tuple[int, ...]
    since: int | None
    cost_s: float
    sigmas: float | None


@dataclass
class Batches:
    """The batches of K steps on W ranks, all [K, W]."""

    samples: Floats
    load: Floats
    squares: Floats
    longest: Floats
    cost_s: Floats  # on the usual machine, without noise
    even_s: Floats  # the same, if batches of a step were even
    active: Bools  # whether a rank takes part in a step


@dataclass
class Case:
    """A scenario with one draw of its random numbers: what its ranks report, and its causes."""

    name: str
    seed: int
    nodes: tuple[str, ...]  # of each rank
    first: Bools  # first steps of segments, [K]
    batches: Batches
    data_s: Floats
    compute_s: Floats
    sync_s: Floats
    between_s: Floats
    truths: list[Truth]


def scenarios() -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads(SCENARIOS.read_text())
    return read


def make(spec: Spec, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    K, W = shape = spec["steps"], spec["ranks"]
    batches = _planned(rng, shape, spec) if "plan" in spec else _batches(rng, shape, spec)
    slower = _noise(rng, shape, *spec["noise"])
    slower *= 1 + spec["spread"] * (rng.random(W) - 0.5)
    for rank, speed in spec.get("speeds", {}).items():
        slower[:, int(rank)] *= speed
    base = {"pause": np.zeros(shape)}
    mean_s, rel = spec["data"]
    base["data"] = mean_s * rng.gamma(1 / rel**2, rel**2, shape)
    for name in ("reduce", "between"):
        mean_s, rel = spec[name]
        noisy = mean_s * (1 + rel * rng.standard_normal((K, 1)))
        base[name] = np.clip(noisy, 0.1 * mean_s, None)
    jitter_s = rng.random(shape) * spec["jitter"]
    for name, step, rank, seconds in spec.get("little", []):  # too little to be named
        base[name][step, rank] += seconds
    causes = spec["causes"]
    changed = [_changes(rng, shape, cause) for cause in causes]

    def times(without: int | None = None) -> list[Floats]:
        """Return data_s, compute_s, sync_s and between_s without a cause."""
        gone = {} if without is None else causes[without]
        there = [each for at, each in enumerate(changed) if at != without]
        factor = np.prod([each["factor"] for each in there], axis=0) if there else 1.0
        pause, data, reduce, between = (
            sum((each[name] for each in there), start=base[name] * (gone.get("zero") != name))
            for name in QUANTITIES
        )
        cost_s = batches.even_s if gone.get("even") else batches.cost_s
        compute = np.where(batches.active, cost_s * slower * factor + pause, 0.0)
        data = np.where(batches.active, data, 0.0)
        own = np.where(batches.active, data + compute, -np.inf)
        waits = own.max(axis=1, keepdims=True) - own + reduce + jitter_s
        return [data, compute, np.where(batches.active, waits, 0.0), between[:, 0]]

    def wall_s(data: Floats, compute: Floats, sync: Floats, between: Floats) -> float:
        slowest = np.where(batches.active, data + compute, -np.inf).max(axis=1)
        return float((slowest + np.where(batches.active, sync, np.inf).min(axis=1) + between).sum())

    whole_s = wall_s(*times())
    truths = [
        Truth(
            cause["kind"],
            tuple(_ranks(cause["ranks"], W)),
            cause["since"],
            whole_s - wall_s(*times(at)),
            cause["sigmas"],
        )
        for at, cause in enumerate(causes)
    ]
    first = np.zeros(K, bool)
    for offset, length in spec["segments"]:
        first[offset::length] = True
    nodes = tuple(f"node{rank // spec['ranks_per_node']}" for rank in range(W))
    return Case(spec["kind"], seed, nodes, first, batches, *times(), truths)


def _ranks(ranks: Any, world: int) -> list[int]:
    return list(range(world)) if ranks == "all" else list(ranks)


def _changes(rng: Rng, shape: tuple[int, int], cause: Spec) -> dict[str, Floats]:
    """Return what a cause changes: a factor of the time to compute, and seconds of `QUANTITIES`."""
    K, W = shape
    made = {"factor": np.ones(shape), "pause": np.zeros(shape), "data": np.zeros(shape)}
    made |= {"reduce": np.zeros((K, 1)), "between": np.zeros((K, 1))}
    for effect in cause["effects"]:
        quantity = made[effect["on"]]
        rows = np.arange(*effect["span"]) if "span" in effect else np.array(effect["at"])
        columns = _ranks(effect.get("ranks", cause["ranks"]), W)
        columns = columns if quantity.shape[1] == W else [0]
        by = np.asarray(effect["by"], float)
        if by.ndim:  # for each rank, or in each step
            by = by[None, :] if effect.get("each") == "rank" else by[:, None]
        if grows := effect.get("grows"):
            steps, power = grows
            by = by * (np.clip((np.arange(len(rows)) + 1) / steps, 0, 1) ** power)[:, None]
        if rel := effect.get("rel"):
            wide = 1 if effect.get("common") else len(columns)
            by = by * rng.gamma(1 / rel**2, rel**2, (len(rows), wide))
        quantity[np.ix_(rows, columns)] += by
    return made


def _noise(rng: Rng, shape: tuple[int, int], kind: str, sd: float) -> Floats:
    if kind == "normal":
        noise = 1 + sd * rng.standard_normal(shape)
    elif kind == "lognormal":
        sigma = np.sqrt(np.log1p(sd**2))
        noise = rng.lognormal(-(sigma**2) / 2, sigma, shape)
    elif kind == "gamma":
        noise = rng.gamma(1 / sd**2, sd**2, shape)
    else:  # a heavy tail
        noise = 1 + sd * np.clip(rng.standard_t(7, shape), -6, 6) / np.sqrt(7 / 5)
    return np.clip(noise, 0.3, None)


def _sizes(rng: Rng, shape: tuple[int, ...], kind: str, by: float) -> Floats:
    """Sizes with a mean of about 1."""
    if kind == "constant":
        return np.ones(shape)
    if kind == "uniform":
        return rng.uniform(by, 2 - by, shape)
    if kind == "gamma":
        return rng.gamma(by, 1 / by, shape) + 0.01
    return np.minimum(rng.lognormal(-(by**2) / 2, by, shape), 60.0)


def _batches(rng: Rng, shape: tuple[int, int], spec: Spec) -> Batches:
    K, W = shape
    kind, by = spec["sizes"]
    step = np.exp(spec["vary"] * rng.standard_normal((K, 1)))  # size of the global batch
    count, near = spec["samples"], spec.get("near", 0.0)
    heavy = np.ones(shape)
    for rank, (factor, rel) in spec.get("heavy", {}).items():
        heavy[:, int(rank)] = factor * (1 + rel * rng.standard_normal(K))
    if kind == "constant":
        samples = np.broadcast_to(np.maximum(1, np.round(count * step)), shape).copy()
        if spread := spec.get("counts"):  # they differ from batch to batch
            samples = np.round(count * np.exp(spread * rng.standard_normal(shape)))
        if spec.get("heavy_by") == "samples":
            samples, heavy = np.ceil(samples * heavy), np.ones(shape)
        samples = np.maximum(1, samples)
        load, squares, longest = samples * heavy, samples * heavy**2, heavy
    else:
        samples = np.full(shape, float(count))
        drawn = _sizes(rng, (K, W, count), kind, by)
        load, squares, longest = drawn.sum(axis=2), (drawn**2).sum(axis=2), drawn.max(axis=2)
        even = count / load if spec["balance"] == "load" else 1.0
        scale = step * heavy * even * (1 + near * rng.standard_normal(shape))
        load, squares, longest = load * scale, squares * scale**2, longest * scale
    linear, square = load / load.mean(), squares / squares.mean()
    padded = samples * longest
    square_share = {"squares": spec.get("squares", 0.0)}.get(spec["model"], 0.0)
    x = {
        "load": linear,
        "padded": padded / padded.mean(),
        "squares": (1 - square_share) * linear + square_share * square,
        "count": samples / samples.mean(),
        "flat": np.ones(shape),
    }[spec["model"]]
    if spec["balance"] == "cost":  # sizes change until all batches of a step cost the same
        want = step * (1 + near * rng.standard_normal(shape))
        if spec["model"] == "squares":
            line, curve = (1 - square_share) * linear, square_share * square
            scale = (-line + np.sqrt(line**2 + 4 * curve * want)) / (2 * curve)
        else:
            scale = want / x
        load, squares, longest, x = load * scale, squares * scale**2, longest * scale, want
    unit, fixed = spec["unit"], spec["fixed"]
    cost_s = spec["batch_s"] * (fixed + (1 - fixed) * x)
    active = np.ones(shape, bool)
    for row in np.flatnonzero(rng.random(K) < spec.get("idle", 0.0)):
        off = rng.choice(W, int(rng.integers(1, max(2, W // 3))), replace=False)
        active[row, off] = False
    for cause in spec["causes"]:
        if cause["since"] is not None:
            active[cause["since"], _ranks(cause["ranks"], W)] = True
        for effect in cause["effects"]:
            if "at" in effect:
                active[effect["at"]] = True
    z = np.where(active, 1.0, 0.0)
    even_s = np.broadcast_to((cost_s * z).sum(1, keepdims=True) / z.sum(1, keepdims=True), shape)
    size, area = load * unit * z, squares * unit**2 * z
    return Batches(samples * z, size, area, longest * unit * z, cost_s * z, even_s, active)


def _planned(rng: Rng, shape: tuple[int, int], spec: Spec) -> Batches:
    """Batches of a plan that gives slow ranks less to do."""
    K, W = shape
    plan, fixed, unit = spec["plan"], spec["fixed"], spec["unit"]
    slow, factor = plan["ranks"], plan["factor"]
    usual, linear, m = float(spec["samples"]), 1 - fixed, len(plan["ranks"])
    mean = np.maximum(30, np.round(usual * np.exp(plan["vary"] * rng.standard_normal(K))))
    step = mean / usual
    # Equal times: factor · (linear · x + fixed) = linear · y + fixed, where m · x + (W - m) · y is
    # the whole of a step. The plan goes a share of the way there.
    x = (linear * W * step / (W - m) + fixed * (1 - factor)) / (linear * (factor + m / (W - m)))
    x = step + (x - step) * plan["share"]
    want = np.repeat(((W * step - m * x) / (W - m) * usual)[:, None], W, axis=1)
    want[:, slow] = (x * usual)[:, None]
    want[: plan["from"]] = mean[: plan["from"], None]
    counts = np.floor(want)
    rest = np.round(mean * W - counts.sum(axis=1)).astype(int)
    order = np.argsort(-(want - counts) - 1e-3 * rng.random(shape), axis=1)
    for row in range(K):
        counts[row, order[row, : rest[row]]] += 1
    load, squares, longest = counts * unit, counts * unit**2, np.full(shape, float(unit))
    if spread := plan["sizes"]:  # sizes differ, and the plan divides by load
        load = want * unit * (1 + 0.001 * rng.standard_normal(shape))
        middle = load / counts
        squares = counts * middle**2 * (1 + spread * rng.uniform(0.8, 1.2, shape))
        longest = np.minimum(middle * (2 + rng.gamma(4, 0.2, shape)), 0.98 * np.sqrt(squares))
    cost_s = spec["batch_s"] * (fixed + linear * load / (usual * unit))
    even_s = np.broadcast_to(cost_s.mean(axis=1, keepdims=True), shape)
    return Batches(counts, load, squares, longest, cost_s, even_s, np.ones(shape, bool))
