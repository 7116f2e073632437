"""Tests of the example predictor. Run them with pytest where Paceline is installed."""

from __future__ import annotations

import numpy as np
from paceline_median_rate import MedianRate, preset

from paceline.policies import Feedback
from paceline.policies.predict.estimators import REGRESSORS, EstimatorPredictor
from paceline_backend.testing import check_policy


def test_contract() -> None:
    check_policy(preset)


def feedback() -> Feedback:
    """Of one rank that takes 1 ms per unit of load, and in a third of its steps 8 times as long."""
    load = np.random.default_rng(1).uniform(50, 150, 60)
    factor = np.where(np.arange(60) % 3 == 0, 8.0, 1.0)
    samples = np.full(60, 4)
    return Feedback(
        np.arange(60), np.zeros(60, int), samples, load, 1e-3 * load * factor, load, load
    )


def test_wild_steps_do_not_count() -> None:
    models = EstimatorPredictor({"median rate": MedianRate}).fit(feedback(), world=1)
    assert np.isclose(models.a[0], 1e-3)


def test_the_runs_own_steps_choose_between_it_and_others() -> None:
    candidates = {"linear": REGRESSORS["linear"], "median rate": MedianRate}
    models = EstimatorPredictor(candidates).fit(feedback(), world=1)
    assert np.isclose(models.a[0], 1e-3)
