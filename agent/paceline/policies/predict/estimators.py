"""Predictors from regressors of scikit-learn, or from any object with `fit` and `predict`.

    predictor = EstimatorPredictor({"huber": Huber})  # one regressor
    predictor = EstimatorPredictor(REGRESSORS)  # the regressor that forecasts the run best

`linear.LinearPredictor` follows changes of speed and is nearly always better. A regressor gives
all steps of its window the same weight.

Functions import scikit-learn only when they make a regressor: the import takes longer than the rest
of a server's start, and few runs use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from msgspec import Meta

from paceline.core.cost import SUM, Cost
from paceline.policies.parts import Predictor
from paceline.policies.predict.least_squares import non_negative
from paceline.policies.predict.linear import LinearPredictor
from paceline.policies.values import Feedback, Floats, Models, usable

# If a rank has fewer than `_FEW_ROWS` rows, or its largest load is less than `_ALIKE_LOADS` times
# its least, its times are assumed to be proportional to its loads.
_FEW_ROWS = 8
_ALIKE_LOADS = 1.05
# Cross-validation: number of splits into earlier and later steps, and maximum number of ranks whose
# steps it uses.
_SPLITS, _VALIDATED_RANKS = 3, 4
# In the cross-validation, the relative error of a single forecast is clipped to this value.
_CAP = 0.3
# A candidate replaces the first candidate only if its error is smaller by this fraction.
_BETTER = 0.02
# Smaller relative residuals and coefficients count as 0.
_ZERO_RESIDUAL = 1e-6
# A forecast is invalid if it is at least this many times the rank's mean time: with numbers near
# 1e308, `non_negative` would crash the process.
_INVALID_RATIO = 1e100


class Estimator(Protocol):
    """A regressor with the interface of scikit-learn."""

    def fit(self, inputs: Floats, times: Floats, /) -> Any:
        """Fit the regressor to the times of a rank's F steps, [F].

        `inputs` has the effective load and the number of samples of each step, [F, 2]. Loads,
        numbers of samples and times are each divided by their mean.
        """
        ...

    def predict(self, inputs: Floats, /) -> Any:
        """Return the expected times of K batches, [K]. `inputs` is as for `fit`, [K, 2]."""
        ...


def linear() -> Any:
    """Make scikit-learn's `LinearRegression`: least squares."""
    from sklearn.linear_model import LinearRegression

    return LinearRegression()


def quantile() -> Any:
    """Make scikit-learn's `QuantileRegressor`, which predicts the median time."""
    from sklearn.linear_model import QuantileRegressor

    return QuantileRegressor(alpha=0.0)


class Huber:
    """scikit-learn's `HuberRegressor`: least squares in which outliers count little."""

    def __init__(self) -> None:
        self._fitted = linear()

    def fit(self, inputs: Floats, times: Floats) -> Huber:
        """Fit the regressor; see `Estimator.fit`.

        If the times have no noise, Huber's scale would be 0, so least squares are used instead.

        Raises:
            ValueError: the fit does not converge.
        """
        from sklearn.linear_model import HuberRegressor

        self._fitted.fit(inputs, times)
        if (np.abs(self._fitted.predict(inputs) - times) > _ZERO_RESIDUAL * times).any():
            self._fitted = HuberRegressor(alpha=0.0, max_iter=1000).fit(inputs, times)
        return self

    def predict(self, inputs: Floats) -> Any:
        """See `Estimator.predict`."""
        return self._fitted.predict(inputs)


class Isotonic:
    """scikit-learn's `IsotonicRegression`: any function that never falls as the load grows."""

    def __init__(self) -> None:
        from sklearn.isotonic import IsotonicRegression

        self._fitted = IsotonicRegression(out_of_bounds="clip")

    def fit(self, inputs: Floats, times: Floats) -> Isotonic:
        """Fit the times to the loads alone; see `Estimator.fit`."""
        self._fitted.fit(inputs[:, 0], times)
        return self

    def predict(self, inputs: Floats) -> Any:
        """See `Estimator.predict`."""
        return self._fitted.predict(inputs[:, 0])


REGRESSORS: Mapping[str, Callable[[], Estimator]] = MappingProxyType(
    {"linear": linear, "huber": Huber, "quantile": quantile, "isotonic": Isotonic}
)

# Type of the parameter `regressor`, for presets whose paper predicts times with a regression.
Regressor = Annotated[
    Literal["tracking", "linear", "huber", "quantile", "isotonic", "cross-validated"],
    Meta(
        description="Regression that predicts the ranks' step times. tracking: Paceline's own, "
        "which follows changes of speed. linear, huber, quantile, isotonic: a regressor of "
        "scikit-learn, fitted to the newest `window` steps. cross-validated: the regressor of "
        "scikit-learn that forecasts the run's steps best."
    ),
]


def predictor_of(regressor: str, window: int, cost: str = "auto") -> Predictor:
    """Make the predictor for a value of `Regressor`, which is fitted to the `window` newest steps.

    `cost` is the cost of a batch, as in `LinearPredictor`; only "tracking" uses it.
    """
    if regressor == "tracking":
        return LinearPredictor(window, cost)
    if regressor == "cross-validated":
        return EstimatorPredictor(window=window)
    return EstimatorPredictor({regressor: REGRESSORS[regressor]}, window)


@dataclass(frozen=True)
class EstimatorPredictor:
    """A predictor whose models are planes through a regressor's forecasts of each rank's steps.

    A regressor is fitted to each rank's newest `window` steps with samples. Then the plane T = a·Λ'
    + c·n + b with a > 0 and c, b ≥ 0 is fitted to the regressor's forecasts within the range of the
    rank's loads and numbers of samples; T is the time of a batch with n samples and effective load
    Λ'. For a rank with few steps, or with loads that hardly differ, the time is assumed to be
    proportional to the load.

    Of several candidates, the predictor uses the one that best forecasts later steps from earlier
    steps, averaged over a few ranks. If a candidate raises a ValueError for a rank, its error for
    this rank is the maximum, `_CAP`. Regressors must be deterministic, because a replay recomputes
    plans from the database.
    """

    candidates: Mapping[str, Callable[[], Estimator]] = field(default_factory=lambda: REGRESSORS)
    window: int = 64
    cost: Cost = SUM

    def fit(self, feedback: Feedback, world: int) -> Models:
        """See `Predictor.fit`."""
        rows = feedback.by_step(world)
        load = np.asarray(self.cost.load(rows.features), np.float64)
        valid = usable(rows.samples, load, rows.compute_s)
        if not valid.any(axis=0).all():
            return Models.unknown(world)
        ranks = [
            _Rank.of(load[of, j], rows.samples[of, j], rows.compute_s[of, j])
            for j, of in enumerate(np.flatnonzero(v)[-self.window :] for v in valid.T)
        ]
        make = self.candidates[self.chosen(ranks)]
        a, c, b = np.array([rank.plane(make) for rank in ranks]).T.copy()
        return Models(a, c, b, cost=self.cost)

    def chosen(self, ranks: list[_Rank]) -> str:
        """Return the name of the candidate that forecasts the steps of these ranks best.

        If no rank has enough steps for a fit, return the first candidate's name.
        """
        first, *others = self.candidates
        fitted = [rank for rank in ranks if rank.is_fittable]
        if not others or not fitted:
            return first
        some = [
            fitted[k]
            for k in np.unique(np.linspace(0, len(fitted) - 1, _VALIDATED_RANKS).astype(int))
        ]
        off = {
            name: float(np.mean([rank.off(make) for rank in some]))
            for name, make in self.candidates.items()
        }
        best = min(others, key=lambda name: off[name])
        return best if off[first] - off[best] > _BETTER * off[first] + _ZERO_RESIDUAL else first


@dataclass(frozen=True)
class _Rank:
    """A rank's F steps, oldest first; each input and the times are divided by their mean."""

    # Effective load and number of samples of each step.
    inputs: Floats  # [F, 2]
    times: Floats  # [F]
    # The means by which `inputs` and `times` were divided: of effective load, of number of samples,
    # and of time in seconds.
    means: Floats  # [3]

    @staticmethod
    def of(load: Floats, samples: Any, compute_s: Floats) -> _Rank:
        columns = np.column_stack([load, samples, compute_s]).astype(np.float64)
        means = columns.mean(axis=0)
        relative = columns / means
        return _Rank(relative[:, :2], relative[:, 2], means)

    @property
    def is_fittable(self) -> bool:
        load = self.inputs[:, 0]
        return len(load) >= _FEW_ROWS and float(load.max()) >= _ALIKE_LOADS * float(load.min())

    def off(self, make: Callable[[], Estimator]) -> float:
        """Return the mean relative error with which a regressor forecasts later steps.

        In each of several splits, a new regressor, made by `make`, is fitted to the earlier steps.
        """
        from sklearn.model_selection import TimeSeriesSplit

        made: list[Floats] = []
        for earlier, later in TimeSeriesSplit(_SPLITS).split(self.inputs):
            try:
                fitted = make()
                fitted.fit(self.inputs[earlier], self.times[earlier])
                forecast = np.asarray(fitted.predict(self.inputs[later]), np.float64)
            except ValueError:
                return _CAP
            off = np.abs(forecast / self.times[later] - 1)
            # NaN is not below the cap, so it is replaced as well.
            made.append(np.where(off < _CAP, off, _CAP))
        return float(np.mean(np.concatenate(made)))

    def plane(self, make: Callable[[], Estimator]) -> tuple[float, float, float]:
        """Return a, c and b of the plane through a regressor's forecasts: see the class.

        The units are seconds per size unit, per sample and per step. If the regressor that `make`
        returns cannot be fitted, the time is proportional to the load.
        """
        load, samples, time_s = self.means
        proportional = (time_s / load, 0.0, 0.0)
        if not self.is_fittable:
            return proportional
        ends = [np.unique([v.min(), 1.0, v.max()]) for v in self.inputs.T]
        probes = np.array(list(product(*ends)))
        try:
            fitted = make()
            fitted.fit(self.inputs, self.times)
            forecast = np.asarray(fitted.predict(probes), np.float64)
        except ValueError:
            return proportional
        # A NaN fails this comparison, too.
        if not (np.abs(forecast) < _INVALID_RATIO).all():
            return proportional
        varies = np.ptp(probes[:, 1]) > 0
        columns = [probes[:, 0], probes[:, 1] * varies, np.ones(len(probes))]
        try:
            a, c, b = non_negative(np.column_stack(columns), forecast)[0]
        except RuntimeError:
            return proportional
        if a <= _ZERO_RESIDUAL:
            return proportional
        return (float(a * time_s / load), float(c * time_s / samples), float(b * time_s))
