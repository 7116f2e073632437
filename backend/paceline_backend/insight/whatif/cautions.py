"""Warnings of presets under what a run has measured: in forecasts, and before a switch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from paceline_backend import policies
from paceline_backend.insight import fitness
from paceline_backend.insight.whatif.answer import FEWEST, STEPS, Forecast, PresetForecast
from paceline_backend.insight.whatif.resampled import filled, ratios
from paceline_backend.insight.whatif.state import PlanningState, read
from paceline_backend.policies import Models
from paceline_backend.policies.predict.linear import LinearPredictor
from paceline_backend.store import Store, runs

log = logging.getLogger(__name__)

PLAIN = "bsp"
_CELLS = 50_000  # most records (steps × ranks) that are read before a switch


def of_run(store: Store, run: str, policy: str, parameters: Mapping[str, Any]) -> list[str]:
    """Warnings of a preset for a run, those of harm first; takes a part of a second.

    Of a run that has not trained enough yet, it is only said what the preset changes.

    Raises:
        UnknownRunError: no such run.
        UnknownPolicyError: no such preset.
        PolicyParameterError: a parameter is unknown, or its value is not legal.
        StoreError: the database did not answer.
    """
    with store.read() as connection:
        state = read(connection, runs.key_of(connection, run), STEPS, _CELLS)
    conditions = conditions_of(state)
    if conditions is None:
        world = None if state.history is None else state.history.hello.world
        cautions = fitness.changes(policies.make(policy, parameters, world))
    else:
        cautions = fitness.Fitness(conditions).cautions(policy, parameters)
    return [caution.words for caution in cautions]


def with_cautions(made: Forecast, state: PlanningState, models: Models) -> Forecast:
    """A forecast with each preset's warnings; its own figures say whether the preset does harm.

    If plain DDP is not among its presets, nothing is said about harm.
    """
    conditions, plain = conditions_of(state, models), made.of(PLAIN)
    if conditions is None:
        return made
    suits = fitness.Fitness(conditions)

    def warned(preset: PresetForecast) -> PresetForecast:
        ratio = 1.0 if plain is None else preset.step_time_s / plain.step_time_s
        cautions = suits.cautions(preset.policy, preset.parameters, ratio)
        words = [caution.words for caution in cautions]
        harmful = any(caution.harm for caution in cautions)
        return replace(preset, warnings=words, harmful=harmful)

    return replace(made, forecasts=[_tried(warned, each) for each in made.forecasts])


def _tried(warned: Any, preset: PresetForecast) -> PresetForecast:
    """A third party's preset must not end the forecast."""
    try:
        made: PresetForecast = warned(preset)
    except Exception:
        log.warning("no warnings of %s", preset.policy, exc_info=True)
        return preset
    return made


def conditions_of(state: PlanningState, models: Models | None = None) -> fitness.Conditions | None:
    """What a run has measured; None: too few steps, or one rank only.

    Args:
        state: of the run.
        models: fitted to its steps; None: they are fitted here.
    """
    measured, history = state.measured, state.history
    if history is None or measured is None or history.hello.world == 1 or len(measured) < FEWEST:
        return None
    if history.hello.stream:
        return None
    if models is None:
        predictor = LinearPredictor(window=len(measured), cost="auto")
        models = predictor.fit(measured.feedback, history.hello.world)
    if not models.known:
        return None
    ratio = np.log(np.maximum(filled(ratios(models, measured)), 1e-9))
    noise = float(np.median(np.abs(ratio - np.median(ratio, axis=0)))) * 1.4826
    other_s = float(np.median(measured.remainder_s)) + float(np.median(measured.data_s))
    return fitness.Conditions(
        models,
        history.sizes,
        history.hello.global_batch,
        other_s=max(0.0, other_s),
        noise=min(noise, 0.5),
        devices=history.hello.devices,
    )
