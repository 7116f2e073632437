"""The ledger of an epoch: it records used samples, validates segments and plans the next steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline.core.batch_limits.budget import Budget
from paceline.core.batch_limits.shapes import moved, moved_on_nodes, on_grid
from paceline.core.dealing import dealt, equal_counts
from paceline.core.terms import epoch_finished
from paceline.wire import Plan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_CHUNK_SAMPLES = 4096


@dataclass(frozen=True)
class BatchRules:
    """The rules that every step's batch follows, both in the controller's plans and while coasting.

    Args:
        global_batch: samples per step.
        drop_last: leave out an incomplete last step.
        limits: the maximum number of samples of each rank in a step. The sum of the limits is at
            least the global batch. None: there are no limits.
        grid: while coasting, each rank's number of samples is a multiple of `grid`, as far as
            limits and an epoch's last step permit; see `Shapes.samples`.
        budget: the token budget that limits each step, instead of `global_batch` samples. With a
            budget, steps must use the samples in the epoch's order, both in proposals and while
            coasting. None: steps have `global_batch` samples.
    """

    global_batch: int
    drop_last: bool = False
    limits: Ints | None = None
    grid: int = 1
    budget: Budget | None = None

    def epoch_finished(self, left: int) -> bool:
        """Return True if an epoch with `left` unused samples has no step left."""
        return epoch_finished(left, self.global_batch, self.drop_last)


class Ledger:
    """A record of which samples of one epoch are used. Not thread-safe.

    The leader creates a ledger for each epoch. The leader calls `refusal` for each proposed
    segment, or `coast` for a segment of its own, and records the adopted samples with `use`.

    Args:
        order: all samples in the order in which coasting uses them.
        used: samples that a resumed epoch has used already.
        ends: with a budget, `ends[s]` is the number of samples that the first s + 1 steps of this
            ledger have together. None: the ledger computes these numbers.
    """

    def __init__(
        self,
        epoch: int,
        order: Ints,
        rules: BatchRules,
        used: Ints | None = None,
        ends: Ints | None = None,
    ) -> None:
        self.epoch = epoch
        self._order = order
        self._unused = np.ones(len(order), dtype=bool)
        # Every sample before this position of the order is used.
        self._head = 0
        self._rules = rules
        self.left = len(order)
        if used is not None:
            self.use(used)
        self._to_use = self.left
        # With a budget: `_ends[s]` is the number of samples that the first s + 1 steps of this
        # ledger have together. Steps before a resume do not count.
        self._ends = ends
        if rules.budget is not None and ends is None:
            counts = rules.budget.counts(order if used is None else order[self._unused[order]])
            self._ends = np.cumsum(counts)

    @property
    def finished(self) -> bool:
        """True if no step is left."""
        return self.finished_with(self.left)

    def finished_with(self, left: int) -> bool:
        """Return True if no step is left when `left` samples are left."""
        return self._rules.epoch_finished(left)

    def batch_sizes(self, steps: int) -> list[int]:
        """Return the number of samples of each of the next steps.

        The number is the global batch, or less in an epoch's last step. With a budget, it is the
        number of samples that fit into the budget.
        """
        if self._ends is not None:
            done = self._to_use - self.left
            at = int(np.searchsorted(self._ends, done, "right"))
            counts = np.diff(self._ends[at : at + steps], prepend=done)
            return [int(count) for count in counts]
        full, rest = divmod(self.left, self._rules.global_batch)
        batches = [self._rules.global_batch] * min(full, steps)
        if rest and not self._rules.drop_last and full < steps:
            batches.append(rest)
        return batches

    def used(self) -> Ints:
        """Return the samples used so far, ascending."""
        return np.flatnonzero(~self._unused)

    def ignore_limits(self) -> None:
        """Plan the following steps as if ranks had no limits."""
        self._rules = replace(self._rules, limits=None)

    def use(self, indices: Ints) -> None:
        """Mark samples as used."""
        self._unused[indices] = False
        self.left -= len(indices)

    def refusal(self, plan: Plan, world: int) -> str | None:
        """Return the reason why a segment cannot be this epoch's next segment; None if it can."""
        if plan.epoch != self.epoch:
            return f"it is for epoch {plan.epoch}, not {self.epoch}"
        return plan.defect(world, len(self._unused)) or self._misfit(plan)

    def _misfit(self, plan: Plan) -> str | None:
        """Return why a segment breaks the batch rules or uses wrong samples; None: it does not."""
        limits, budget = self._rules.limits, self._rules.budget
        totals = [sum(row) for row in plan.counts]
        if totals != self.batch_sizes(len(totals)):
            return f"its steps have {totals} samples, not {self.batch_sizes(len(totals))}"
        if limits is not None and (plan.assignment.counts > limits).any():
            most = np.max(plan.counts, axis=0).tolist()
            return f"ranks get up to {most} samples a step; {limits.tolist()} fit in memory"
        indices = plan.assignment.samples
        if self._ends is not None and not self._in_order(indices, totals):
            return "its steps do not follow the epoch's order, which keeps them within the budget"
        if budget is not None:
            over = budget.excess(plan.assignment.counts, indices)
            if over is not None:
                return over
        if len(np.unique(indices)) != len(indices):
            return "a sample occurs twice"
        if not self._unused[indices].all():
            return f"sample {indices[~self._unused[indices]][0]} was already used"
        left = self.left - len(indices)
        if plan.epoch_end != self.finished_with(left):
            return f"epoch_end is {plan.epoch_end} with {left} samples left"
        return None

    def _in_order(self, indices: Ints, totals: list[int]) -> bool:
        """Return True if each of the next steps has its samples in the epoch's order."""
        step = np.repeat(np.arange(len(totals)), totals)
        due = self._next(len(indices))
        return np.array_equal(indices[np.lexsort((indices, step))], due[np.lexsort((due, step))])

    def coast(
        self,
        steps: int,
        world: int,
        sizes: Floats,
        shares: list[float],
        homes: tuple[Ints, Ints] | None = None,
    ) -> list[list[Ints]]:
        """Plan the next steps in the epoch's order; return their samples, [step][rank].

        The samples are not marked as used.

        With `shares`, samples are dealt from the largest to the smallest. Each goes to the rank
        whose load, including this sample, is the smallest in proportion to its share. Without
        `shares`, rank r of W ranks gets positions r, r + W, … of each global batch, as with
        DistributedSampler. A rank at its limit gets no more samples. Then a few samples move to
        other ranks, until each rank's number of samples is a multiple of the grid or, with a
        budget, no rank exceeds its limit.

        Args:
            steps: the maximum number of steps to plan.
            sizes: the size λ of each sample.
            shares: each rank's share of the load; empty: ranks get equal numbers of samples.
            homes: a pair: the node of each rank, and the node that stores each sample, or -1 if no
                node stores it. Then each sample goes to a rank of the node that stores it, unless
                that node's ranks are full or the grid prevents it. None: nodes are ignored.
        """
        batches = self.batch_sizes(steps)
        samples = self._next(sum(batches))
        parts = np.split(samples, np.cumsum(batches)[:-1])
        rules = self._rules
        limits = np.full(world, max(batches, default=0)) if rules.limits is None else rules.limits
        if homes is not None:
            nodes, of = homes
            speed = np.asarray(shares) if shares else np.ones(world)
            in_steps = [_deal_at_home(p, sizes[p], speed, limits, nodes, of[p]) for p in parts]
        elif shares:
            in_steps = [_deal(part, sizes[part], np.asarray(shares), limits) for part in parts]
        else:
            in_steps = [_deal_in_turn(part, limits) for part in parts]
        if rules.budget is not None:
            return [rules.budget.kept(of_step) for of_step in in_steps]
        if rules.grid == 1:
            return in_steps
        return [_gridded(of_step, rules.grid, rules.limits, homes) for of_step in in_steps]

    def _next(self, count: int) -> Ints:
        self._skip_used()
        window = count
        while True:
            ahead = self._order[self._head : self._head + window]
            ahead = ahead[self._unused[ahead]]
            if len(ahead) >= count:
                return ahead[:count]
            window *= 2

    def _skip_used(self) -> None:
        while self._head < len(self._order):
            unused = self._unused[self._order[self._head : self._head + _CHUNK_SAMPLES]]
            if unused.any():
                self._head += int(unused.argmax())
                return
            self._head += len(unused)


def _gridded(
    parts: list[Ints], grid: int, limits: Ints | None, homes: tuple[Ints, Ints] | None
) -> list[Ints]:
    """Move samples between a step's local batches until their counts are multiples of `grid`.

    Return the new local batch of each rank. With `homes`, few samples move between nodes.
    """
    before = np.array([len(part) for part in parts])
    ranks, samples = np.repeat(np.arange(len(parts)), before), np.concatenate(parts)
    if homes is None:
        counts = on_grid(before, grid, limits)
        ranks = moved(ranks, counts)
    else:
        nodes, of = homes
        counts = on_grid(before, grid, limits, nodes)
        ranks = moved_on_nodes(ranks, counts, nodes, of[samples] == nodes[ranks])
    return np.split(samples[np.argsort(ranks, kind="stable")], np.cumsum(counts)[:-1])


def _deal_in_turn(samples: Ints, limits: Ints) -> list[Ints]:
    world = len(limits)
    # If the samples run out before any rank reaches its limit, rank r gets samples r, r + world, ….
    if len(samples) <= world * limits.min():
        return [samples[rank::world] for rank in range(world)]
    counts = equal_counts(len(samples), limits)
    in_turn, ends = samples[dealt(counts)], np.cumsum(counts).tolist()
    return [in_turn[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _deal_at_home(
    samples: Ints, sizes: Floats, shares: Floats, limits: Ints, nodes: Ints, homes: Ints
) -> list[Ints]:
    """Deal samples, largest first, to ranks of the nodes that hold the samples."""
    pace = 1.0 / np.maximum(shares, shares[shares > 0].min(initial=1.0))
    load = np.where(limits > 0, 0.0, np.inf)
    parts: list[list[int]] = [[] for _ in shares]
    for position in np.argsort(-sizes, kind="stable"):
        done = (load + sizes[position]) * pace
        at_home = np.where(nodes == homes[position], done, np.inf)
        first = int(np.argmin(at_home if np.isfinite(at_home).any() else done))
        load[first] += sizes[position]
        parts[first].append(int(samples[position]))
        if len(parts[first]) == limits[first]:
            load[first] = np.inf
    return [np.asarray(part, dtype=np.int64) for part in parts]


def _deal(samples: Ints, sizes: Floats, shares: Floats, limits: Ints) -> list[Ints]:
    """Deal samples, largest first, to ranks of unequal speed."""
    shares = np.where(limits > 0, shares, 0.0)
    # If the ranks with a share cannot take all samples, ranks without a share get samples, too.
    if limits[shares > 0].sum() < len(samples):
        least = shares[shares > 0].min(initial=1.0)
        shares = np.where(limits > 0, np.maximum(shares, least), 0.0)
    able = np.flatnonzero(shares)
    load, pace = np.zeros(len(able)), 1.0 / shares[able]
    parts: list[list[int]] = [[] for _ in shares]
    for position in np.argsort(-sizes, kind="stable"):
        first = int(np.argmin((load + sizes[position]) * pace))
        load[first] += sizes[position]
        part = parts[able[first]]
        part.append(int(samples[position]))
        if len(part) == limits[able[first]]:
            load[first] = np.inf
    return [np.asarray(part, dtype=np.int64) for part in parts]
