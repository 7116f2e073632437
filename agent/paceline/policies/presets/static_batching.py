"""`static-batching`: shares of the global batch in proportion to capacities, computed once.

Taming Resource Heterogeneity In Distributed ML Training With Dynamic Batching, §III-B (open loop).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from paceline.core.batch_limits.devices import capacities
from paceline.policies.base import (
    Allocation,
    Feedback,
    Ints,
    Models,
    Policy,
    Preset,
    Problem,
)
from paceline.policies.parameters import PerRank
from paceline.policies.solve import counts

CAPACITY = (
    "Capacity of each rank relative to the other ranks, such as its CPU cores or FLOP/s: one "
    "number per rank. If omitted, capacities are derived from the ranks' devices."
)


def counts_of(capacity: tuple[float, ...], problem: Problem) -> Ints:
    """Return the number of samples b_k = B · X_k / ΣX of each worker k, within its limits, [W].

    B is the global batch, and the limits are the workers' memory limits. `capacity` is X, in any
    unit, [W]. If `capacity` is empty, or the run was restarted with another number of ranks, X are
    the nominal speeds of the ranks' devices. If these speeds are unknown, counts are equal.
    """
    if len(capacity) != problem.world:
        capacity = capacities(problem.devices).values
    if len(capacity) != problem.world:
        return counts.equal(problem)
    shares = np.array(capacity) / max(capacity)
    return counts.rounded(counts.spread(shares, problem.global_batch, *counts.bounds(problem)))


@dataclass(frozen=True)
class StaticAllocator:
    """An allocator of counts in proportion to capacities (`counts_of`); feedback is not used."""

    capacity: tuple[float, ...] = ()

    def allocate(self, problem: Problem, models: Models, feedback: Feedback) -> Allocation:
        """See `Allocator.allocate`."""
        return Allocation(counts_of(self.capacity, problem), {})


class StaticBatchingParameters(counts.CountsParameters, frozen=True):
    """Parameters of `static-batching`."""

    capacity: Annotated[PerRank, Meta(description=CAPACITY)] = ()


def make(parameters: StaticBatchingParameters) -> Policy:
    """Make the policy."""
    allocator = StaticAllocator(parameters.capacity)
    capacity = parameters.capacity
    return counts.policy("static-batching", allocator, parameters, capacity=capacity)


preset = Preset(
    name="static-batching",
    summary="Divides the global batch in proportion to the ranks' CPU cores or FLOP/s.",
    source="Taming Resource Heterogeneity In Distributed ML Training With Dynamic Batching, "
    "open loop",
    make=make,
    combines=True,
    parameters=StaticBatchingParameters,
)
