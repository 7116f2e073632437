"""Keeps each worker's local batch within its limit in the unit of the sizes: `token_limits`.

`planner.plan` calls `within_limits` with the scheduler's batches, so this applies to every policy.
The samples of each step stay as planned; some of them change their rank.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.core.amounts.budget import ROUNDING, kept_within
from paceline_backend.policies.parts import Policy
from paceline_backend.policies.solve.balance import grouped
from paceline_backend.policies.solve.hedged import partition_hedged
from paceline_backend.policies.values import Batches, Floats, Ints, Models, Problem


def within_limits(batches: Batches, policy: Policy, problem: Problem, models: Models) -> Batches:
    """Return the scheduler's batches with samples moved until local batches keep their limits.

    Under policies that divide a batch by models, the samples that do not fit on a worker are also
    divided among the others by models. Under other policies they go to the workers with the most
    room.
    """
    limits = problem.token_limits
    if limits is None:
        return batches
    follows = policy.balances and problem.counts is None and policy.accounts.cost is not None
    counts, samples = [], []
    ends = np.cumsum(batches.counts.sum(axis=1))[:-1]
    steps = zip(batches.counts, np.split(batches.samples, ends), strict=True)
    for step, (before, batch) in enumerate(steps):
        sizes = problem.sizes[batch]
        ranks = np.repeat(np.arange(problem.world), before)
        if follows:
            ranks = _refilled(ranks, sizes, models.at(step), limits)
        order, of_rank = grouped(kept_within(ranks, sizes, limits), problem.world)
        counts.append(of_rank)
        samples.append(batch[order])
    return Batches.joined(counts, samples, problem.world)


def _refilled(ranks: Ints, sizes: Floats, models: Models, limits: Floats) -> Ints:
    """Return the rank of each sample, [n]: full workers at their limits, the rest divided again.

    A worker may still hold more than its limit if no other worker can take the samples.
    """
    ranks = ranks.copy()
    open_, rest = np.ones(len(limits), bool), np.ones(len(sizes), bool)
    largest_first = np.argsort(-sizes, kind="stable")
    while True:
        loads = np.bincount(ranks, sizes, len(limits))
        full = open_ & (loads > limits * (1 + ROUNDING))
        if not full.any() or (open_ == full).all():
            return ranks
        for rank in np.flatnonzero(full):
            its = largest_first[(rest & (ranks == rank))[largest_first]]
            rest[its[_filling(sizes[its], float(limits[rank]))]] = False
        open_ &= ~full
        among = np.flatnonzero(open_)
        ranks[rest] = among[partition_hedged(sizes[rest], _of(models, among))]


def _filling(sizes: Floats, limit: float) -> list[int]:
    kept, load = [], 0.0
    for place, size in enumerate(sizes.tolist()):
        if load + size <= limit:
            load += size
            kept.append(place)
    return kept


def _of(models: Models, ranks: Ints) -> Models:
    rivals = tuple((chance, _of(rival, ranks)) for chance, rival in models.rivals)
    return replace(
        models, a=models.a[ranks], c=models.c[ranks], b=models.b[ranks], rivals=rivals, factors=None
    )
