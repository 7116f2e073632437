"""Least squares whose coefficients are 0 or more."""

from __future__ import annotations

import numpy as np

from paceline.policies.values import Floats


def non_negative(columns: Floats, target: Floats) -> tuple[Floats, float]:
    """Solve a least-squares problem with R rows and C coefficients that must be 0 or more.

    Return the x ≥ 0, [C], that minimises the Euclidean norm |columns·x − target|, and this norm.
    `columns` is [R, C], `target` is [R].

    Raises:
        RuntimeError: the solver does not converge.
    """
    # Imported here, because this import takes a quarter of a server's start-up time.
    from scipy.optimize import nnls

    coefficients, distance = nnls(columns, target)
    return coefficients, float(distance)


def warm_up() -> None:
    """Import the solver, so that no plan waits for the import."""
    non_negative(np.ones((1, 1)), np.ones(1))
