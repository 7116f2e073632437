"""Regressors by `fit` and `predict`: exact where times are linear, robust, chosen by the run."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import policies
from paceline.core.cost import Features
from paceline.policies import Feedback, Models
from paceline.policies.predict.estimators import (
    REGRESSORS,
    EstimatorPredictor,
    predictor_of,
)
from paceline.policies.predict.linear import LinearPredictor
from support.simulated import rows_of

Floats = npt.NDArray[np.float64]
LINEAR = ["linear", "huber", "quantile"]


def feedback(rows: Floats, a: Floats, c: Floats, b: Floats, factor: Any = 1.0) -> Feedback:
    """Of ranks with these costs.

    Args:
        rows: load and samples of each step and rank, [S, W, 2].
        factor: of the times, [S, W].
    """
    load, samples = rows[..., 0], rows[..., 1]
    compute_s = (a * load + c * samples + b) * factor
    return rows_of(Features(samples.astype(np.int64), load, load * 9, load / 3), compute_s)


def steps_of(count: int, world: int, seed: int = 0) -> Floats:
    rng = np.random.default_rng(seed)
    samples = rng.integers(4, 40, (count, world))
    return np.stack([samples * rng.uniform(20, 60, (count, world)), samples], axis=2)


@pytest.mark.parametrize("name", LINEAR)
@given(seed=st.integers(0, 200), world=st.integers(1, 3))
def test_linear_regressors_find_the_costs_of_each_rank(name: str, seed: int, world: int) -> None:
    rng = np.random.default_rng(seed)
    a, c, b = rng.uniform(1e-4, 1e-2, world), rng.uniform(0, 0.02, world), rng.uniform(0, 1, world)
    made = EstimatorPredictor({name: REGRESSORS[name]}).fit(
        feedback(steps_of(40, world, seed), a, c, b), world
    )
    np.testing.assert_allclose(made.a, a, rtol=1e-3)
    np.testing.assert_allclose(made.c, c, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(made.b, b, rtol=1e-3, atol=1e-3)


def off(made: Models, a: float) -> float:
    """How far the time of a usual batch is off."""
    usual = made.a[0] * 800 + made.c[0] * 20 + made.b[0]
    return abs(float(usual) / (800 * a + 0.1) - 1)


def test_robust_regressors_bear_wild_steps() -> None:
    """One step in eight takes ten times as long."""
    factor = np.where(np.arange(64) % 8 == 3, 10.0, 1.0)[:, None]
    factor = factor * (1 + 0.02 * np.random.default_rng(2).standard_normal((64, 1)))
    given_rows = feedback(steps_of(64, 1), np.array([1e-3]), np.zeros(1), np.array([0.1]), factor)
    errors = {
        name: off(EstimatorPredictor({name: REGRESSORS[name]}).fit(given_rows, 1), 1e-3)
        for name in REGRESSORS
    }
    assert errors["linear"] > 0.5
    assert errors["huber"] < 0.1
    assert errors["quantile"] < 0.1


@pytest.mark.parametrize("name", REGRESSORS)
@given(data=st.data())
def test_models_are_usable_whatever_ranks_report(name: str, data: st.DataObject) -> None:
    world, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 30))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    rows = steps_of(steps, world, seed=1)
    if data.draw(st.booleans()):
        rows[..., 1] = 8  # as under `bsp`
    if data.draw(st.booleans()):
        rows[..., 0] = 320.0  # nothing to fit
    rows[rng.random((steps, world)) < 0.2] = 0.0
    factor = rng.lognormal(0, data.draw(st.sampled_from([0.0, 0.1, 2.0])), (steps, world))
    given_rows = feedback(rows, np.full(world, 1e-3), np.zeros(world), np.zeros(world), factor)
    made = EstimatorPredictor({name: REGRESSORS[name]}, window=16).fit(given_rows, world)
    if made.known:
        assert (made.a > 0).all()
        assert (np.array([made.c, made.b]) >= 0).all()
        assert np.isfinite([made.a, made.c, made.b]).all()
    else:
        assert (rows[..., 1] == 0).all(axis=0).any()


def noting(asked: list[str], name: str) -> Any:
    asked.append(name)
    return REGRESSORS[name]()


def test_the_runs_own_record_chooses() -> None:
    """Times that rise with the square of the load: only `isotonic` follows them."""
    rows = steps_of(64, 2)
    curved = feedback(rows, np.ones(2), np.zeros(2), np.zeros(2), rows[..., 0])
    plain = feedback(rows, np.ones(2), np.zeros(2), np.zeros(2))
    for given_rows, expected in ((curved, "isotonic"), (plain, "linear")):
        asked: list[str] = []
        seen = {name: partial(noting, asked, name) for name in REGRESSORS}
        EstimatorPredictor(seen).fit(given_rows, 2)
        assert asked[-2:] == [expected, expected]  # the last fits are those of the two ranks


def test_forecasts_are_scored_on_later_steps_only() -> None:
    """A regressor that knows all it has seen by heart is no better than chance on what follows."""

    class ByHeart:
        def fit(self, inputs: Floats, times: Floats) -> None:
            self.known = dict(zip(map(tuple, inputs), times, strict=True))

        def predict(self, inputs: Floats) -> Floats:
            return np.array([self.known.get(tuple(x), 1.0) for x in inputs])

    rows = feedback(steps_of(64, 1), np.ones(1), np.zeros(1), np.zeros(1))
    first, second = REGRESSORS["linear"], ByHeart
    asked = EstimatorPredictor({"heart": second, "linear": first}).fit(rows, 1)
    np.testing.assert_allclose(asked.a, 1.0, rtol=1e-6)


def test_a_regressor_that_fails_is_passed_over() -> None:
    class Refuses:
        def fit(self, inputs: Floats, times: Floats) -> None:
            raise ValueError("not these")

        def predict(self, inputs: Floats) -> Floats:
            raise AssertionError

    rows = feedback(steps_of(64, 1), np.full(1, 2.0), np.zeros(1), np.full(1, 50.0))
    alone = EstimatorPredictor({"refuses": Refuses}).fit(rows, 1)
    np.testing.assert_allclose(alone.a, rows.compute_s.mean() / rows.load.mean())
    both = EstimatorPredictor({"refuses": Refuses, "linear": REGRESSORS["linear"]}).fit(rows, 1)
    np.testing.assert_allclose(both.a, 2.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e308])
def test_a_plane_needs_forecasts_that_are_numbers(value: float) -> None:
    class Wild:
        def fit(self, inputs: Floats, times: Floats) -> None:
            pass

        def predict(self, inputs: Floats) -> Floats:
            return np.where(np.arange(len(inputs)) % 2, value, -value)

    rows = feedback(steps_of(64, 1), np.full(1, 2.0), np.zeros(1), np.full(1, 50.0))
    made = EstimatorPredictor({"wild": Wild}).fit(rows, 1)
    np.testing.assert_allclose(made.a, rows.compute_s.mean() / rows.load.mean())


def test_presets_take_a_regressor() -> None:
    assert policies.make("chronica").predictor == LinearPredictor(64)
    assert policies.make("lbb").predictor == LinearPredictor(64, "auto")
    for name in ("chronica", "lbb"):
        made = policies.make(name, {"regressor": "huber", "window": 16}).predictor
        assert made == predictor_of("huber", 16)
        chosen = policies.make(name, {"regressor": "cross-validated"}).predictor
        assert chosen == EstimatorPredictor()
