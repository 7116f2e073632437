"""Checks `Session(token_budget=…)` and its limits, and counts the steps that follow from them.

The budget and the limits are in the unit of the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.batch_limits.budget import (
    Budget,
    budget_of,
    refuse_larger,
    refuse_small,
    refuse_tight,
)
from paceline.core.terms import Terms
from paceline.train.epochs import EpochSteps
from paceline.train.startup import Startup, shared_sizes

Floats = npt.NDArray[np.float64]


def counted(global_batch: int | None, token_budget: float | None) -> tuple[int, float | None]:
    """Return the samples per step (1 if there is a token budget) and the checked token budget.

    Raises:
        TypeError, ValueError: neither or both of the arguments are given, or the budget is not a
            number above 0.
    """
    if (global_batch is None) == (token_budget is None):
        given = "neither" if global_batch is None else "both"
        raise TypeError(
            f"Session got {given} of global_batch and token_budget: give exactly one, the number "
            "of samples in a step or the sum of their sizes"
        )
    if global_batch is not None:
        return global_batch, None
    return 1, budget_of(token_budget)


def budgeted(token_budget: float | None, token_limits: Any) -> list[float]:
    """Return the checked token limits: one per rank, or one for all ranks; empty if none are given.

    Raises:
        TypeError, ValueError: a limit is not a finite number ≥ 0, or limits are given without a
            token budget.
    """
    if token_budget is None:
        if token_limits is not None:
            raise ValueError(
                "token_limits needs token_budget: give Session token_budget instead of "
                "global_batch, or replace token_limits by limits, which are in samples"
            )
        return []
    return [] if token_limits is None else _listed(token_limits)


def _listed(token_limits: Any) -> list[float]:
    try:
        limits = np.atleast_1d(np.asarray(token_limits, np.float64))
    except (TypeError, ValueError) as error:
        raise TypeError(f"token_limits is {token_limits!r}: give one number, or a list") from error
    if limits.ndim != 1 or not len(limits) or not (np.isfinite(limits) & (limits >= 0)).all():
        raise ValueError(
            f"token_limits is {token_limits!r}: give one number of at least 0, or one for each rank"
        )
    return [float(limit) for limit in limits]


def of_ranks(token_limits: list[float], world: int) -> list[float]:
    """Repeat a single limit for `world` ranks; raise a ValueError for a wrong number of limits."""
    if len(token_limits) not in (0, 1, world):
        raise ValueError(
            f"token_limits is {token_limits}: give one number, or one for each of {world} ranks"
        )
    return token_limits * world if len(token_limits) == 1 else token_limits


def checked_sizes(
    sizes: Floats,
    token_budget: float | None,
    token_limits: list[float],
    workers: int,
    micro_batches: bool,
) -> Floats:
    """Return the sizes λ, [N], after checking them against the budget and the limits.

    `token_limits` has one limit for each worker of the plan (a rank, or a group of ranks), or one
    limit for all workers; it is empty if there are no limits.

    Raises:
        ValueError: a sample exceeds the budget, or `refuse_limits` refuses the limits.
    """
    if token_budget is not None:
        refuse_larger(sizes, token_budget)
        if token_limits:
            limits = of_ranks(token_limits, workers)
            refuse_limits(limits, float(sizes.max()), token_budget, micro_batches)
    return sizes


def refuse_limits(
    limits: Sequence[float], longest: float, budget: float, micro_batches: bool
) -> None:
    """Raise a ValueError if token limits are too small.

    With micro-batches, each limit must have room for the sample of size `longest`. Without
    micro-batches, it must be possible to divide the samples of every step within the limits.
    """
    if micro_batches:
        refuse_small(np.array(limits), longest)
    else:
        refuse_tight(np.array(limits), longest, budget)


def planned(terms: Terms, startup: Startup) -> tuple[Terms, EpochSteps]:
    """Return `terms`, and an `EpochSteps`, which counts the steps of each epoch. Collective.

    With a token budget, `global_batch` of the returned `Terms` is the mean number of samples per
    step in the first epoch.
    """
    if terms.token_budget is None:
        return terms, EpochSteps(terms)
    steps = EpochSteps(terms, Budget(terms.token_budget, shared_sizes(startup)))
    return replace(terms, global_batch=max(1, round(terms.samples / steps.of(0)))), steps
