"""Simulates a run's next steps under each preset, as draws for a forecast."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paceline.wire import ALLREDUCE
from paceline_backend import policies
from paceline_backend.insight.report import WARMUP_STEPS
from paceline_backend.insight.whatif.measured import Measured, State
from paceline_backend.insight.whatif.resampled import Resampled, blocks, resampled
from paceline_backend.policies import Models, Policy
from paceline_backend.policies.base import Floats
from paceline_backend.simulator import Simulation, TrainedSegment

LONGEST_S = 10.0  # CPU time after which a preset is left out because its planning is too slow
_SIMULATED = 100  # most steps of each simulation that count
_SAMPLES = 400_000  # most samples of these steps
_FEWEST_SIMULATED = 24  # steps that count at least, even with more samples
DRAWS = 64  # bootstrap draws of a simulation's steps, for the interval


@dataclass(frozen=True)
class Basis:
    """The inputs of the simulations."""

    state: State
    measured: Measured
    models: Models
    ratio: Floats  # [S, W] measured ÷ modelled compute time
    bias: float  # measured ÷ modelled step time on the same batches


@dataclass
class Simulated:
    """A preset's simulated seconds per unit of load."""

    parameters: Mapping[str, Any]
    relaxed: bool
    draws: list[Floats] = field(default_factory=list)  # [DRAWS] of each replicate, by bootstrap
    means: list[float] = field(default_factory=list)  # of each replicate

    def add(self, trained: list[TrainedSegment], count: int, replicate: int) -> None:
        """Adds a replicate: `count` steps after the warm-up."""
        counted = slice(WARMUP_STEPS, WARMUP_STEPS + count)
        step_s = np.concatenate([segment.evened_s for segment in trained])[counted]
        load = np.concatenate([segment.evened_load for segment in trained])[counted]
        drawn = blocks(np.random.default_rng([1, replicate]), count, count, DRAWS)
        self.draws.append(step_s[drawn].sum(axis=1) / load[drawn].sum(axis=1))
        self.means.append(float(step_s.sum() / load.sum()))


def simulate(
    basis: Basis, in_force: Policy, wanted: Sequence[str], replicates: int, budget_s: float
) -> tuple[dict[str, Simulated], dict[str, str]]:
    """Simulates the policy in force and the wanted presets, each on the same devices.

    Args:
        basis: the inputs.
        in_force: the policy in force.
        wanted: names of presets.
        replicates: simulations of each preset, at most.
        budget_s: CPU seconds after which no replicate is added.

    Returns:
        The simulations by preset, the policy in force first; the presets that are left out, each
        with the reason.
    """
    state = basis.state
    assert state.history is not None
    made, left_out = _made(state, in_force, wanted)
    if basis.measured.fallback:
        _fall_back(made, left_out, state.policy, basis.measured.fallback)
    simulated = {
        name: Simulated(state.parameters if name == state.policy else {}, policy.relaxed)
        for name, policy in made.items()
    }
    count = _SAMPLES // state.history.hello.global_batch
    count = max(_FEWEST_SIMULATED, min(_SIMULATED, count))
    spent_s = 0.0  # on presets that are not left out
    for replicate in range(replicates):
        devices = _devices(basis, count, replicate)
        for name in list(simulated):
            version = state.version + (name != state.policy)
            began = time.process_time()
            try:
                trained = _train(state, devices, made[name], version, count)
                simulated[name].add(trained, count, replicate)
                spent_s += time.process_time() - began
            except _NotSimulatedError as error:
                left_out[name] = str(error)
                del simulated[name]
            except Exception as error:  # a third party's policy fails: leave out this policy only
                left_out[name] = f"{type(error).__name__}: {error}"
                del simulated[name]
        if spent_s > budget_s * (replicate + 1) / (replicate + 2):
            break
    return simulated, left_out


def _made(
    state: State, in_force: Policy, wanted: Sequence[str]
) -> tuple[dict[str, Policy], dict[str, str]]:
    """The policies to simulate, by name; the presets that cannot be made, with the reason."""
    made = {state.policy: in_force}
    left_out: dict[str, str] = {}
    for name in wanted:
        if name != state.policy:
            try:
                made[name] = policies.make(name, {})
            except Exception as error:  # a third party's preset must not end the forecast
                left_out[name] = f"{type(error).__name__}: {error}"
    return made, left_out


def _fall_back(made: dict[str, Policy], left_out: dict[str, str], in_force: str, why: str) -> None:
    """Takes relaxed synchronisers away: ranks would all-reduce gradients in spite of them."""
    for name, policy in list(made.items()):
        if policy.relaxed and name == in_force:
            made[name] = replace(policy, synchroniser=ALLREDUCE)
        elif policy.relaxed:
            left_out[name] = f"gradients would be all-reduced, because {why}"
            del made[name]


def _devices(basis: Basis, count: int, replicate: int) -> Resampled:
    """The devices of a replicate, the same for all presets."""
    assert basis.state.history is not None
    steps, first_step = WARMUP_STEPS + count, basis.state.history.step
    return resampled(basis.models, basis.measured, basis.ratio, steps, first_step, replicate)


def _train(
    state: State, devices: Resampled, policy: Policy, version: int, count: int
) -> list[TrainedSegment]:
    """Goes on from where the run stands, for the warm-up and `count` steps.

    Raises:
        _NotSimulatedError: the simulation cannot show the preset's effect.
    """
    if policy.threads and version != state.version:
        raise _NotSimulatedError("what other CPU threads would do shows in no telemetry")
    assert state.history is not None
    simulation = Simulation(
        state.history.hello,
        devices,
        policy,
        communication=devices.communication_s,
        costs=devices.costs,
    )
    simulation.history = copy.deepcopy(state.history)
    simulation.window = copy.deepcopy(state.window) or simulation.window
    simulation.version = version
    trained = []
    first, end, began = simulation.step, simulation.step + WARMUP_STEPS + count, time.process_time()
    while simulation.step < end:
        if time.process_time() - began > LONGEST_S:
            steps = simulation.step - first
            raise _NotSimulatedError(f"planning takes too long: {LONGEST_S:g} s for {steps} steps")
        trained.append(simulation.advance())
    return trained


class _NotSimulatedError(Exception):
    """The simulation cannot show a preset's effect."""
