"""Least squares whose coefficients are 0 or more."""

from __future__ import annotations

import numpy as np

from paceline_backend.policies.values import Floats


def non_negative(columns: Floats, target: Floats) -> tuple[Floats, float]:
    """The coefficients x ≥ 0 with the least |columns·x − target|, and that distance.

    Args:
        columns: [R, C].
        target: [R].

    Raises:
        RuntimeError: it does not converge.
    """
    from scipy.optimize import nnls  # takes a quarter of a server's start to import

    coefficients, distance = nnls(columns, target)
    return coefficients, float(distance)


def warm_up() -> None:
    """Imports the solver, so that no plan waits for it."""
    non_negative(np.ones((1, 1)), np.ones(1))
