"""Simulates a run's next steps under each preset, on devices like those that it measured."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.core.cost import Features
from paceline.wire import ALLREDUCE
from paceline_backend import policies
from paceline_backend.insight.report import WARMUP_STEPS
from paceline_backend.insight.whatif.answer import (
    FEWEST,
    STEPS,
    Current,
    Forecast,
    LeftOut,
    PresetForecast,
    words,
)
from paceline_backend.insight.whatif.measured import Measured, State, read, same_speeds, steady_time
from paceline_backend.insight.whatif.resampled import Resampled, blocks, filled, ratios, resampled
from paceline_backend.policies import Models, Policy
from paceline_backend.policies.base import Floats
from paceline_backend.policies.predict.linear import LinearPredictor
from paceline_backend.simulator import Simulation
from paceline_backend.simulator import sync as synchronisers
from paceline_backend.simulator.sync import Costs, Work
from paceline_backend.store import Store, runs

REPLICATES = 4  # simulations of each preset, with other speeds and errors each, at most
BUDGET_S = 4.0  # of CPU time, after which no further replicate is begun
LONGEST_S = 10.0  # of CPU time for one simulation of a preset: slower ones are left out

_SIMULATED = 100  # steps of each that count
_SAMPLES = 400_000  # or steps of so many samples in all, if those are fewer,
_FEWEST_SIMULATED = 24  # but not fewer than this
_CELLS = 200_000  # ranks' steps that are read at most
_DRAWS = 64  # of steps of a simulation, for the interval


def forecast(
    store: Store,
    run_id: str,
    *,
    presets: Sequence[str] | None = None,
    steps: int = STEPS,
    replicates: int = REPLICATES,
    budget_s: float = BUDGET_S,
) -> Forecast:
    """What each preset would have taken, with 95 % intervals.

    Each rank's model is fitted to the run's newest steps. Simulations go on from where the run
    stands, under each preset, on ranks that take what the models say times a block bootstrap of
    the relative errors, with the measured time for loading, communication and all else. They
    compare seconds per unit of load, as batches of different policies need not be alike, given as
    the time of a mean global batch. How far the models are off on the very batches that were
    measured (`fit_error`) corrects all forecasts, and widens their intervals.

    Args:
        store: the database.
        run_id: the run's public id.
        presets: names; None: all. The policy in force is always there, with its parameters.
        steps: the newest complete ones to rest on, of the latest attempt.
        replicates: at most.
        budget_s: CPU seconds after which no replicate is added.

    Raises:
        UnknownRunError: no such run.
        UnknownPolicyError: no such preset.
        StoreError: the database did not answer.
        ValueError: too few steps are asked for.
    """
    if steps < FEWEST:
        raise ValueError(f"steps: {steps}; give {FEWEST} or more")
    wanted = list(policies.names() if presets is None else presets)
    for name in wanted:
        policies.get(name)
    with store.read() as connection:
        state = read(connection, runs.key_of(connection, run_id), steps, _CELLS)
    return of_state(run_id, state, wanted, replicates=replicates, budget_s=budget_s)


def of_state(
    run_id: str,
    state: State,
    wanted: Sequence[str],
    *,
    replicates: int = REPLICATES,
    budget_s: float = BUDGET_S,
) -> Forecast:
    """`forecast` from where a run stands, wherever that was read."""
    made_at = time.time()
    current = Current(state.policy, state.parameters, state.version)
    basis = _basis(state)
    if isinstance(basis, str):
        return Forecast(run_id, made_at, current, reason=basis)
    try:
        in_force = policies.make(state.policy, state.parameters)
    except ValueError as error:
        why = f"the policy in force cannot be made here: {error}"
        return Forecast(run_id, made_at, current, reason=why)
    simulated, left_out = _simulate(basis, state, in_force, wanted, replicates, budget_s)
    if state.policy not in simulated:
        why = f"the policy in force cannot be simulated: {left_out[state.policy]}"
        return Forecast(run_id, made_at, current, reason=why)
    return _answer(run_id, made_at, state, basis, simulated, left_out)


@dataclass(frozen=True)
class _Basis:
    """What simulations rest on."""

    state: State
    measured: Measured
    models: Models
    ratio: Floats  # [S, W]
    bias: float  # measured over modelled time on the same batches


@dataclass
class _Simulated:
    """A preset's seconds per unit of load: per replicate, and draws of its steps."""

    parameters: Mapping[str, Any]
    relaxed: bool
    draws: list[Floats] = field(default_factory=list)  # of each replicate, [_DRAWS]
    means: list[float] = field(default_factory=list)


def _basis(state: State) -> _Basis | str:
    """What to simulate with, or why that cannot be."""
    measured = state.measured
    if state.history is None or measured is None:
        return "the run has not begun to train"
    if state.history.hello.world == 1:
        return "there is one rank only: nobody waits for it, and there is nothing to balance"
    if len(measured) < FEWEST:
        return f"too few steps: {len(measured)} are complete, {FEWEST} are needed"
    world = state.history.hello.world
    predictor = LinearPredictor(window=len(measured), cost="auto")
    models = predictor.fit(measured.feedback, world)
    if not models.known and state.window is not None:  # older steps may tell of idle ranks
        models = predictor.fit(state.window.feedback(), world)
    if not models.known:
        idle = np.flatnonzero((measured.features.samples == 0).all(axis=0)).tolist()
        return f"the speed of ranks {idle} is unknown: they had no samples in the last steps"
    ratio = ratios(models, measured)
    first = same_speeds(ratio)
    measured, ratio = measured.since(first), filled(ratio[first:])
    if len(measured) < FEWEST:
        return f"too few steps since a rank's speed changed: {len(measured)}, {FEWEST} are needed"
    bias = _bias(models, measured, ratio, state.history.hello.seed)
    return _Basis(state, measured, models, ratio, bias)


def _bias(models: Models, measured: Measured, ratio: Floats, seed: int) -> float:
    """Measured over modelled time of the batches that ran, errors exchanged among near steps.

    So errors that belong to a kind of batch, which a simulation would spread over all, show; and
    slowdowns that a policy has adapted to stay where they were.
    """
    rng = np.random.default_rng(len(measured))
    count = len(measured)
    # A cell of ranks that go their own ways is an event.
    draws = max(4, min(_DRAWS, (400_000 if measured.apart else 4_000_000) // ratio.size))
    near = np.arange(count) + rng.integers(-4, 5, (draws, count))
    rows = np.clip(near, 0, count - 1)
    ready = measured.data_s[rows] + models.ett(measured.features) * ratio[rows]
    modelled = (ready.max(axis=2) + measured.remainder_s[rows])[:, measured.together].sum(axis=1)
    if measured.apart:
        modelled += [_apart_s(measured, ready_s + measured.rest_s, seed) for ready_s in ready]
    return float(measured.evened_s.sum() / modelled.mean())


def _apart_s(measured: Measured, work_s: Floats, seed: int) -> float:
    """What the steps take in which ranks go their own ways, by the models of synchronisers."""
    world, total_s = work_s.shape[1], 0.0
    what, now = ALLREDUCE, np.zeros(world)
    model = synchronisers.make(what, world, seed)
    for span in measured.apart:
        if not model.goes_on or span.what != what:
            what, now = span.what, np.zeros(world)
            model = synchronisers.make(what, world, seed + span.seq)
        part = slice(span.first, span.end)
        work = Work(
            first_step=int(measured.step[span.first]),
            work_s=work_s[part],
            samples=measured.features.samples[part],
            all_reduce_s=np.zeros_like(work_s[part]),
            costs=Costs(measured.round_s),
            epoch_end=span.over,
        )
        goes_on, before = model.goes_on, now
        timeline = model.run(now, work)
        step_s = work.work_s + timeline.wait_s + timeline.communication_s
        now = now + step_s.sum(axis=0)
        if goes_on:
            total_s += float(now.max() - before.max())
            continue
        if not span.whole:  # its end, where all meet, is not among them
            step_s[-1] -= timeline.wait_s[-1]
        total_s += float(step_s.mean(axis=1).sum())
    return total_s


def _simulate(
    basis: _Basis,
    state: State,
    in_force: Policy,
    wanted: Sequence[str],
    replicates: int,
    budget_s: float,
) -> tuple[dict[str, _Simulated], dict[str, str]]:
    """Each preset's simulations, the policy in force first; and why some are left out."""
    simulated = {state.policy: _Simulated(state.parameters, in_force.relaxed)}
    made = {state.policy: in_force}
    left_out: dict[str, str] = {}
    assert state.history is not None
    for name in wanted:
        if name != state.policy:
            try:
                made[name] = policies.make(name, {})
            except Exception as error:  # likewise
                left_out[name] = f"{type(error).__name__}: {error}"
            else:
                simulated[name] = _Simulated({}, made[name].relaxed)
    count = _SAMPLES // state.history.hello.global_batch
    count = max(_FEWEST_SIMULATED, min(_SIMULATED, count))
    spent_s = 0.0  # on what is not left out
    for replicate in range(replicates):
        devices = resampled(
            basis.models,
            basis.measured,
            basis.ratio,
            WARMUP_STEPS + count,
            state.history.step,
            replicate,
        )
        for name in list(simulated):
            version = state.version + (name != state.policy)
            began = time.process_time()
            try:
                _once(simulated[name], state, devices, made[name], version, count, replicate)
                spent_s += time.process_time() - began
            except _NotSimulatedError as error:
                left_out[name] = str(error)
                del simulated[name]
            except Exception as error:  # of a policy from elsewhere: it costs its own forecast only
                left_out[name] = f"{type(error).__name__}: {error}"
                del simulated[name]
        if spent_s > budget_s * (replicate + 1) / (replicate + 2):
            break
    return simulated, left_out


def _once(
    into: _Simulated,
    state: State,
    devices: Resampled,
    policy: Policy,
    version: int,
    count: int,
    replicate: int,
) -> None:
    """One simulation of a preset; its warm-up does not count.

    Raises:
        _NotSimulatedError: it does what no simulation shows.
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
    ran = []
    first, end, began = simulation.step, simulation.step + WARMUP_STEPS + count, time.process_time()
    while simulation.step < end:
        if time.process_time() - began > LONGEST_S:
            steps = simulation.step - first
            raise _NotSimulatedError(f"planning takes too long: {LONGEST_S:g} s for {steps} steps")
        ran.append(simulation.advance())
    counted = slice(WARMUP_STEPS, WARMUP_STEPS + count)
    step_s = np.concatenate([segment.evened_s for segment in ran])[counted]
    load = np.concatenate([segment.features.load.sum(axis=1) for segment in ran])[counted]
    drawn = blocks(np.random.default_rng([1, replicate]), count, count, _DRAWS)
    into.draws.append(step_s[drawn].sum(axis=1) / load[drawn].sum(axis=1))
    into.means.append(float(step_s.sum() / load.sum()))


class _NotSimulatedError(Exception):
    """A preset does what no simulation shows."""


def _answer(
    run_id: str,
    made_at: float,
    state: State,
    basis: _Basis,
    simulated: Mapping[str, _Simulated],
    left_out: Mapping[str, str],
) -> Forecast:
    assert state.history is not None
    hello, sizes = state.history.hello, state.history.sizes
    full, rest = divmod(len(sizes), hello.global_batch)
    load = float(sizes.sum()) / (full + (rest > 0))  # of a mean step
    if hello.drop_last:
        load = float(sizes.mean()) * hello.global_batch
    base = simulated[state.policy]
    fit_error = abs(1 / basis.bias - 1)
    forecasts = [
        _preset(name, preset, base, load * basis.bias, fit_error, in_force=preset is base)
        for name, preset in simulated.items()
    ]
    assert state.measured is not None
    assert state.steady is not None
    steady, count = steady_time(state.measured, state.steady)
    return Forecast(
        run=run_id,
        made_at=made_at,
        current=Current(
            state.policy,
            state.parameters,
            state.version,
            step_time_s=float(np.mean(base.means)) * load * basis.bias,
            measured_s=None if steady is None else steady * load,
            measured_steps=count,
        ),
        step=int(basis.measured.step[-1]),
        first_step=int(basis.measured.step[0]),
        steps=len(basis.measured),
        fit_error=fit_error,
        forecasts=sorted(forecasts, key=lambda preset: -preset.saving),
        left_out=[LeftOut(name, why) for name, why in left_out.items()],
        speeds=_speeds(basis, load / hello.world, hello.global_batch / hello.world),
        replicates=len(base.means),
    )


def _preset(
    name: str,
    preset: _Simulated,
    base: _Simulated,
    scale: float,
    fit_error: float,
    *,
    in_force: bool,
) -> PresetForecast:
    """Draws of both fall on the same steps, with the same errors of the same ranks."""
    mean, of_base = float(np.mean(preset.means)), float(np.mean(base.means))
    low, high = _interval(np.concatenate(preset.draws) * scale, mean * scale, fit_error)
    relative = mean / of_base
    drawn = np.concatenate(preset.draws) / np.concatenate(base.draws)
    least, most = (relative, relative) if in_force else _interval(drawn, relative, fit_error)
    saving, saving_low, saving_high = 1 - relative, 1 - most, 1 - least
    sentence = f"{name} is in force"
    if not in_force:
        sentence = words(name, saving, saving_low, saving_high, relaxed=preset.relaxed)
    return PresetForecast(
        name,
        dict(preset.parameters),
        mean * scale,
        low,
        high,
        saving,
        saving_low,
        saving_high,
        sentence,
        preset.relaxed,
    )


def _interval(draws: Floats, mean: float, fit_error: float) -> tuple[float, float]:
    """95 % of the draws, as far from the mean as they are, and the models' own error."""
    low, high = np.quantile(draws, (0.025, 0.975)) - np.mean(draws)
    own = fit_error * mean
    return mean - float(np.hypot(low, own)), mean + float(np.hypot(high, own))


def _speeds(basis: _Basis, load: float, samples: float) -> list[float]:
    """Of each rank s per size unit, for an equal share of a mean batch."""
    of = basis.measured.features
    world = len(basis.models.a)
    like = float(of.squares.sum() / max(of.load.sum(), 1e-300))
    share = Features(
        np.full(world, samples),
        np.full(world, load),
        np.full(world, load * like),
        np.full(world, float(np.median(of.longest[of.samples > 0]))),
    )
    speeds = basis.models.ett(share) * np.median(basis.ratio, axis=0) / load
    return [float(speed) for speed in speeds]
