"""`sata`: workers' shares of the global batch, computed from their times in the last epoch.

SATA: self-adaptive task allocation, Eq. 8 and Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from paceline.policies.base import (
    Allocation,
    Feedback,
    Floats,
    Models,
    Policy,
    Preset,
    Problem,
)
from paceline.policies.solve import counts
from paceline.policies.values import StepTable

# Value of `Criteria.steps` if shares are computed from the times of an epoch, whose number of steps
# is not known yet when the policy is made.
_EPOCH = 64


class _Memory(counts.Counted):
    # Weights w of the workers, whose sum is 1.
    weights: list[float]  # [W]
    # The epoch in which `weights` were computed, and the first step with these weights.
    epoch: int
    since: int
    # The first step that is not in the sums `samples` and `compute_s`.
    next: int
    # Samples trained since `weights` were computed, and the seconds that these samples took.
    samples: list[float]  # [W]
    compute_s: list[float]  # [W]


@dataclass(frozen=True)
class SataAllocator:
    """An allocator that sets worker i's share to w_i ← (w_i / t_i) / Σ_k (w_k / t_k) (Eq. 8).

    By default, shares are computed at each epoch's start; t_i is worker i's time in the last epoch.
    On the right side of Eq. 8, the allocator replaces w_i by the number of samples that worker i
    trained in the time t_i. This gives the same shares, up to rounding, and also works if the
    leader or another policy planned the steps. A worker without feedback keeps its share. Each
    worker gets at least one sample.

    If no share would change by more than the fraction `tolerance`, all shares stay the same.
    Shares are computed every `every_steps` steps or, if it is 0, once per epoch, as in the paper.
    """

    tolerance: float = 0.01
    every_steps: int = 0

    def allocate(self, problem: Problem, models: Models, feedback: Feedback) -> Allocation:
        """See `Allocator.allocate`."""
        world = problem.world
        memory = counts.recall(problem, _Memory) or _Memory(
            counts=counts.equal(problem).tolist(),
            weights=[1 / world] * world,
            epoch=-1,
            since=problem.first_step,
            next=0,
            samples=[0.0] * world,
            compute_s=[0.0] * world,
        )
        rows = StepTable.of(feedback, world, memory.next)
        samples, compute_s, _ = rows.sums()
        samples, compute_s = samples + memory.samples, compute_s + memory.compute_s
        weights, epoch, since = np.array(memory.weights), memory.epoch, memory.since
        if self._due(problem, memory):
            proposal = reweighted(weights, samples, compute_s)
            if np.abs(proposal / weights - 1).max() > self.tolerance:
                weights = proposal
            epoch, since = problem.epoch, problem.first_step
            samples, compute_s = np.zeros(world), np.zeros(world)
        target = counts.spread(weights, problem.global_batch, *counts.bounds(problem, least=1))
        memory = _Memory(
            counts=counts.rounded(target).tolist(),
            weights=weights.tolist(),
            epoch=epoch,
            since=since,
            next=int(rows.step[-1]) + 1 if len(rows) else memory.next,
            samples=samples.tolist(),
            compute_s=compute_s.tolist(),
        )
        return counts.allocation(memory)

    def _due(self, problem: Problem, memory: _Memory) -> bool:
        if memory.epoch < 0 or not self.every_steps:
            return problem.epoch != memory.epoch
        return problem.first_step - memory.since >= self.every_steps


def reweighted(weights: Floats, samples: Floats, compute_s: Floats) -> Floats:
    """Return each worker's share in proportion to the samples it trained per second (Eq. 8), [W].

    `weights` are the present shares w. `compute_s` is t, the seconds in which the workers computed
    the gradients of their `samples`, [W] each. Workers without a time keep their share.
    """
    known = (samples > 0) & (compute_s > 0)
    if not known.any():
        return weights
    result = weights.copy()
    speed = samples[known] / compute_s[known]
    result[known] = speed / speed.sum() * weights[known].sum()
    return result


class SataParameters(counts.CountsParameters, frozen=True):
    """Parameters of `sata`."""

    tolerance: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="The ranks' shares of the global batch change only if some share would "
            "change by more than this fraction.",
        ),
    ] = 0.01
    every_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000,
            description="Number of steps after which the ranks' shares of the global batch are "
            "computed again; 0: once per epoch, as in the paper.",
        ),
    ] = 0


def make(parameters: SataParameters) -> Policy:
    """Make the policy."""
    allocator = SataAllocator(parameters.tolerance, parameters.every_steps)
    steps = parameters.every_steps or _EPOCH
    return counts.policy("sata", allocator, parameters, steps=steps)


preset = Preset(
    name="sata",
    summary="In each epoch, ranks get samples in proportion to their speeds in the previous epoch.",
    source="SATA: Self-Adaptive Task Allocation for Decentralized Deep Learning in Heterogeneous "
    "Environments",
    make=make,
    combines=True,
    parameters=SataParameters,
    variants=counts.LEVELLED,
)
