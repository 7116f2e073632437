"""State of an attempt: the samples left in its epoch, and the rank that holds each sample.

The code that keeps a `History` calls `adopt` for each segment that ran; `store.planning.load` does
so for the segments in the database. `planning.offer` requests the next `Problem`, the planner's
input, from the history.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.cost import SUM, Cost
from paceline.policies import Problem, Shuffle
from paceline.policies.base import Floats, Ints, Policy, Storage
from paceline.policies.solve.nodes import dealt
from paceline.policies.solve.order import remaining_in_order
from paceline.wire import PLANNED, Hello, Moves, Plan

Bools = npt.NDArray[np.bool_]

# `load` reads records of at most this many steps after the adopted segments. Ranks report each step
# immediately, so their records may arrive before the segment is adopted.
AHEAD = 4096  # steps
# The shuffler is called again when a rank's share of the load has changed by this fraction, or the
# weight κ of the quadratic term of a batch's cost by the factor `CURVED`.
CHANGED = 0.1
CURVED = 2.0
# The next epoch's holders are planned when at most this fraction of the current epoch is left.
AHEAD_SHARE = 0.25
# Plans use this fraction of a node's storage, because a sample that moves is on two nodes for a
# while.
ROOM = 0.9


class History:
    """The state of an attempt: the samples left in its epoch, and the rank that holds each sample.

    Segments are adopted in the order of their seq. After a gap (`lost`), it is unknown which
    samples the epoch has not used, until an epoch ends; and which rank used a sample last, until
    each sample was used again. Where ranks share batches, it is also unknown which batches were
    shared, until `newest` is full of segments after the gap. While `lost` is true, no caller may
    plan: if the gap is filled later, a replay would plan from a more complete history and get
    another result. The gap may also hide changes of the policy's state (`memory`), so the state is
    forgotten. `before` is the last segment planned by a controller before this attempt.
    """

    def __init__(self, hello: Hello, before: Plan | None = None) -> None:
        self.hello = hello
        # Last segment that a controller planned in an earlier attempt; None once a controller has
        # planned in this attempt.
        self._before = before
        self.sizes = hello.sizes_array()
        self.nodes = _numbered(hello)
        # If nodes store data: the size of their storage, and the samples that no node stores.
        self._storage = _storage(hello)
        # Moves that take effect with the next epoch; None until they are planned.
        self._moves: Moves | None = None
        self.epoch = hello.epoch
        # The seq and the first step of the next segment.
        self.seq = 0
        self.step = hello.step
        self.lost = False
        # The latest segments that ran.
        self.newest: deque[Plan] = deque(maxlen=8)
        # The steps that the last plan of a controller used as feedback.
        self.feedback: list[tuple[int, int]] = [] if before is None else before.feedback
        self._remaining = np.ones(len(self.sizes), bool)
        self._remaining[np.frombuffer(hello.used, "<u4")] = False
        self._holder: Ints = np.arange(len(self.sizes), dtype=np.int64) % hello.world
        if self._storage is not None and hello.shards is not None:
            self.nodes = np.array(hello.shards.nodes)
            self._holder = dealt(hello.shards.holders(), self.nodes, self._storage)
        # True if a `Problem` refers to the array `_holder`, which must then be copied before it
        # changes.
        self._holder_shared = False
        # False after a gap, because `_remaining` may then be wrong.
        self._epoch_known = True
        # True for each sample whose holder is known; for the others, `_holder` may be wrong.
        self._holder_known = np.ones(len(self.sizes), bool)
        # Placement that the shuffler's last call returned; None: unknown.
        self._placement: Ints | None = None
        # Order that the scheduler's `compose` returned after the shuffler's last call, without the
        # samples used since; None: unknown.
        self._order: Ints | None = None
        # Epoch and policy version of the shuffler's last call; None: its result is unknown.
        self._shuffled_for: tuple[int, int] | None = None
        # Seq of the segment for which the shuffler was called.
        self._shuffled_seq = -1
        # Epoch and policy version for which `_moves` were planned.
        self._moves_for = (-1, -1)
        # What the shuffler's last call assumed: the cost of a batch, and each rank's share of the
        # load. Shares are empty if they are unknown.
        self._cost = SUM
        self._shares: Floats = np.empty(0)
        # The policy version that planned last, and the state that its last segment contains.
        self._memory: tuple[int, dict[str, Any]] = (-1, {})
        # True if a policy has planned a segment of the run.
        self._follows_plan = before is not None
        # True if the policy's state was forgotten after the last plan; becomes the `Plan.anew` of
        # the next plan.
        self.anew = False
        self._profiles = [[(n, s) for n, s in rank] for rank in hello.profiles]

    @property
    def finished(self) -> bool:
        """True if all epochs are done."""
        return self.hello.epochs is not None and self.epoch >= self.hello.epochs

    @property
    def used(self) -> Ints:
        """Samples that the epoch has used so far, ascending."""
        return np.flatnonzero(~self._remaining)

    def must_shuffle(self, version: int) -> bool:
        """Return True if the shuffler must run before the next segment.

        docs/internals.md, "Policies and planning", describes when the shuffler runs.
        """
        return self._shuffled_for != (self.epoch, version)

    def problem(self, steps: int, version: int, *, shuffle: bool) -> Problem:
        """Return the planner's input for the next segment, which has at most `steps` steps.

        With `shuffle`, the input contains the placement from which the shuffler starts; otherwise
        the placement that the shuffler returned last, if that is known. `version` is the policy
        version that plans.
        """
        hello, storage = self.hello, self._storage
        if storage is not None and self._moves is not None:
            storage = storage.settled
        placed = self._placement is not None and not shuffle
        order = remaining = np.flatnonzero(self._remaining)
        if placed and self._order is not None:
            order = self._order
        # With a token budget, the samples of a step depend on the order.
        elif hello.token_budget is not None:
            order = remaining_in_order(len(self.sizes), hello.seed, self.epoch, remaining)
        self._holder_shared = True
        return Problem(
            sizes=self.sizes,
            remaining=remaining,
            order=order,
            placement=self._placement if placed and self._placement is not None else self._holder,
            epoch=self.epoch,
            first_step=self.step,
            steps=steps,
            global_batch=hello.global_batch,
            world=hello.world,
            seed=hello.seed,
            drop_last=hello.drop_last,
            limits=np.array(hello.limits) if hello.limits else None,
            profiles=self._profiles,
            follows_plan=self._follows_plan,
            memory=self.memory(version),
            nodes=self.nodes,
            uneven_steps=hello.uneven_steps,
            devices=hello.devices,
            grid=hello.grid,
            length_grid=hello.length_grid,
            storage=storage,
            token_budget=hello.token_budget,
            token_limits=np.array(hello.token_limits) if hello.token_limits else None,
            seq=self.seq,
            version=version,
        )

    def shares_data(self, policy: Policy) -> bool:
        """Return True if several nodes store data and the policy trains each sample on its node."""
        return self._storage is not None and policy.homes

    def ahead(self, steps: int, version: int, policy: Policy) -> Problem | None:
        """Return the planner's input for the next epoch, or None if it need not be planned yet.

        The ranks that will hold the next epoch's samples are planned together with the first
        segment that leaves at most `AHEAD_SHARE` of the current epoch. `steps` is the number of
        steps of the segment that is about to be planned.
        """
        hello, last = self.hello, self.hello.epochs
        left = int(np.count_nonzero(self._remaining)) - steps * hello.global_batch
        if not self.shares_data(policy) or self._moves is not None or self.lost:
            return None
        if left > AHEAD_SHARE * len(self.sizes) or (last is not None and self.epoch + 1 >= last):
            return None
        return self.next_epoch(version)

    def next_epoch(self, version: int) -> Problem:
        """Return the planner's input for the whole next epoch, in which no sample is used yet.

        Each sample is placed on the rank that used it last.
        """
        assert self._storage is not None
        problem = self.problem(0, version, shuffle=True)
        everything = np.arange(len(self.sizes))
        return replace(
            problem,
            remaining=everything,
            order=everything,
            epoch=self.epoch + 1,
            storage=replace(self._storage, ahead=True),
        )

    def memory(self, version: int) -> dict[str, Any]:
        """Return a policy version's state after its last plan; empty if it never planned."""
        return self._memory[1] if self._memory[0] == version else {}

    def recall(self, feedback: list[tuple[int, int]]) -> None:
        """Restore the policy's state from the previous attempt if the feedback reaches back to it.

        The caller must call this before each plan, with the steps of the plan's feedback. A replay,
        which knows these steps, then restores the same state.
        """
        if self._before is not None:
            reaches = bool(feedback) and feedback[0][0] < self.hello.step
            self._memory = (self._before.version, self._before.memory) if reaches else (-1, {})

    def forget_memory(self) -> None:
        """Clear the policy's state, so that the policy plans next as if for the first time.

        A replay, or a controller that takes over, may still know the state. Therefore the segment
        records that the state was forgotten (`Plan.anew`).
        """
        self._memory, self._before = (-1, {}), None
        self.anew = True

    def shuffled(self, plan: Plan, shuffle: Shuffle) -> None:
        """Store the shuffler's result for a segment; call this before the segment is adopted."""
        self._placement, self._order = shuffle.placement, shuffle.order
        self._shares, self._cost = np.array(plan.shares), shuffle.cost
        self._shuffled_for, self._shuffled_seq = (self.epoch, plan.version), self.seq

    def outdated(self, plan: Plan, cost: Cost) -> bool:
        """Return True if the last shuffle assumed other speeds or another cost than this plan."""
        shares, then = plan.shares, self._cost
        low, high = sorted((cost.kappa, then.kappa))
        if cost.padded != then.padded or high > CURVED * low:
            return True
        if not shares or not len(self._shares):
            return len(shares) != len(self._shares)
        change = np.abs(np.array(shares) - self._shares)
        return bool((change > CHANGED * self._shares).any())

    def adopt(self, plan: Plan) -> None:
        """Add the next segment that ran.

        If the shuffler ran for the segment, but `shuffled` was not called, another controller
        planned the segment. Segments do not contain the shuffler's result, so the shuffler must run
        again.
        """
        if plan.seq != self.seq:
            self._lose_track()
        # If the epochs differ, the script left an epoch early, or a gap hid the end of the epoch.
        if plan.epoch != self.epoch:
            self._begin_epoch(plan.epoch)
        if plan.shuffled and plan.seq != self._shuffled_seq:
            self._shuffled_for = None
        self.newest.append(plan)
        # Plans for a stream do not depend on the samples that are left.
        if self.hello.stream:
            self._epoch_known = True
        else:
            self._trained(plan)
        if plan.source in PLANNED:
            self.feedback = plan.feedback
            self._memory, self._before = (plan.version, plan.memory), None
            self.anew, self._follows_plan = False, True
        self.seq = plan.seq + 1
        self.step = plan.first_step + plan.steps
        if plan.epoch_end:
            self._begin_epoch(plan.epoch + 1)
            self._epoch_known = True
        if self.lost:
            # No policy that plans a stream lets ranks share batches.
            may_share = self.hello.uneven_steps and not self.hello.stream
            batches_known = not may_share or len(self.newest) == self.newest.maxlen
            self.lost = not (self._epoch_known and self._holder_known.all() and batches_known)

    def restore(
        self,
        used: Bools,
        holder: Ints,
        trained: Bools,
        moves: tuple[Moves, tuple[int, int]] | None,
        planned: Plan | None,
    ) -> None:
        """Set the state after all segments, of which only the newest were adopted; see `Followed`.

        The shuffler's last result stays unknown, so the shuffler must run before the next segment.

        Args:
            used: True for each sample that the epoch has used, [N].
            holder: the rank that holds each sample, [N]; -1: as at the attempt's start.
            trained: True for each sample that this attempt has trained, [N].
            moves: planned moves that take effect with the next epoch, with that epoch and the
                policy version that planned them.
            planned: the last segment that a policy planned.
        """
        if not self.hello.stream:
            self._remaining = ~used
            self._holder = np.where(holder >= 0, holder, self._holder)
            if self._storage is not None:
                loose = self._storage.loose & ~trained
                self._storage = replace(self._storage, loose=loose)
        if planned is not None:
            self.feedback = planned.feedback
            self._memory, self._before = (planned.version, planned.memory), None
            self._follows_plan = True
        self._moves, self._moves_for = (None, (-1, -1)) if moves is None else moves
        self._placement = self._order = self._shuffled_for = None
        self._shuffled_seq = -1
        self.anew = self.lost = False
        self._epoch_known = True
        self._holder_known[:] = True

    def _lose_track(self) -> None:
        self.lost = True
        self._epoch_known = False
        self._holder_known[:] = False
        self.newest.clear()
        self.forget_memory()

    def _trained(self, plan: Plan) -> None:
        samples = plan.assignment.samples
        self._remaining[samples] = False
        if plan.moves is not None:
            self._moves, self._moves_for = plan.moves, (plan.epoch + 1, plan.version)
        if self._storage is not None:
            # Copy the arrays, because each `Problem` that was made earlier, and its plan, refer to
            # them.
            loose = self._storage.loose.copy()
            loose[samples] = False
            self._storage = replace(self._storage, loose=loose)
        if self._holder_shared:
            self._holder = self._holder.copy()
            self._holder_shared = False
        self._holder[samples] = plan.assignment.ranks()
        self._holder_known[samples] = True
        self._remove_from_order(samples)

    def _remove_from_order(self, samples: Ints) -> None:
        if self._order is None:
            return
        first, rest = self._order[: len(samples)], self._order[len(samples) :]
        if np.array_equal(np.sort(first), np.sort(samples)):
            self._order = rest
        else:
            self._order = self._order[self._remaining[self._order]]

    def _begin_epoch(self, epoch: int) -> None:
        if self._moves is not None:
            samples, ranks = self._moves.arrays()
            self._holder = self._holder.copy()
            self._holder[samples] = ranks
            self._placement, self._order = self._holder.copy(), None
            self._shuffled_for = self._moves_for
            self._moves = None
        elif self._storage is not None and not self._epoch_known:
            # Moves for this epoch may have been planned in the gap, so the holders are unknown.
            self._holder_known[:] = False
        self.epoch = epoch
        self._remaining[:] = True


def _storage(hello: Hello) -> Storage | None:
    shards = hello.shards
    if shards is None or len(shards.limits) < 2:
        return None
    room = (np.array(shards.limits) * ROOM).astype(np.int64)
    return Storage(room, shards.lengths_array(), shards.holders() < 0)


def _numbered(hello: Hello) -> Ints | None:
    """Return the index of each rank's node; None: there is one node, or nodes are unknown."""
    names = list(dict.fromkeys(hello.placement))
    if len(names) < 2 or len(hello.placement) != hello.world:
        return None
    return np.array([names.index(name) for name in hello.placement])
