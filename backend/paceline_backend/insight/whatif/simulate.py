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
from paceline_backend.insight.whatif.answer import label
from paceline_backend.insight.whatif.measured import MeasuredSteps
from paceline_backend.insight.whatif.resampled import Resampled, blocks, resampled
from paceline_backend.insight.whatif.shapes import Shape
from paceline_backend.insight.whatif.state import PlanningState
from paceline_backend.policies import Changes, Models, Policy
from paceline_backend.policies.base import Floats
from paceline_backend.simulator import Simulation, TrainedSegment

LONGEST_S = 10.0  # CPU time after which a preset is left out because its planning is too slow
WHOLE_S = 60.0  # CPU time after which no further preset is simulated
_SIMULATED = 100  # most steps of each simulation that count
_SAMPLES = 400_000  # most samples of these steps
_EARLY = 24  # steps that count under other models, and at least
DRAWS = 64  # bootstrap draws of a simulation's steps, for the interval
_BETTER = 0.01  # a variant is kept if it takes less time than its preset's defaults by more


@dataclass(frozen=True)
class Basis:
    """The inputs of the simulations."""

    state: PlanningState
    measured: MeasuredSteps
    shape: Shape
    ratio: Floats  # [S, W] measured ÷ modelled compute time
    bias: float  # measured ÷ modelled step time on the same batches

    @property
    def models(self) -> Models:
        """Of the best fit."""
        return self.shape.models()


@dataclass
class SimulatedOption:
    """What an option's simulations took, in seconds per unit of load.

    An option is a preset with parameters: the policy in force, a preset's defaults, or a variant.
    """

    preset: str
    parameters: Mapping[str, Any]
    policy: Policy
    in_force: bool = False
    variant: bool = False
    draws: Floats = field(default_factory=lambda: np.empty(0))  # [DRAWS] bootstrapped means
    mean: float = 0.0  # of the counted steps
    early: float = 0.0  # mean of the first `_EARLY` of them
    shifts: list[float] = field(default_factory=list)  # log of early means, by other models
    alone: int | None = 0  # `Synchronisation.alone`, of the loosest of the counted segments
    stale: bool = False  # `Synchronisation.stale`, of any of them

    @property
    def changes(self) -> Changes:
        """What the option changes in the training."""
        return self.policy.changes

    def add(self, trained: list[TrainedSegment], count: int) -> None:
        """Adds the simulation with the fitted models: `count` steps after the warm-up."""
        step_s, load = _counted(trained, count)
        drawn = blocks(np.random.default_rng(1), count, count, DRAWS)
        self.draws = step_s[drawn].sum(axis=1) / load[drawn].sum(axis=1)
        self.mean = float(step_s.sum() / load.sum())
        self.early = float(step_s[:_EARLY].sum() / load[:_EARLY].sum())
        alone = [run.segment.synchroniser.alone for run in trained]
        self.alone = None if None in alone else max(filter(None, alone), default=0)
        self.stale = any(run.segment.synchroniser.stale for run in trained)

    def add_shift(self, trained: list[TrainedSegment]) -> None:
        """Adds a simulation with other models: `_EARLY` steps after the warm-up."""
        step_s, load = _counted(trained, _EARLY)
        self.shifts.append(float(np.log(step_s.sum() / load.sum() / self.early)))


def _counted(trained: list[TrainedSegment], count: int) -> tuple[Floats, Floats]:
    """Time and load of each of `count` steps after the warm-up."""
    counted = slice(WARMUP_STEPS, WARMUP_STEPS + count)
    step_s = np.concatenate([segment.evened_s for segment in trained])[counted]
    return step_s, np.concatenate([segment.evened_load for segment in trained])[counted]


def simulate(
    basis: Basis,
    in_force: Policy,
    presets: Sequence[str] | None,
    replicates: int,
    budget_s: float,
    *,
    relaxed: bool = True,
) -> tuple[dict[str, SimulatedOption], dict[str, str]]:
    """Simulates the policy in force and other presets, each on the same devices.

    The first simulation of each has the fitted models, and there are all variants. The best of a
    preset's variants stays, if it takes less time than the defaults. Pairs of shorter simulations
    follow, with models that the measured steps allow just as well.

    Args:
        basis: the inputs.
        in_force: the policy in force.
        presets: labels, or names for their defaults; None: all, with their variants.
        replicates: simulations of each preset, at most.
        budget_s: CPU seconds after which no pair is added to the first.
        relaxed: also presets that change the training.

    Returns:
        The simulations by label, the policy in force first; what is left out, by label, with the
        reason.
    """
    state = basis.state
    assert state.history is not None
    simulated, left_out = _options(state, in_force, presets, relaxed=relaxed)
    if basis.measured.fallback:
        _fall_back(simulated, left_out, basis.measured.fallback)
    most = _SAMPLES // state.history.hello.global_batch
    most = max(_EARLY, min(_SIMULATED, most))
    began = time.process_time()
    pairs = (replicates - 1) // 2
    for replicate in range(1 + 2 * pairs):
        begins_pair = replicate > 1 and replicate % 2 == 1
        if begins_pair and time.process_time() - began > budget_s:
            break
        count = most if replicate == 0 else _EARLY
        devices = _devices(basis, replicate)
        for name, option in list(simulated.items()):
            version = state.version + (not option.in_force)
            late = time.process_time() - began > WHOLE_S
            if late and replicate == 0 and not option.in_force:
                left_out[name] = f"no time was left: others took {WHOLE_S:g} s to simulate"
                del simulated[name]
                continue
            try:
                trained = _train(state, devices, option.policy, version, count)
            except _NotSimulatedError as error:
                left_out[name] = str(error)
                del simulated[name]
                continue
            except Exception as error:  # a third party's policy fails: leave out this policy only
                left_out[name] = f"{type(error).__name__}: {error}"
                del simulated[name]
                continue
            if replicate:
                option.add_shift(trained)
            else:
                option.add(trained, count)
        if replicate == 0:
            simulated = _without_worse_variants(simulated)
    return simulated, left_out


def presets_and_variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """Each preset with its defaults and each of its variants, by label: name and parameters."""
    return {
        label(name, parameters): (name, dict(parameters))
        for name in policies.names()
        for parameters in ({}, *policies.get(name).variants)
    }


def _options(
    state: PlanningState, in_force: Policy, presets: Sequence[str] | None, *, relaxed: bool
) -> tuple[dict[str, SimulatedOption], dict[str, str]]:
    """The options to simulate, by label; the presets that cannot be made, with the reason."""
    first = SimulatedOption(state.policy, state.parameters, in_force, in_force=True)
    options = {label(first.preset, first.parameters): first}
    budget = None if state.history is None else state.history.hello.token_budget
    left_out: dict[str, str] = {}
    for called, (name, parameters) in presets_and_variants().items():
        if presets is not None and called not in presets:
            continue
        try:
            if name == state.policy and policies.same(name, parameters, state.parameters):
                continue
            policy = policies.make(name, parameters)
        except Exception as error:  # a third party's preset must not end the forecast
            left_out[called] = f"{type(error).__name__}: {error}"
            continue
        if reason := policies.unsuited(policy, budget):
            left_out[called] = reason
            continue
        if relaxed or not policy.relaxed:
            options[called] = SimulatedOption(name, parameters, policy, variant=bool(parameters))
    # Time may be short: what leaves the training as it is comes first, and defaults come first.
    order = sorted(
        options.items(),
        key=lambda item: (not item[1].in_force, item[1].policy.relaxed, item[1].variant),
    )
    return dict(order), left_out


def _fall_back(options: dict[str, SimulatedOption], left_out: dict[str, str], why: str) -> None:
    """Takes relaxed synchronisers away: ranks would all-reduce gradients in spite of them."""
    for name, option in list(options.items()):
        if option.policy.relaxed and option.in_force:
            option.policy = replace(option.policy, synchroniser=ALLREDUCE)
        elif option.policy.relaxed:
            left_out[name] = f"gradients would be all-reduced, because {why}"
            del options[name]


def _without_worse_variants(options: dict[str, SimulatedOption]) -> dict[str, SimulatedOption]:
    """Leaves out variants that save nothing beside their preset's defaults or its best variant."""

    def stays(option: SimulatedOption) -> bool:
        alike = [other for other in options.values() if other.preset == option.preset]
        defaults = [other.mean for other in alike if not (other.variant or other.in_force)]
        variants = [other.mean for other in alike if other.variant]
        better = option.mean < (1 - _BETTER) * min(defaults, default=np.inf)
        return not option.variant or (better and option.mean == min(variants))

    return {name: option for name, option in options.items() if stays(option)}


def _devices(basis: Basis, replicate: int) -> Resampled:
    """The devices of a replicate, the same for all presets; replicate 0 has the fitted models."""
    assert basis.state.history is not None
    first_step = basis.state.history.step
    return resampled(basis.shape.models(replicate), basis.measured, basis.ratio, first_step)


def _train(
    state: PlanningState, devices: Resampled, policy: Policy, version: int, count: int
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
