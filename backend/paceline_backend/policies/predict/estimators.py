"""Regressors of scikit-learn, or of a third party, as predictors: whatever has `fit` and `predict`.

    predictor = EstimatorPredictor({"huber": Huber})  # one regressor
    predictor = EstimatorPredictor(REGRESSORS)  # that of them which forecasts the run best

`linear.LinearPredictor` follows changes of speed and suits nearly always. A regressor looks at all
steps of its window alike.

scikit-learn is imported where a regressor is made: it takes longer to start than all the rest of a
server, and few runs use it.
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
from paceline_backend.policies.parts import Predictor
from paceline_backend.policies.predict.least_squares import non_negative
from paceline_backend.policies.predict.linear import LinearPredictor
from paceline_backend.policies.values import Feedback, Floats, Models, usable

_FEW = 8  # rows of a rank; with fewer, times are taken in proportion to loads,
_ALIKE = 1.05  # and so they are where a rank's loads differ by a smaller factor
_SPLITS, _RANKS = 3, 4  # of the cross-validation: splits in time, and ranks at most
_CAP = 0.3  # a forecast counts as at most so far off, relative
_BETTER = 0.02  # a later regressor must be less off than the first by this share
_EXACT = 1e-6  # relative; smaller residuals are none
_WILD = 1e100  # relative; such forecasts are none; near 1e308 `non_negative` ends the process


class Estimator(Protocol):
    """A regressor, as scikit-learn's are."""

    def fit(self, inputs: Floats, times: Floats, /) -> Any:
        """Learns a rank's times.

        Args:
            inputs: effective load and samples of each step, relative to their means, [F, 2].
            times: compute time of each step, relative to its mean, [F].
        """
        ...

    def predict(self, inputs: Floats, /) -> Any:
        """The times of batches, [K], given as for `fit`, [K, 2]."""
        ...


def linear() -> Any:
    """scikit-learn's `LinearRegression`: least squares."""
    from sklearn.linear_model import LinearRegression

    return LinearRegression()


def quantile() -> Any:
    """scikit-learn's `QuantileRegressor` of the median: half of the steps take longer."""
    from sklearn.linear_model import QuantileRegressor

    return QuantileRegressor(alpha=0.0)


class Huber:
    """scikit-learn's `HuberRegressor`: least squares in which single wild steps count little."""

    def __init__(self) -> None:
        self._fitted = linear()

    def fit(self, inputs: Floats, times: Floats) -> Huber:
        """See `Estimator.fit`. Rows without noise, whose scale is 0, are fitted by least squares.

        Raises:
            ValueError: it does not converge.
        """
        from sklearn.linear_model import HuberRegressor

        self._fitted.fit(inputs, times)
        if (np.abs(self._fitted.predict(inputs) - times) > _EXACT * times).any():
            self._fitted = HuberRegressor(alpha=0.0, max_iter=1000).fit(inputs, times)
        return self

    def predict(self, inputs: Floats) -> Any:
        """See `Estimator.predict`."""
        return self._fitted.predict(inputs)


class Isotonic:
    """scikit-learn's `IsotonicRegression`: times that rise with the load, in any way."""

    def __init__(self) -> None:
        from sklearn.isotonic import IsotonicRegression

        self._fitted = IsotonicRegression(out_of_bounds="clip")

    def fit(self, inputs: Floats, times: Floats) -> Isotonic:
        """See `Estimator.fit`."""
        self._fitted.fit(inputs[:, 0], times)
        return self

    def predict(self, inputs: Floats) -> Any:
        """See `Estimator.predict`."""
        return self._fitted.predict(inputs[:, 0])


REGRESSORS: Mapping[str, Callable[[], Estimator]] = MappingProxyType(
    {"linear": linear, "huber": Huber, "quantile": quantile, "isotonic": Isotonic}
)

# A parameter of presets whose paper learns times by a regression.
Regressor = Annotated[
    Literal["tracking", "linear", "huber", "quantile", "isotonic", "cross-validated"],
    Meta(
        description="What learns the ranks' times. tracking: Paceline's own regression, which "
        "follows changes of speed. linear, huber, quantile, isotonic: scikit-learn's, on the "
        "window's steps. cross-validated: that of these which forecasts the run's own steps best."
    ),
]


def predictor_of(regressor: str, window: int, cost: str = "auto") -> Predictor:
    """The predictor of a `Regressor`.

    Args:
        regressor: its name.
        window: steps to look at.
        cost: of batches, for "tracking": see `LinearPredictor`.
    """
    if regressor == "tracking":
        return LinearPredictor(window, cost)
    if regressor == "cross-validated":
        return EstimatorPredictor(window=window)
    return EstimatorPredictor({regressor: REGRESSORS[regressor]}, window)


@dataclass(frozen=True)
class EstimatorPredictor:
    """Models that are planes through what a regressor says of each rank's steps.

    A regressor is fitted to each rank's newest steps. Within the range of the rank's loads and
    numbers of samples, its forecasts give the plane T = a·Λ' + c·n + b with a > 0 and c, b ≥ 0. For
    a linear regressor with such coefficients that is the regressor itself. A rank with few steps,
    or with loads too alike, is taken to take time in proportion to its load.

    Of several candidates the one is taken whose forecasts of later steps from earlier ones were the
    least off, over some ranks. One that raises a ValueError is passed over.

    Args:
        candidates: what makes a regressor, by name. Each call gives a new one, which must not
            depend on chance: plans are made again from the database.
        window: steps to look at; steps in which a rank had no samples do not count.
        cost: of batches.
    """

    candidates: Mapping[str, Callable[[], Estimator]] = field(default_factory=lambda: REGRESSORS)
    window: int = 64
    cost: Cost = SUM

    def fit(self, feedback: Feedback, world: int) -> Models:
        """See `Predictor.fit`. Known as soon as each rank has one usable row."""
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
        """The name of the candidate that forecasts these ranks best; the first if none can tell."""
        first, *others = self.candidates
        fitted = [rank for rank in ranks if rank.tells]
        if not others or not fitted:
            return first
        some = [fitted[k] for k in np.unique(np.linspace(0, len(fitted) - 1, _RANKS).astype(int))]
        off = {
            name: float(np.mean([rank.off(make) for rank in some]))
            for name, make in self.candidates.items()
        }
        best = min(others, key=lambda name: off[name])
        return best if off[first] - off[best] > _BETTER * off[first] + _EXACT else first


@dataclass(frozen=True)
class _Rank:
    """A rank's steps, oldest first, relative to their means."""

    inputs: Floats  # [F, 2]: effective load, samples
    times: Floats  # [F]
    means: Floats  # [3]: of effective load, samples, and time in s

    @staticmethod
    def of(load: Floats, samples: Any, compute_s: Floats) -> _Rank:
        columns = np.column_stack([load, samples, compute_s]).astype(np.float64)
        means = columns.mean(axis=0)
        relative = columns / means
        return _Rank(relative[:, :2], relative[:, 2], means)

    @property
    def tells(self) -> bool:
        """Whether there is anything to fit."""
        load = self.inputs[:, 0]
        return len(load) >= _FEW and float(load.max()) >= _ALIKE * float(load.min())

    def off(self, make: Callable[[], Estimator]) -> float:
        """How far forecasts of later steps from earlier ones are off, relative, in the mean."""
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
            made.append(np.where(off < _CAP, off, _CAP))  # NaN, too
        return float(np.mean(np.concatenate(made)))

    def plane(self, make: Callable[[], Estimator]) -> tuple[float, float, float]:
        """(a, c, b) in s per size unit, s per sample, and s."""
        load, samples, time_s = self.means
        proportional = (time_s / load, 0.0, 0.0)
        if not self.tells:
            return proportional
        ends = [np.unique([v.min(), 1.0, v.max()]) for v in self.inputs.T]
        probes = np.array(list(product(*ends)))
        try:
            fitted = make()
            fitted.fit(self.inputs, self.times)
            forecast = np.asarray(fitted.predict(probes), np.float64)
        except ValueError:
            return proportional
        if not (np.abs(forecast) < _WILD).all():  # NaN, too
            return proportional
        varies = np.ptp(probes[:, 1]) > 0
        columns = [probes[:, 0], probes[:, 1] * varies, np.ones(len(probes))]
        try:
            a, c, b = non_negative(np.column_stack(columns), forecast)[0]
        except RuntimeError:  # it does not converge
            return proportional
        if a <= _EXACT:
            return proportional
        return (float(a * time_s / load), float(c * time_s / samples), float(b * time_s))
