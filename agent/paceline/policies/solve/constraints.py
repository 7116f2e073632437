"""Adaptation of a plan's batches to a run's constraints: a grid for counts, and batch limits.

`planner.plan` calls `gridded`, then `within_limits`, with the scheduler's batches, so both apply to
every policy. The samples of each global batch stay as planned; a few of them change their rank. The
grid gives batches few distinct shapes. The limits are in the unit of the sizes (`token_limits`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from paceline.core.batch_limits.budget import ROUNDING, kept_within
from paceline.core.batch_limits.shapes import moved, moved_on_nodes, on_grid
from paceline.core.cost import features
from paceline.policies.parts import Policy
from paceline.policies.solve.balance import DescentState, descend, grouped, pairs, partition
from paceline.policies.solve.counts import levelled
from paceline.policies.solve.hedged import partition_hedged
from paceline.policies.solve.minmax import minmax
from paceline.policies.solve.nodes import homes_of
from paceline.policies.solve.workers import Workers, level, most_of
from paceline.policies.values import Floats, Ints, Models, Problem
from paceline.wire import Assignment

# Approximate maximum number of exchanges that are tried for one division of a global batch.
_DIVISION_EXCHANGES = 500_000
# Maximum number of moves for one global batch; a move takes `grid` samples from the slowest rank.
_MOVES = 8


def gridded(batches: Assignment, policy: Policy, problem: Problem, models: Models) -> Assignment:
    """Change the scheduler's batches so that each rank's count is a multiple of ``problem.grid``.

    If a step's samples are not a multiple of the grid, one rank gets the remainder: see
    `shapes.on_grid`. If the policy balances batches by the models of the ranks' times, the function
    tries several sets of counts and uses the set with which the slowest rank ends first. For other
    policies, it uses the counts nearest to the scheduler's. If data lives on nodes, it uses the
    nearest counts for every policy, and first rounds the sum of each node's counts, so that few
    samples move between nodes.
    """
    if problem.grid == 1:
        return batches
    follows = policy.balances and problem.counts is None and policy.criteria.cost is not None
    homes = homes_of(problem)
    nodes = None if homes is None else np.unique(homes, return_inverse=True)[1]
    levels = problem.counts is not None and policy.criteria.cost is not None
    counts, samples = [], []
    ends = np.cumsum(batches.counts.sum(axis=1))[:-1]
    steps = zip(batches.counts, np.split(batches.samples, ends), strict=True)
    for step, (before, batch) in enumerate(steps):
        limits = most_of(problem.limits, len(batch), problem.world)
        # A rank without samples is not measured. So each rank that has samples keeps some, except
        # if the policy balances by models: the models then come from older steps.
        target = on_grid(before, problem.grid, limits, nodes, keep=not follows)
        ranks = np.repeat(np.arange(problem.world), before)
        if np.array_equal(target, before):
            order = np.arange(len(batch))
        elif nodes is not None:
            ranks = moved_on_nodes(ranks, target, nodes, _at_home(problem, batch, nodes, ranks))
            order = np.argsort(ranks, kind="stable")
        elif follows:
            division = _Division(problem.sizes[batch], models.at(step), problem.grid, limits)
            order, target = grouped(division.best(ranks, target), problem.world)
        elif levels:
            order = levelled(problem.sizes[batch], target, models.cost)
        else:
            order = np.argsort(moved(ranks, target), kind="stable")
        counts.append(target)
        samples.append(batch[order])
    return Assignment.joined(counts, samples, problem.world)


def _at_home(problem: Problem, batch: Ints, nodes: Ints, ranks: Ints) -> npt.NDArray[np.bool_]:
    assert problem.storage is not None
    held = nodes[problem.placement[batch]] == nodes[ranks]
    return np.asarray(held & ~problem.storage.loose[batch])


class _Division:
    """The division of one global batch among the ranks, with counts that are multiples of `grid`.

    `sizes` has the size λ of each sample, [n]; `limits` each rank's maximum number of samples, [W].
    """

    def __init__(self, sizes: Floats, models: Models, grid: int, limits: Ints) -> None:
        self._sizes, self._models, self._grid, self._limits = sizes, models, grid, limits
        self._weighed = models.weighed()

    def best(self, planned: Ints, nearest: Ints) -> Ints:
        """Assign each sample to a rank, [n], so that the slowest rank is expected to end early.

        `planned` is the rank that the scheduler chose for each sample, regardless of the grid, [n].
        `nearest` are the multiples of the grid that are nearest to the scheduler's counts, [W].
        """
        start = self._exchanged(moved(planned, nearest))
        best = min([start, *self._divided(nearest)], key=self._end_s)
        if not self._models.known:
            return best
        best = min([best, *self._divided(self._solved(nearest))], key=self._end_s)
        for _ in range(_MOVES):
            counts = self._shifted(best)
            if counts is None:
                break
            made = min(self._divided(counts), key=self._end_s)
            if self._end_s(made) >= self._end_s(best):
                break
            best = made
        return best

    def _divided(self, counts: Ints) -> list[Ints]:
        made = [partition(self._sizes, each, counts) for _, each in self._weighed]
        return [*made, *(self._exchanged(ranks) for ranks in made)]

    def _exchanged(self, ranks: Ints) -> Ints:
        """Exchange samples between many pairs of ranks; no rank's number of samples changes.

        Return the rank of each sample, [n]. `partition` improves only the slowest rank, but many
        ranks are slow if counts on the grid do not match their speeds.
        """
        if self._models.cost.padded:
            return ranks
        effective = np.array(self._models.cost.sizes(self._sizes), np.float64)
        workers = Workers.of(self._models, np.bincount(ranks, minlength=self._models.world))
        state = DescentState.of(effective, ranks.copy(), workers)
        enough = level(effective, workers)
        pairs(state, enough)
        descend(state, enough, _DIVISION_EXCHANGES)
        return state.ranks

    def _end_s(self, ranks: Ints) -> float:
        order, counts = grouped(ranks, self._models.world)
        of = features(self._sizes[order], counts)
        return float(sum(chance * each.ett(of).max() for chance, each in self._weighed))

    def _each_s(self) -> Floats:
        models = self._models
        effective = float(np.mean(models.cost.sizes(self._sizes)))
        return np.asarray(models.a * effective + models.c)

    def _solved(self, nearest: Ints) -> Ints:
        """Return the counts that would be best if all samples had the same size, [W].

        `nearest` are counts on the grid, [W]; samples beyond a multiple of the grid stay on their
        rank.
        """
        grid, rest, each_s = self._grid, nearest % self._grid, self._each_s()

        def times(blocks: Ints) -> Floats:
            samples = grid * blocks + rest
            return np.where(samples > 0, each_s * samples + self._models.b, 0.0)

        blocks = minmax(times, int((nearest // grid).sum()), (self._limits - rest) // grid)
        return np.asarray(grid * blocks + rest)

    def _shifted(self, ranks: Ints) -> Ints | None:
        """Return the counts after moving `grid` samples from the slowest rank, [W].

        The samples go to the rank that ends first with them. Return None if no rank can take them.
        """
        order, counts = grouped(ranks, self._models.world)
        end_s = self._models.ett(features(self._sizes[order], counts))
        giver, grid = int(np.argmax(end_s)), self._grid
        then_s = end_s + grid * self._each_s() + np.where(counts == 0, self._models.b, 0.0)
        then_s[(counts + grid > self._limits) | (np.arange(len(counts)) == giver)] = np.inf
        taker = int(np.argmin(then_s))
        if counts[giver] < grid or not np.isfinite(then_s[taker]):
            return None
        counts[giver] -= grid
        counts[taker] += grid
        return counts


def within_limits(
    batches: Assignment, policy: Policy, problem: Problem, models: Models
) -> Assignment:
    """Move samples between ranks until no local batch exceeds ``problem.token_limits``.

    If the policy balances batches by the models of the workers' times, the samples that exceed a
    worker's limit are divided among the other workers in the same way. If not, these samples go to
    the workers that are furthest below their limits.
    """
    limits = problem.token_limits
    if limits is None:
        return batches
    follows = policy.balances and problem.counts is None and policy.criteria.cost is not None
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
    return Assignment.joined(counts, samples, problem.world)


def _refilled(ranks: Ints, sizes: Floats, models: Models, limits: Floats) -> Ints:
    """Fill each worker that is over its limit up to the limit, and divide the other samples again.

    This is repeated until no worker is over its limit, or no other worker can take the samples.
    Return the rank of each sample, [n]. `sizes` has the size λ of each sample, [n]; `limits` the
    maximum sum of the sizes on each worker, [W].
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
