"""Warnings about presets under a run's measured conditions, for forecasts and before a switch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from paceline import policies
from paceline.policies import Models
from paceline.policies.predict.linear import LinearPredictor
from paceline_backend.insight import fitness
from paceline_backend.insight.whatif.answer import (
    FEWEST_FORECAST_STEPS,
    FORECAST_STEPS,
    Forecast,
    PresetForecast,
)
from paceline_backend.insight.whatif.resampled import filled, ratios
from paceline_backend.insight.whatif.state import PlanningState, read
from paceline_backend.insight.whatif.thresholds import THRESHOLDS
from paceline_backend.store import Store, runs

log = logging.getLogger(__name__)

PLAIN = "bsp"


def of_run(store: Store, run: str, policy: str, parameters: Mapping[str, Any]) -> list[str]:
    """Return warnings about the use of a preset in a run, warnings of harm first.

    The function takes less than a second. If the run's conditions are unknown (`conditions_of`), it
    only returns a warning about what the preset changes in the training.

    Raises:
        UnknownPolicyError: no such preset.
        PolicyParameterError: a parameter is unknown, or its value is not legal.
    """
    with store.read() as connection:
        state = read(
            connection, runs.key_of(connection, run), FORECAST_STEPS, THRESHOLDS.caution_cells
        )
    conditions = conditions_of(state)
    if conditions is None:
        world = None if state.history is None else state.history.hello.world
        cautions = fitness.changes(policies.make(policy, parameters, world))
    else:
        cautions = fitness.Fitness(conditions).cautions(policy, parameters)
    return [caution.words for caution in cautions]


def with_cautions(made: Forecast, state: PlanningState, models: Models) -> Forecast:
    """Return a forecast with each preset's warnings.

    A preset is harmful if it takes longer than plain DDP in this forecast. If the forecast does not
    include plain DDP, there are no warnings of harm.
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
    """Return `warned(preset)`; if a third-party preset raises an error, return `preset` itself."""
    try:
        made: PresetForecast = warned(preset)
    except Exception:
        log.warning("cannot compute warnings about %s", preset.policy, exc_info=True)
        return preset
    return made


def conditions_of(state: PlanningState, models: Models | None = None) -> fitness.Conditions | None:
    """Return a run's measured conditions; None: too few steps or records, one rank, or a stream."""
    measured, history = state.measured, state.history
    if (
        history is None
        or measured is None
        or history.hello.world == 1
        or len(measured) < FEWEST_FORECAST_STEPS
    ):
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
