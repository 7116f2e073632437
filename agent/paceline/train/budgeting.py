"""`Session(token_budget=…)`: what it goes with, and what the ranks know of its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.amounts.budget import Budget, budget_of, refuse_larger
from paceline.core.errors import PacelineError
from paceline.core.terms import Terms
from paceline.data import Sharded
from paceline.train.meeting import Meeting, shared_sizes
from paceline.train.plan.epochs import EpochSteps

Floats = npt.NDArray[np.float64]

_BESIDE = {
    "drop_last": "an epoch's last step is no less whole than others are: leave drop_last out",
    "limits": "it counts samples: leave limits out",
    "shapes": "steps have different numbers of samples, which no grid divides: leave its samples "
    "out; its length may stay",
    "uneven_steps": "relaxed policies do not keep a budget: leave uneven_steps out",
    "micro_batches": "limits count samples: leave micro_batches out",
}


def counted(global_batch: int | None, token_budget: float | None) -> int:
    """Samples of a step, as far as it is known before the sizes are.

    Raises:
        TypeError, ValueError: not exactly one of both is given, or the budget is no number above 0.
    """
    if (global_batch is None) == (token_budget is None):
        given = "neither" if global_batch is None else "both"
        raise TypeError(
            f"Session has {given} of global_batch and token_budget: give one of them, the samples "
            "of a step or the sum of their sizes"
        )
    if global_batch is not None:
        return global_batch
    budget_of(token_budget)
    return 1


def refuse_beside_budget(dataset: Any, **options: Any) -> None:
    """Refuses options of `Session` that a token budget does not go with.

    Raises:
        ValueError: one is given; the message names it.
    """
    for name, value in options.items():
        if value:
            raise ValueError(f"{name} and token_budget do not go together: {_BESIDE[name]}")
    if isinstance(dataset, Sharded):
        raise ValueError(
            "paceline.data.Sharded and token_budget do not go together: steps keep the epoch's "
            "order, wherever the samples are; give global_batch, or data that each rank can read"
        )


def refuse_profile(token_budget: float | None) -> None:
    """Refuses `Session.profile` with a token budget.

    Raises:
        PacelineError: there is one.
    """
    if token_budget is not None:
        raise PacelineError(
            "profile: it finds how many samples fit into memory, and with token_budget a step's "
            "number of samples varies: leave it out"
        )


def checked_sizes(sizes: Floats, token_budget: float | None) -> Floats:
    """The sizes, none of which is more than the budget.

    Raises:
        ValueError: one is.
    """
    if token_budget is not None:
        refuse_larger(sizes, token_budget)
    return sizes


def planned(terms: Terms, meeting: Meeting) -> tuple[Terms, EpochSteps]:
    """The terms with the mean number of samples of a step, and the steps; each rank calls it."""
    if terms.token_budget is None:
        return terms, EpochSteps(terms)
    steps = EpochSteps(terms, Budget(terms.token_budget, shared_sizes(meeting)))
    return replace(terms, global_batch=max(1, round(terms.samples / steps.of(0)))), steps
