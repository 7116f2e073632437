"""Contract of policies, as a test for their authors.

    from paceline_backend.testing import check_policy

    def test_contract() -> None:
        check_policy(preset)

This module needs no package except Paceline. docs/writing-a-policy.md explains the contract.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np

from paceline.core.batch_limits.budget import ROUNDING, Budget
from paceline.core.emulation import Emulation
from paceline.planning.feedback import single_batches
from paceline.policies.base import (
    Feedback,
    Policy,
    Preset,
    Problem,
    Shuffle,
    plan,
    unsuited,
)
from paceline.policies.parameters import convert, properties
from paceline.policies.presets import bsp
from paceline.policies.solve.order import remaining_in_order
from paceline.wire import Hello, Plan
from paceline.wire.synchronisation import Synchronisation
from paceline_backend.simulator import Simulation
from paceline_backend.simulator.scenario import hello_of

_SIZES = (0.0, 1.0, 1.0, 2.5, 40.0, 900.0)
_EPOCHS = 3


@dataclass(frozen=True)
class _Case:
    hello: Hello
    devices: Emulation
    parameters: Mapping[str, Any]
    # First step that the policy under test plans; `bsp` plans the steps before it.
    foreign: int

    def __str__(self) -> str:
        hello = self.hello
        return (
            f"{len(hello.sizes_array())} samples, {hello.world} ranks, global batch "
            f"{hello.global_batch}, drop_last {hello.drop_last}, limits {hello.limits}, "
            f"token budget {hello.token_budget}, token limits {hello.token_limits}, "
            f"parameters {self.parameters}"
        )


def check_policy(preset: Preset[Any], *, cases: int = 40, seed: int = 0) -> None:
    """Simulate small clusters that train under a policy; check each plan against the contract.

    The clusters are drawn at random. Some cases have very few samples, a global batch that the
    ranks cannot divide evenly, samples of size zero, a single rank, more ranks than samples,
    devices of different speed, noise, memory limits, or profiles. Parameters have random legal
    values. In some cases, another policy plans the first steps.

    Args:
        cases: number of clusters to simulate.

    Raises:
        AssertionError: the policy breaks the contract. The message names the rule and the case.
    """
    _check_preset(preset)
    rng = np.random.default_rng(seed)
    for number in range(cases):
        case = _draw(preset, rng)
        try:
            _check_training(preset, case)
        except Exception as error:
            raise AssertionError(f"{preset.name}, case {number} ({case}): {error}") from error


def _check_preset(preset: Preset[Any]) -> None:
    for field in ("name", "summary", "source"):
        assert getattr(preset, field), f"preset.{field} is empty"
    schemas = properties(preset.parameters)
    for name, schema in schemas.items():
        for field in ("type", "default", "description"):
            assert field in schema, f"parameters.{name}.{field} is missing"
    defaults = {name: schema["default"] for name, schema in schemas.items()}
    made = preset.make(convert(preset.name, preset.parameters, defaults))
    assert isinstance(made, Policy), "preset.make(parameters) does not return a Policy"
    assert made.name == preset.name, f"the policy's name is {made.name!r}, not {preset.name!r}"


def _draw(preset: Preset[Any], rng: np.random.Generator) -> _Case:
    world, samples = int(rng.integers(1, 7)), int(rng.integers(1, 61))
    drop_last = bool(rng.integers(2))
    global_batch = int(rng.integers(1, min(samples, 20) + 1 if drop_last else 21))
    sizes = rng.choice(_SIZES, samples)
    devices = Emulation(
        a_s=rng.uniform(1e-4, 1e-2, world).tolist(),
        b_s=[float(rng.choice([0.0, 0.05]))] * world,
        noise=float(rng.choice([0.0, 0.1])),
        seed=int(rng.integers(2**31)),
    )
    hello = hello_of(
        sizes,
        world,
        global_batch,
        seed=int(rng.integers(2**33)),
        epochs=_EPOCHS,
        drop_last=drop_last,
        limits=_limits(world, global_batch, rng) if rng.integers(2) else [],
        profiles=_profiles(devices) if rng.integers(2) else [],
    )
    parameters = {
        name: _choose(schema, rng) for name, schema in properties(preset.parameters).items()
    }
    foreign = int(rng.choice([0, 0, 3]))
    if rng.integers(3) == 0:
        grids = [grid for grid in range(2, global_batch + 1) if global_batch % grid == 0]
        hello = msgspec.structs.replace(hello, grid=int(rng.choice([1, *grids])))
    policy = preset.make(convert(preset.name, preset.parameters, parameters))
    if rng.integers(3) == 0 and unsuited(policy, 1.0) is None:
        hello = _budgeted(hello, rng)
    return _Case(hello, devices, parameters, foreign)


def _budgeted(hello: Hello, rng: np.random.Generator) -> Hello:
    """Return the same training with a token budget, and in some cases with token limits.

    The limits of all ranks together may barely suffice for the budget.
    """
    longest = max(1.0, float(hello.sizes_array().max()))
    limits = longest * rng.choice([0.0, 1.0, 1.5, 4.0], hello.world)
    limits[rng.integers(hello.world)] += longest
    holds = float(np.maximum(limits - longest, 0.0).sum()) + longest
    return msgspec.structs.replace(
        hello,
        token_budget=float(rng.uniform(longest, holds)),
        token_limits=limits.tolist() if rng.integers(2) else [],
        drop_last=False,
        limits=[],
        grid=1,
    )


def _limits(world: int, global_batch: int, rng: np.random.Generator) -> list[int]:
    """Draw a memory limit for each rank, in samples; some draws barely hold a global batch."""
    limits = rng.integers(0, global_batch + 1, world)
    limits[rng.integers(world)] += max(0, global_batch - limits.sum())
    return [int(limit) for limit in limits]


def _profiles(devices: Emulation) -> list[list[tuple[int, float]]]:
    speeds = zip(devices.a_s, devices.b_s, strict=True)
    return [[(n, a * n + b) for n in (2, 4, 8)] for a, b in speeds]


def _choose(schema: Mapping[str, Any], rng: np.random.Generator) -> Any:
    if "enum" in schema:
        return schema["enum"][int(rng.integers(len(schema["enum"])))]
    if schema["type"] == "boolean":
        return bool(rng.integers(2))
    if "minimum" in schema and "maximum" in schema:
        if schema["type"] == "integer":
            return int(rng.integers(schema["minimum"], schema["maximum"] + 1))
        return float(rng.uniform(schema["minimum"], schema["maximum"]))
    return schema["default"]


def _check_training(preset: Preset[Any], case: _Case) -> None:
    policy = preset.make(convert(preset.name, preset.parameters, case.parameters))
    plain = bsp.make(bsp.BspParameters())
    simulation = Simulation(case.hello, case.devices, plain if case.foreign else policy)
    samples, batch = len(case.hello.sizes_array()), case.hello.global_batch
    used: list[set[int]] = [set() for _ in range(_EPOCHS)]
    while not simulation.finished:
        if simulation.policy is plain and simulation.step >= case.foreign:
            simulation.switch(policy)
        if simulation.policy is policy:
            _check_plan(simulation)
        plan = simulation.advance().plan
        given = plan.assignment.samples.tolist()
        assert len(set(given)) == len(given), "a segment has a sample twice"
        again = used[plan.epoch].intersection(given)
        assert not again, f"samples {sorted(again)} used twice in epoch {plan.epoch}"
        used[plan.epoch].update(given)
    whole = samples - samples % batch if case.hello.drop_last else samples
    for epoch, seen in enumerate(used):
        assert len(seen) == whole, f"epoch {epoch} used {len(seen)} samples of {whole}"


def _check_plan(simulation: Simulation) -> None:
    """Check that the next plan is legal and repeatable, and that making it changes no argument."""
    shuffle = simulation.history.must_shuffle(simulation.version)
    problem = simulation.history.problem(3, simulation.version, shuffle=shuffle)
    feedback = single_batches(simulation.window.feedback(), simulation.history.newest)
    before = _arrays(problem, feedback)
    made, shuffled = plan(simulation.policy, problem, feedback, shuffle=shuffle)
    for name, array in _arrays(problem, feedback).items():
        assert np.array_equal(array, before[name]), f"{name} was changed in place"
    again = _values(*plan(simulation.policy, problem, feedback, shuffle=shuffle))
    for name, value in _values(made, shuffled).items():
        equal = np.array_equal(value, again[name])
        assert equal, f"{name} differs when planned again from the same arguments"
    # With a token budget, steps must use the samples in the epoch's order.
    if problem.token_budget is not None:
        _check_plain(made, problem)
    _check_legal(made, shuffled, problem)
    if simulation.policy.plain_batches:
        _check_plain(made, problem)


def _check_plain(made: Plan, problem: Problem) -> None:
    """Check that each global batch has the same samples as under plain DDP."""
    order = remaining_in_order(len(problem.sizes), problem.seed, problem.epoch, problem.remaining)
    ends = np.cumsum(problem.batch_sizes())[:-1]
    expected = np.split(order[: len(made.assignment.samples)], ends)
    for step, samples in enumerate(np.split(made.assignment.samples, ends)):
        assert np.array_equal(np.sort(samples), np.sort(expected[step])), (
            f"plain_batches: step {step} has other samples than under plain DDP"
        )


def _check_legal(made: Plan, shuffled: Shuffle, problem: Problem) -> None:
    counts, world = made.assignment.counts, problem.world
    assert counts.shape[1:] == (world,), (
        f"assignment.counts: shape {counts.shape}, not (number of steps, {world} ranks)"
    )
    assert (counts >= 0).all(), "assignment.counts: below 0"
    totals = counts.sum(axis=1).tolist()
    assert totals == problem.batch_sizes(), (
        f"assignment.counts: steps have {totals} samples, not {problem.batch_sizes()}"
    )
    if problem.limits is not None:
        most = counts.max(axis=0, initial=0)
        assert (most <= problem.limits).all(), (
            f"up to {most.tolist()} samples a step, but memory limits are {problem.limits.tolist()}"
        )
    if problem.token_budget is not None:
        _check_budget(made, problem)
    unknown = np.setdiff1d(made.assignment.samples, problem.remaining)
    assert not len(unknown), (
        f"samples {unknown.tolist()} are not among those that remain in this epoch"
    )
    assert sorted(shuffled.order.tolist()) == problem.remaining.tolist(), (
        "compose() does not return each remaining sample exactly once"
    )
    outside = np.setdiff1d(np.arange(len(problem.sizes)), problem.remaining)
    assert np.array_equal(shuffled.placement[outside], problem.placement[outside]), (
        "shuffle() moved samples that do not remain"
    )
    assert ((shuffled.placement >= 0) & (shuffled.placement < world)).all(), (
        "shuffle() returns a rank that does not exist"
    )
    if made.ett_s:
        assert np.shape(made.ett_s) == counts.shape, (
            f"ETT: shape {np.shape(made.ett_s)}, not {counts.shape} (steps, ranks)"
        )
        assert np.isfinite(made.ett_s).all(), "ETT: not finite"
    if made.shares:
        assert len(made.shares) == world, f"shares: {len(made.shares)}, not {world}"
        assert min(made.shares) >= 0, "shares: below 0"
        assert math.isclose(sum(made.shares), 1.0, rel_tol=1e-6), "shares: their sum is not 1"
    legal = all(type(n) is int and n >= 1 for n in made.threads)
    assert legal and len(made.threads) in (0, world), (
        f"threads: {made.threads}; give none, or an integer of 1 or more for each of {world} ranks"
    )
    how = made.synchroniser
    refused = how.defect(world)
    assert refused is None, refused
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(how), type=Synchronisation)
    assert arrived == how, f"synchroniser: {how} is not the same after it is sent in a segment"
    packed = msgspec.msgpack.encode(made.memory)
    travelled = msgspec.msgpack.decode(packed, type=dict[str, Any])
    assert travelled == made.memory, "memory is not the same after it is sent in a segment"


def _check_budget(made: Plan, problem: Problem) -> None:
    budget = Budget(problem.token_budget or 0.0, problem.sizes, problem.token_limits)
    refused = budget.excess(made.assignment.counts, made.assignment.samples)
    assert refused is None, f"token limits: {refused}"
    parts = np.split(made.assignment.samples, np.cumsum(made.assignment.counts.sum(axis=1))[:-1])
    for step, samples in enumerate(parts):
        held = float(problem.sizes[samples].sum())
        assert held <= budget.tokens * (1 + ROUNDING), (
            f"step {step} has a load of {held:g}, more than the token budget, {budget.tokens:g}"
        )


def _arrays(problem: Problem, feedback: Feedback) -> dict[str, Any]:
    return {
        f"{type(owner).__name__}.{field.name}": np.copy(value)
        for owner in (problem, feedback)
        for field in fields(owner)
        if isinstance(value := getattr(owner, field.name), np.ndarray)
    }


def _values(made: Plan, shuffled: Shuffle) -> dict[str, Any]:
    return {
        "assignment.counts": made.assignment.counts,
        "assignment.samples": made.assignment.samples,
        "placement": shuffled.placement,
        "order": shuffled.order,
        "ETT": made.ett_s,
        "shares": made.shares,
        "memory": str(made.memory),
        "threads": made.threads,
        "synchroniser": str(made.synchroniser),
        "why": made.why,
    }
