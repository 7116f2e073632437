"""Simulation of a run's next steps under each preset, for a forecast.

Each preset trains on the same simulated devices. CPU time is limited for each preset and in total.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paceline import policies
from paceline.policies import Changes, Models, Policy
from paceline.policies.base import Floats
from paceline.wire import ALLREDUCE
from paceline_backend.insight.report import WARMUP_STEPS
from paceline_backend.insight.whatif.answer import label
from paceline_backend.insight.whatif.measured import MeasuredSteps
from paceline_backend.insight.whatif.resampled import Resampled, blocks, resampled
from paceline_backend.insight.whatif.shapes import Shape
from paceline_backend.insight.whatif.state import PlanningState
from paceline_backend.insight.whatif.thresholds import THRESHOLDS
from paceline_backend.simulator import Simulation, TrainedSegment


@dataclass(frozen=True)
class Effort:
    """Limits of the simulations of one forecast; times are CPU seconds.

    Attributes:
        replicates: maximum number of simulations of each preset.
        budget_s: no further pair of shorter simulations (see `simulate`) starts after this time.
        preset_s: a preset whose simulation takes longer is left out as too slow to plan.
        whole_s: no further preset is simulated after this time.
    """

    replicates: int = 5
    budget_s: float = 4.0
    preset_s: float = 10.0
    whole_s: float = 60.0


@dataclass(frozen=True)
class Basis:
    """Inputs of the simulations."""

    state: PlanningState
    measured: MeasuredSteps
    shape: Shape
    # Measured ÷ modelled compute time.
    ratio: Floats  # [S, W]
    # Measured ÷ modelled step time on the same batches.
    bias: float

    @property
    def models(self) -> Models:
        """Return the models of the best fit."""
        return self.shape.models()


@dataclass
class SimulatedOption:
    """Simulated times of an option, in seconds per unit of load.

    An option is a preset with parameters: the policy in force, a preset's defaults, or a variant.
    """

    preset: str
    parameters: Mapping[str, Any]
    policy: Policy
    in_force: bool = False
    variant: bool = False
    # Mean time of the counted steps (the steps after the warm-up), by bootstrap draw.
    draws: Floats = field(default_factory=lambda: np.empty(0))  # [draws]
    # Mean time of the counted steps.
    mean: float = 0.0
    # Mean time of the first `early_steps` counted steps.
    early: float = 0.0
    # For each simulation with models other than the fitted ones: logarithm of its mean time in
    # `early_steps` ÷ `early`.
    shifts: list[float] = field(default_factory=list)
    # Largest `Synchronisation.alone` of the simulated segments; None if it is None in any of them.
    alone: int | None = 0
    # True if `Synchronisation.stale` is true in any of the simulated segments.
    stale: bool = False

    @property
    def changes(self) -> Changes:
        """Return the option's effect on the training."""
        return self.policy.changes

    def add(self, trained: list[TrainedSegment], count: int) -> None:
        """Add the results of the simulation with the fitted models.

        `count` is the number of simulated steps after the warm-up.
        """
        step_s, load = _counted(trained, count)
        drawn = blocks(np.random.default_rng(1), count, count, THRESHOLDS.draws)
        self.draws = step_s[drawn].sum(axis=1) / load[drawn].sum(axis=1)
        self.mean = float(step_s.sum() / load.sum())
        early = slice(THRESHOLDS.early_steps)
        self.early = float(step_s[early].sum() / load[early].sum())
        alone = [run.plan.synchroniser.alone for run in trained]
        self.alone = None if None in alone else max(filter(None, alone), default=0)
        self.stale = any(run.plan.synchroniser.stale for run in trained)

    def add_shift(self, trained: list[TrainedSegment]) -> None:
        """Add the result of a simulation with models other than the fitted ones; see `shifts`."""
        step_s, load = _counted(trained, THRESHOLDS.early_steps)
        self.shifts.append(float(np.log(step_s.sum() / load.sum() / self.early)))


def _counted(trained: list[TrainedSegment], count: int) -> tuple[Floats, Floats]:
    counted = slice(WARMUP_STEPS, WARMUP_STEPS + count)
    step_s = np.concatenate([segment.evened_s for segment in trained])[counted]
    return step_s, np.concatenate([segment.evened_load for segment in trained])[counted]


def simulate(
    basis: Basis,
    in_force: Policy,
    presets: Sequence[str] | None,
    effort: Effort,
    *,
    relaxed: bool = True,
) -> tuple[dict[str, SimulatedOption], dict[str, str]]:
    """Return simulated options and the reasons for options that are left out, both by label.

    First, all options, including all variants, are simulated with the fitted models. Of each
    preset's variants, only the best is kept, and only if it takes less time than the defaults.
    Pairs of shorter simulations follow, with other models, which differ from the fitted models as
    much as the uncertainty of the fit suggests (`Shape.models`).

    For `presets` and `relaxed` see `forecast.forecast`. The policy in force always comes first.
    """
    state = basis.state
    assert state.history is not None
    simulated, left_out = _options(state, in_force, presets, relaxed=relaxed)
    if basis.measured.fallback:
        _fall_back(simulated, left_out, basis.measured.fallback)
    most = THRESHOLDS.simulated_samples // state.history.hello.global_batch
    most = max(THRESHOLDS.early_steps, min(THRESHOLDS.simulated_steps, most))
    began = time.process_time()
    pairs = (effort.replicates - 1) // 2
    for replicate in range(1 + 2 * pairs):
        begins_pair = replicate > 1 and replicate % 2 == 1
        if begins_pair and time.process_time() - began > effort.budget_s:
            break
        count = most if replicate == 0 else THRESHOLDS.early_steps
        devices = _devices(basis, replicate)
        for name, option in list(simulated.items()):
            version = state.version + (not option.in_force)
            late = time.process_time() - began > effort.whole_s
            if late and replicate == 0 and not option.in_force:
                took = f"{effort.whole_s:g} s"
                left_out[name] = f"no time was left: simulating other presets took {took}"
                del simulated[name]
                continue
            try:
                simulation = _simulation(state, devices, option.policy, version)
                trained = _train(simulation, count, effort.preset_s)
            except _NotSimulatedError as error:
                left_out[name] = str(error)
                del simulated[name]
                continue
            except Exception as error:
                # A failing third-party policy must not prevent the forecasts of other policies.
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
    """Return the (name, parameters) of all presets with defaults and of all variants, by label."""
    return {
        label(name, parameters): (name, dict(parameters))
        for name in policies.names()
        for parameters in ({}, *policies.get(name).variants)
    }


def _options(
    state: PlanningState, in_force: Policy, presets: Sequence[str] | None, *, relaxed: bool
) -> tuple[dict[str, SimulatedOption], dict[str, str]]:
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
        except Exception as error:
            # A failing third-party preset must not prevent the forecasts of other presets.
            left_out[called] = f"{type(error).__name__}: {error}"
            continue
        if reason := policies.unsuited(policy, budget):
            left_out[called] = reason
            continue
        if relaxed or not policy.relaxed:
            options[called] = SimulatedOption(name, parameters, policy, variant=bool(parameters))
    # Options that do not change the training come first, and defaults before variants, because the
    # CPU time may not suffice for all.
    order = sorted(
        options.items(),
        key=lambda item: (not item[1].in_force, item[1].policy.relaxed, item[1].variant),
    )
    return dict(order), left_out


def _fall_back(options: dict[str, SimulatedOption], left_out: dict[str, str], why: str) -> None:
    """Leave out relaxed options; if the policy in force is relaxed, simulate it with all-reduce."""
    for name, option in list(options.items()):
        if option.policy.relaxed and option.in_force:
            option.policy = replace(option.policy, synchroniser=ALLREDUCE)
        elif option.policy.relaxed:
            left_out[name] = f"gradients would be all-reduced, because {why}"
            del options[name]


def _without_worse_variants(options: dict[str, SimulatedOption]) -> dict[str, SimulatedOption]:
    def stays(option: SimulatedOption) -> bool:
        alike = [other for other in options.values() if other.preset == option.preset]
        defaults = [other.mean for other in alike if not (other.variant or other.in_force)]
        variants = [other.mean for other in alike if other.variant]
        better = option.mean < (1 - THRESHOLDS.better_variant) * min(defaults, default=np.inf)
        return not option.variant or (better and option.mean == min(variants))

    return {name: option for name, option in options.items() if stays(option)}


def _devices(basis: Basis, replicate: int) -> Resampled:
    assert basis.state.history is not None
    first_step = basis.state.history.step
    return resampled(basis.shape.models(replicate), basis.measured, basis.ratio, first_step)


def _simulation(
    state: PlanningState, devices: Resampled, policy: Policy, version: int
) -> Simulation:
    if policy.threads and version != state.version:
        raise _NotSimulatedError(
            "telemetry does not show the effect of other numbers of CPU threads"
        )
    assert state.history is not None
    simulation = Simulation(state.history.hello, devices, policy, network=devices)
    simulation.history = copy.deepcopy(state.history)
    simulation.window = copy.deepcopy(state.window) or simulation.window
    simulation.version = version
    return simulation


def _train(simulation: Simulation, count: int, longest_s: float) -> list[TrainedSegment]:
    trained = []
    first, end, began = simulation.step, simulation.step + WARMUP_STEPS + count, time.process_time()
    while simulation.step < end:
        if time.process_time() - began > longest_s:
            steps = simulation.step - first
            raise _NotSimulatedError(f"planning takes too long: {longest_s:g} s for {steps} steps")
        trained.append(simulation.advance())
    return trained


class _NotSimulatedError(Exception):
    """Reason why the simulation cannot show a preset's effect."""
