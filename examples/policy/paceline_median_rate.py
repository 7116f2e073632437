"""`median-rate`: the batches of `paceline`, with a regressor of one's own for the ranks' times.

This is an example of a predictor from outside: anything with `fit` and `predict` will do, such as
any regressor of scikit-learn. docs/writing-a-policy.md explains it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline import policies
from paceline.policies import Parameters, Policy, Preset
from paceline.policies.predict.estimators import EstimatorPredictor

Floats = npt.NDArray[np.float64]


class MedianRate:
    """The median of time ÷ load: half of a rank's steps may be nonsense."""

    def fit(self, inputs: Floats, times: Floats) -> MedianRate:
        """Learns from a rank's steps, oldest first.

        Args:
            inputs: load and samples of each step, relative to their means, [F, 2].
            times: of the steps, relative to their mean, [F].
        """
        self.rate = float(np.median(times / inputs[:, 0]))
        return self

    def predict(self, inputs: Floats) -> Any:
        """The times of batches with these loads and samples, [K]."""
        return self.rate * inputs[:, 0]


def make(parameters: Parameters) -> Policy:
    """The policy."""
    predictor = EstimatorPredictor({"median rate": MedianRate})
    return replace(policies.make("paceline"), name="median-rate", predictor=predictor)


preset = Preset(
    name="median-rate",
    summary="The batches of paceline, by the median of each rank's time per unit of load.",
    source="an example",
    make=make,
)
