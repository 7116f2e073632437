"""Forecast of the step time under each preset, from simulations on the measured devices.

If a verdict names a slow node, the step time under the policy in force is also forecast as if this
node were as fast as the others: the same simulation runs again, with the modelled times of the
node's slow ranks divided by their slowdown factor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from paceline import policies
from paceline.core.cost import Features
from paceline.policies import Models, Policy
from paceline.policies.base import Floats
from paceline.policies.predict.linear import LinearPredictor
from paceline.wire import ALLREDUCE, Hello
from paceline.wire.synchronisation import Averaging
from paceline_backend.insight.verdict import ObservedSteps, SlowNode, judge, slow_node
from paceline_backend.insight.whatif.answer import (
    FEWEST_FORECAST_STEPS,
    FORECAST_STEPS,
    Forecast,
    LeftOut,
    NodeForecast,
    PolicyInForce,
    PresetForecast,
    label,
    words,
)
from paceline_backend.insight.whatif.cautions import with_cautions
from paceline_backend.insight.whatif.measured import MeasuredSteps, steady_time
from paceline_backend.insight.whatif.resampled import filled, ratios
from paceline_backend.insight.whatif.shapes import shape
from paceline_backend.insight.whatif.simulate import (
    Basis,
    Effort,
    SimulatedOption,
    presets_and_variants,
    simulate,
)
from paceline_backend.insight.whatif.state import ASSUMES, PlanningState, read
from paceline_backend.insight.whatif.thresholds import THRESHOLDS
from paceline_backend.simulator import sync as sync_models
from paceline_backend.simulator.sync import Work, without_empty
from paceline_backend.store import Store, runs

# σ of a normal distribution ÷ its median absolute deviation.
_SIGMA = 1.4826

DEFAULT_EFFORT = Effort()


def forecast(
    store: Store,
    run_id: str,
    *,
    presets: Sequence[str] | None = None,
    relaxed: bool = True,
    steps: int = FORECAST_STEPS,
    effort: Effort = DEFAULT_EFFORT,
) -> Forecast:
    """Forecast the step time under each preset, with 95 % intervals.

    Each rank's model is fitted to the newest steps in which all ranks have had their present speeds
    (`same_speeds`). Simulations continue from the run's current state, once under each preset. A
    simulated step takes the modelled time multiplied by the relative error of a measured step, plus
    the measured time for loading, communication and everything else. Presets are compared by
    seconds per unit of load, because their batches differ. The result is the time of a mean global
    batch. The models' error on the measured batches (`fit_error`) corrects all forecasts and widens
    their intervals.

    Each of `presets` is the label of a preset with parameters, or only a preset's name, which means
    the preset with its defaults. None means all presets, with their variants. The policy in force
    is always included, with its parameters. Presets that change the training are included if
    `relaxed` is true. The forecast uses the newest `steps` complete steps of the latest attempt.

    Raises:
        UnknownPolicyError: a preset does not exist.
        ValueError: `steps` is below `FEWEST_FORECAST_STEPS`, or a label is not the label of one of
            the preset's variants.
    """
    if steps < FEWEST_FORECAST_STEPS:
        raise ValueError(f"steps: {steps}; give {FEWEST_FORECAST_STEPS} or more")
    with store.read() as connection:
        state = read(connection, runs.key_of(connection, run_id), steps, THRESHOLDS.most_cells)
    _refuse_unknown(presets or [], label(state.policy, state.parameters))
    return of_state(run_id, state, presets, relaxed=relaxed, effort=effort)


def _refuse_unknown(presets: Sequence[str], in_force: str) -> None:
    known = presets_and_variants()
    for option in presets:
        if option != in_force and option not in known:
            name = policies.get(option.partition(" (")[0]).name
            legal = ", ".join(called for called, (of, _) in known.items() if of == name)
            raise ValueError(f"presets: {option!r} is not a variant of {name}; known: {legal}")


def of_state(
    run_id: str,
    state: PlanningState,
    presets: Sequence[str] | None = None,
    *,
    relaxed: bool = True,
    effort: Effort = DEFAULT_EFFORT,
) -> Forecast:
    """Return the forecast for a run's state; see `forecast`."""
    made_at = time.time()
    current = PolicyInForce(state.policy, state.parameters, state.version, None, None, 0)
    basis = _basis(state)
    if isinstance(basis, str):
        return Forecast(run_id, made_at, current, reason=basis)
    try:
        in_force = policies.make(state.policy, state.parameters)
    except ValueError as error:
        why = f"the policy in force cannot be created here: {error}"
        return Forecast(run_id, made_at, current, reason=why)
    simulated, left_out = simulate(basis, in_force, presets, effort, relaxed=relaxed)
    name = label(state.policy, state.parameters)
    if name not in simulated:
        why = f"the policy in force cannot be simulated: {left_out[name]}"
        return Forecast(run_id, made_at, current, reason=why)
    made = _answer(run_id, made_at, state, basis, simulated, left_out)
    made = with_cautions(made, state, basis.models)
    return replace(
        made,
        slow_node=_of_slow_node(made, basis, in_force, simulated),
        all_presets=presets is None and relaxed,
        assumes=ASSUMES if state.observed else "",
    )


def _of_slow_node(
    made: Forecast, basis: Basis, in_force: Policy, simulated: Mapping[str, SimulatedOption]
) -> NodeForecast | None:
    name = label(basis.state.policy, basis.state.parameters)
    base = simulated[name]
    slow = _lastingly_slow(basis)
    if slow is None or made.fit_error is None or made.current.step_time_s is None:
        return None
    faster = _as_fast_as_the_others(basis, slow)
    effort = Effort(replicates=1 + len(base.shifts), budget_s=math.inf)
    again, _ = simulate(faster, in_force, [], effort)
    if name not in again:
        return None
    scale = made.current.step_time_s / base.mean
    again[name].in_force = False
    preset = _preset(slow.node, again[name], base, scale, made.fit_error)
    measured = basis.measured
    reduced = measured.together
    step_s = float(measured.step_s[reduced].sum())
    not_computing = float(measured.remainder_s[reduced].sum()) / step_s if step_s else 0.0
    return _answer_of_node(slow, preset, not_computing)


def _basis(state: PlanningState) -> Basis | str:
    """Return the inputs of the simulations, or the reason why there can be no forecast."""
    measured = state.measured
    if state.history is None or measured is None:
        return "the run has not begun to train"
    if state.history.hello.stream:
        return "the data is a stream: its next samples are unknown, so no forecast is possible"
    if state.history.hello.world == 1:
        return "the run has only one rank: no rank waits for it, and there is nothing to balance"
    warm = int(np.searchsorted(measured.step, state.history.hello.step + THRESHOLDS.cold_steps))
    if len(measured) >= FEWEST_FORECAST_STEPS + warm:
        measured = measured.since(warm)
    if len(measured) < FEWEST_FORECAST_STEPS:
        return f"too few steps: {len(measured)} are complete, {FEWEST_FORECAST_STEPS} are needed"
    world = state.history.hello.world
    predictor = LinearPredictor(window=len(measured), cost="auto")
    models = predictor.fit(measured.feedback, world)
    # Ranks that were idle in the newest steps may have records in older steps.
    if not models.known and state.window is not None:
        models = predictor.fit(state.window.feedback(), world)
    if not models.known:
        idle = np.flatnonzero((measured.features.samples == 0).all(axis=0)).tolist()
        return f"the speed of ranks {idle} is unknown: they had no samples in the last steps"
    ratio = ratios(models, measured)
    first = same_speeds(ratio)
    measured = measured.since(first)
    if len(measured) < FEWEST_FORECAST_STEPS:
        return (
            f"too few steps since a rank's speed changed: {len(measured)}, "
            f"{FEWEST_FORECAST_STEPS} are needed"
        )
    fitted = shape(models, measured)
    models = fitted.models()
    ratio = filled(ratios(models, measured))
    bias = _bias(models, measured, ratio, state.history.hello.seed)
    return Basis(state, measured, fitted, ratio, bias)


def _bias(models: Models, measured: MeasuredSteps, ratio: Floats, seed: int) -> float:
    """Return measured ÷ modelled time of the batches that ran.

    The modelled time of a step is multiplied by the measured error of a step at most four steps
    away. Errors that occur only with certain batches, such as the batches of a policy that reacted
    to a slowdown, therefore stay near these batches.
    """
    rng = np.random.default_rng(len(measured))
    count = len(measured)
    # Relaxed steps are simulated event by event, which is slower, so there are fewer draws.
    most = (400_000 if measured.relaxed_spans else 4_000_000) // ratio.size
    draws = max(4, min(THRESHOLDS.draws, most))
    near = np.arange(count) + rng.integers(-4, 5, (draws, count))
    rows = np.clip(near, 0, count - 1)
    compute_s = models.ett(measured.features) * ratio[rows]
    # The models predict the time of a single batch. Use the measured time of records that cover
    # several batches.
    if measured.several is not None:
        compute_s = np.where(measured.several, measured.compute_s, compute_s)
    data_s = np.where(measured.single, measured.data_s[rows], measured.data_s)
    ready = data_s + compute_s
    modelled = (ready.max(axis=2) + measured.remainder_s[rows])[:, measured.together].sum(axis=1)
    if measured.relaxed_spans:
        modelled += [
            _relaxed_s(measured, data_and_compute_s + measured.single * measured.rest_s, seed)
            for data_and_compute_s in ready
        ]
    return float(measured.evened_s.sum() / modelled.mean())


def _relaxed_s(measured: MeasuredSteps, work_s: Floats, seed: int) -> float:
    """Return the modelled time of all relaxed steps, simulated with the models in `simulator.sync`.

    Each simulated rank trains the batches that the rank trained in the run; `work_s` is its time
    for each step, [S, W]. If ranks took over batches from each other, a rank's last record of a
    segment may cover several batches; it is simulated as one step.
    """
    world, total_s = work_s.shape[1], 0.0
    what, now = ALLREDUCE, np.zeros(world)
    model = sync_models.make(what, world, seed)
    for span in measured.relaxed_spans:
        if not model.goes_on or span.synchroniser != what:
            what, now = span.synchroniser, np.zeros(world)
            model = sync_models.make(what, world, seed + span.seq)
        part = slice(span.first, span.end)
        work = Work(
            first_step=int(measured.step[span.first]),
            work_s=work_s[part],
            samples=measured.features.samples[part],
            all_reduce_s=np.zeros_like(work_s[part]),
            costs=measured.costs(),
            epoch_end=span.ends_epoch,
        )
        if span.pooled and not isinstance(span.synchroniser, Averaging):
            # In the run, ranks that share batches skipped the steps for which they had no batch.
            work = without_empty(work)
        goes_on, before = model.goes_on, now
        timeline = model.run(now, work)
        own_s = np.where(work.made, work.work_s, 0.0)
        step_s = own_s + timeline.wait_s + timeline.communication_s
        now = now + step_s.sum(axis=0)
        if goes_on:
            # Ranks that share batches end their segments at about the same time.
            mid = np.mean if span.pooled else np.max
            total_s += float(mid(now) - mid(before))
            continue
        # All ranks synchronise at the segment's end. If that end was not measured, leave out the
        # wait for it.
        if not span.whole:
            step_s[-1] -= timeline.wait_s[-1]
        total_s += float(step_s.mean(axis=1).sum())
    return total_s


def _answer(
    run_id: str,
    made_at: float,
    state: PlanningState,
    basis: Basis,
    simulated: Mapping[str, SimulatedOption],
    left_out: Mapping[str, str],
) -> Forecast:
    assert state.history is not None
    hello, sizes = state.history.hello, state.history.sizes
    load = mean_load(hello, sizes)
    base = simulated[label(state.policy, state.parameters)]
    fit_error = abs(1 / basis.bias - 1)
    forecasts = [
        _preset(name, option, base, load * basis.bias, fit_error)
        for name, option in simulated.items()
    ]
    assert state.measured is not None
    assert state.steady is not None
    steady, count = steady_time(state.measured, state.steady)
    return Forecast(
        run=run_id,
        made_at=made_at,
        current=PolicyInForce(
            state.policy,
            state.parameters,
            state.version,
            step_time_s=base.mean * load * basis.bias,
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
        replicates=1 + len(base.shifts),
    )


def mean_load(hello: Hello, sizes: Floats) -> float:
    """Return the load of a mean step, in the unit of the sizes."""
    if hello.token_budget is not None and hello.steps_per_epoch:
        # With a token budget, `global_batch` is only a rounded mean.
        return float(sizes.sum()) / hello.steps_per_epoch
    if hello.drop_last:
        return float(sizes.mean()) * hello.global_batch
    return float(sizes.sum()) / -(-len(sizes) // hello.global_batch)


def _preset(
    name: str, of: SimulatedOption, base: SimulatedOption, scale: float, fit_error: float
) -> PresetForecast:
    """Return the forecast of an option (`of`) in comparison with the policy in force (`base`).

    The bootstrap draws of `of` and `base` use the same steps and errors, so the ratio of their
    times has little noise. `scale` converts seconds per unit of load to seconds per step.
    """
    shifts = np.array(of.shifts)
    low, high = _interval(of.mean * scale, of.draws * scale, shifts, fit_error)
    relative = of.mean / base.mean
    least, most = relative, relative
    if not of.in_force:
        least, most = _interval(relative, of.draws / base.draws, shifts - base.shifts, fit_error)
    saving, saving_low, saving_high = 1 - relative, 1 - most, 1 - least
    sentence = f"{name} is in force"
    if not of.in_force:
        sentence = words(name, saving, saving_low, saving_high, changes=of.changes)
    return PresetForecast(
        of.preset,
        dict(of.parameters),
        of.mean * scale,
        low,
        high,
        saving,
        saving_low,
        saving_high,
        sentence,
        of.changes == "training",
        of.changes,
        name,
        of.in_force,
        warnings=[],
        harmful=False,
        alone=of.alone,
        stale=of.stale,
    )


def _interval(mean: float, draws: Floats, shifts: Floats, fit_error: float) -> tuple[float, float]:
    """Return the 95 % interval around `mean`.

    `draws` are bootstrap draws of the mean. `shifts` has log(m' ÷ m) for each simulation with other
    models than the fitted ones: m' is the mean in this simulation, and m the mean with the fitted
    models, over the same number of steps. `fit_error` is the relative error of the models.
    """
    sampled = float(np.std(draws)) / mean
    modelled = float(np.sqrt(np.mean(shifts**2))) if len(shifts) else 0.0
    weights = np.array(THRESHOLDS.interval_weights)
    half = 1.96 * float(np.linalg.norm(weights * [sampled, modelled, fit_error, 1.0]))
    return mean * (1 - half), mean * (1 + half)


def _speeds(basis: Basis, load: float, samples: float) -> list[float]:
    """Return each rank's seconds per size unit if a mean global batch is divided equally.

    `load` and `samples` are the load and the number of samples of an equal part of this batch.
    """
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


def same_speeds(ratio: Floats) -> int:
    """Return the index of the first row (step) since which all ranks have had their present speeds.

    It is the first row of the earliest block of steps in which each rank was as fast as now. Later
    temporary slowdowns do not change the result. `ratio` is measured ÷ modelled compute time, with
    models of the present speeds, [S, W]; NaN where a rank had no samples.
    """
    block = THRESHOLDS.block_steps
    first = len(ratio) % block
    blocks = np.log(np.maximum(ratio[first:], 1e-9)).reshape(-1, block, ratio.shape[1])
    known = np.asarray(~np.isnan(blocks).all(axis=1), bool)  # [blocks, W]
    median = np.nanmedian(np.where(known[:, None], blocks, 0.0), axis=1)
    alike = np.flatnonzero((np.abs(median) <= _by_chance(blocks, median, known)).all(axis=1))
    if not len(alike):
        return max(0, len(ratio) - block)
    return 0 if alike[0] == 0 else first + block * int(alike[0])


def _by_chance(blocks: Floats, median: Floats, known: npt.NDArray[np.bool_]) -> Floats:
    """Return the deviation of a block's median up to which the speed counts as unchanged, [W].

    Each rank's spread is measured within blocks, where a lasting change of speed does not widen it.
    """
    within = np.abs(np.where(known[:, None], blocks - median[:, None], np.nan))
    sigma = np.zeros(blocks.shape[2])
    ever = known.any(axis=0)
    sigma[ever] = _SIGMA * np.nanmedian(within[:, :, ever], axis=(0, 1))
    z = NormalDist().inv_cdf(1 - THRESHOLDS.by_chance / 2 / median.size)
    # The factor 1.25 is the ratio of the standard deviations of a median and a mean.
    chance = z * 1.25 * sigma / np.sqrt(THRESHOLDS.block_steps)
    return np.asarray(np.maximum(np.log(1 + THRESHOLDS.changed_speed), chance))


def _lastingly_slow(basis: Basis) -> SlowNode | None:
    assert basis.state.history is not None
    measured = basis.measured
    apart = np.zeros(len(measured.step), bool)
    for span in measured.relaxed_spans:
        apart[span.first : span.end] = True
    seen = ObservedSteps(
        step=measured.step,
        samples=measured.features.samples.astype(float),
        load=measured.features.load,
        squares=measured.features.squares,
        longest=measured.features.longest,
        data_s=measured.data_s,
        compute_s=measured.compute_s,
        sync_s=measured.sync_s,
        between_s=np.zeros(len(measured.step)),
        first=np.zeros(len(measured.step), bool),
        apart=apart,
        nodes=basis.state.history.hello.placement,
    )
    slow = slow_node(judge(seen))
    if slow is None or slow.cause != "node" or slow.factor is None or slow.factor <= 1:
        return None
    return slow


def _as_fast_as_the_others(basis: Basis, slow: SlowNode) -> Basis:
    """Return the inputs of a simulation in which the ranks of a slow node are not slow.

    The policy starts without feedback, because the feedback was measured with the slow node.
    """
    assert slow.factor is not None
    faster = np.ones(basis.models.world)
    faster[slow.ranks] = slow.factor
    fitted = replace(basis.shape, faster=faster)
    return replace(basis, shape=fitted, state=replace(basis.state, window=None))


def _answer_of_node(slow: SlowNode, preset: PresetForecast, not_computing: float) -> NodeForecast:
    """Convert a forecast without the node's slowness to a `NodeForecast`.

    The forecast assumes that the all-reduce takes as long as before. Telemetry does not show
    whether the node also slows the all-reduce down. The sentence mentions this possibility if
    `not_computing` is large: the fraction of a step's time in which no rank loads or computes.
    """
    assert slow.factor is not None
    half = max(1, round(50 * (preset.saving_high - preset.saving_low)))
    sentence = (
        f"if {slow.node} were as fast as the others, steps would take "
        f"{100 * preset.saving:.0f} % ± {half} less time"
    )
    if not_computing > THRESHOLDS.mentioned_share:
        sentence += (
            f", and even less if it also slows the all-reduce down: {100 * not_computing:.0f} % of "
            "a step is neither data loading nor computing"
        )
    return NodeForecast(
        preset.step_time_s,
        preset.low_s,
        preset.high_s,
        preset.saving,
        preset.saving_low,
        preset.saving_high,
        sentence,
        slow.node,
        slow.ranks,
        slow.factor,
    )
