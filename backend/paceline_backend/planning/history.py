"""What an attempt has done so far: what is left of its epoch, and who holds which sample."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.core.cost import SUM
from paceline.wire import Hello, Moves, Segment
from paceline_backend.policies import Batches, Plan, Problem
from paceline_backend.policies.base import Floats, Ints, Policy, Storage
from paceline_backend.policies.solve.order import remaining_in_order
from paceline_backend.policies.solve.room import dealt

AHEAD = 4096  # steps beyond the adopted ones that a record may be of: ranks report at once
CHANGED = 0.1  # the shuffler runs again when a rank's share of the load has changed by so much,
CURVED = 2.0  # or κ by this factor
AHEAD_SHARE = 0.25  # of an epoch that is left when it is decided who holds what in the next
ROOM = 0.9  # of a node's storage that is planned: what moves is on two nodes for a while


class History:
    """The state of an attempt: what is left of its epoch, and who holds which sample.

    Segments are adopted in the order of their seq. After a gap (`lost`) it is unknown what remains
    of the epoch, until one ends, and who used a sample last, until each was used again; where ranks
    share batches, also which were shared, until `newest` is full again. Nothing may be planned on
    less, since the gap may be filled later, and replay then knows more. The policy's memory may
    have gone on in the gap, so it is forgotten.

    Args:
        hello: of the attempt.
        before: the last segment before it that a controller planned, if there is one.
    """

    def __init__(self, hello: Hello, before: Segment | None = None) -> None:
        self.hello = hello
        self._before = before  # until a controller has planned in this attempt
        self.sizes = hello.sizes_array()
        self.nodes = _numbered(hello)
        # Where data lives on nodes: their storage, and what no node has.
        self._storage = _storage(hello)
        self._moves: Moves | None = None  # that come into force with the next epoch, if decided
        self.epoch = hello.epoch
        self.seq = 0  # of the next segment
        self.step = hello.step  # its first
        self.lost = False
        self.newest: deque[Segment] = deque(maxlen=8)  # the latest that ran
        # What the last plan of a controller rested on.
        self.feedback: list[tuple[int, int]] = [] if before is None else before.feedback
        self._remaining = np.ones(len(self.sizes), bool)
        self._remaining[np.frombuffer(hello.used, "<u4")] = False
        self._holder: Ints = np.arange(len(self.sizes), dtype=np.int64) % hello.world
        if self._storage is not None and hello.shards is not None:
            self.nodes = np.array(hello.shards.nodes)
            self._holder = dealt(hello.shards.holders(), self.nodes, self._storage)
        self._holder_lent = False  # to a problem
        self._epoch_known = True  # `_remaining` is right
        self._holder_known = np.ones(len(self.sizes), bool)  # for which samples `_holder` is right
        # Of the shuffler's last run: its result, the scheduler's order without samples used since,
        # epoch and version (None: the result is not known here), the segment that it ran for, the
        # cost of a batch, and the shares of the load (empty: unknown).
        self._placement: Ints | None = None
        self._order: Ints | None = None
        self._shuffled_for: tuple[int, int] | None = None
        self._shuffled_seq = -1
        self._moves_for = (-1, -1)  # epoch and version of `_moves`
        self._cost = SUM
        self._shares: Floats = np.empty(0)
        self._memory: tuple[int, dict[str, Any]] = (-1, {})  # version; of its last segment
        self.anew = False  # for `Segment.anew`: the memory was forgotten
        self._profiles = [[(n, s) for n, s in rank] for rank in hello.profiles]

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return self.hello.epochs is not None and self.epoch >= self.hello.epochs

    @property
    def used(self) -> Ints:
        """The samples that the epoch has used so far, ascending."""
        return np.flatnonzero(~self._remaining)

    def must_shuffle(self, version: int) -> bool:
        """Whether the shuffler runs before the next segment (internals.md, "Policies")."""
        return self._shuffled_for != (self.epoch, version)

    def problem(self, steps: int, version: int, *, shuffle: bool) -> Problem:
        """The next segment as a problem.

        Args:
            steps: at most.
            version: of the policy that plans it.
            shuffle: the placement is that which the shuffler starts from, not its last result.
        """
        hello, storage = self.hello, self._storage
        if storage is not None and self._moves is not None:
            storage = storage.settled
        placed = self._placement is not None and not shuffle
        order = remaining = np.flatnonzero(self._remaining)
        if placed and self._order is not None:
            order = self._order
        elif hello.token_budget is not None:  # which samples a step holds is a matter of the order
            order = remaining_in_order(len(self.sizes), hello.seed, self.epoch, remaining)
        self._holder_lent = True
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
            memory=self.memory(version),
            nodes=self.nodes,
            uneven_steps=hello.uneven_steps,
            devices=hello.devices,
            grid=hello.grid,
            length_grid=hello.length_grid,
            storage=storage,
            token_budget=hello.token_budget,
            token_limits=np.array(hello.token_limits) if hello.token_limits else None,
        )

    def shares_data(self, policy: Policy) -> bool:
        """Whether data lives on several nodes, and the policy trains it where it is."""
        return self._storage is not None and policy.homes

    def ahead(self, steps: int, version: int, policy: Policy) -> Problem | None:
        """The whole next epoch, if it is time to decide who holds which samples in it.

        That is with the first segment after which a quarter of the epoch is left, or less.

        Args:
            steps: of the next segment.
            version: of the policy that plans it.
            policy: that plans it.
        """
        hello, last = self.hello, self.hello.epochs
        left = int(np.count_nonzero(self._remaining)) - steps * hello.global_batch
        if not self.shares_data(policy) or self._moves is not None or self.lost:
            return None
        if left > AHEAD_SHARE * len(self.sizes) or (last is not None and self.epoch + 1 >= last):
            return None
        return self.next_epoch(version)

    def next_epoch(self, version: int) -> Problem:
        """The whole next epoch, with the placement of what this one has used so far."""
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
        """What a policy version wanted to know when it plans next; empty if it never planned."""
        return self._memory[1] if self._memory[0] == version else {}

    def recall(self, feedback: list[tuple[int, int]]) -> None:
        """Takes up the memory of the attempt before, if feedback reaches back to it.

        To be called before each plan, so that a replay, which knows a plan's feedback, does alike.

        Args:
            feedback: the steps that the plan rests on.
        """
        if self._before is not None:
            reaches = bool(feedback) and feedback[0][0] < self.hello.step
            self._memory = (self._before.version, self._before.memory) if reaches else (-1, {})

    def forget_memory(self) -> None:
        """The policy plans next as if for the first time.

        A replay, or a controller that takes over, may still know the memory. Therefore the segment
        says that it was forgotten (`Segment.anew`).
        """
        self._memory, self._before = (-1, {}), None
        self.anew = True

    def shuffled(self, version: int, plan: Plan) -> None:
        """Notes that a segment is in force for which the shuffler ran, with what came of it.

        To be called before that segment is adopted.
        """
        self._placement, self._order = plan.placement, plan.order
        self._shares, self._cost = np.array(plan.shares), plan.cost
        self._shuffled_for, self._shuffled_seq = (self.epoch, version), self.seq

    def outdated(self, plan: Plan) -> bool:
        """Whether the shuffler ran, and steps were composed, for other speeds or another cost."""
        shares, cost, then = plan.shares, plan.cost, self._cost
        low, high = sorted((cost.kappa, then.kappa))
        if cost.padded != then.padded or high > CURVED * low:
            return True
        if not shares or not len(self._shares):
            return len(shares) != len(self._shares)
        change = np.abs(np.array(shares) - self._shares)
        return bool((change > CHANGED * self._shares).any())

    def adopt(self, segment: Segment) -> None:
        """Takes in the next segment that ran.

        If the shuffler ran for it and `shuffled` was not called, another controller planned it.
        What the shuffler made is in no segment, so the shuffler must run again.
        """
        if segment.seq != self.seq:
            self._missed()
        if segment.epoch != self.epoch:  # the script left an epoch early, or a gap hid its end
            self._begin_epoch(segment.epoch)
        if segment.shuffled and segment.seq != self._shuffled_seq:
            self._shuffled_for = None
        self.newest.append(segment)
        if self.hello.stream:  # nothing is planned on which samples are left
            self._epoch_known = True
        else:
            self._trained(segment)
        if segment.source == "controller":
            self.feedback = segment.feedback
            self._memory, self._before = (segment.version, segment.memory), None
            self.anew = False
        self.seq = segment.seq + 1
        self.step = segment.first_step + segment.steps
        if segment.epoch_end:
            self._begin_epoch(segment.epoch + 1)
            self._epoch_known = True
        if self.lost:
            # No policy that plans a stream lets ranks share batches.
            may_share = self.hello.uneven_steps and not self.hello.stream
            batches_known = not may_share or len(self.newest) == self.newest.maxlen
            self.lost = not (self._epoch_known and self._holder_known.all() and batches_known)

    def _missed(self) -> None:
        """There is a gap before the next segment."""
        self.lost = True
        self._epoch_known = False
        self._holder_known[:] = False
        self.newest.clear()
        self.forget_memory()

    def _trained(self, segment: Segment) -> None:
        """Takes in who trained which samples."""
        samples = np.frombuffer(segment.indices, "<u4").astype(np.int64)
        batches = Batches(np.asarray(segment.counts, np.int64), samples)
        self._remaining[samples] = False
        if segment.moves is not None:
            self._moves, self._moves_for = segment.moves, (segment.epoch + 1, segment.version)
        if self._storage is not None:
            loose = self._storage.loose.copy()  # problems made before keep theirs
            loose[samples] = False
            self._storage = replace(self._storage, loose=loose)
        if self._holder_lent:  # problems made before, and what was planned on them, keep theirs
            self._holder = self._holder.copy()
            self._holder_lent = False
        self._holder[samples] = batches.ranks()
        self._holder_known[samples] = True
        self._use_up(samples)

    def _use_up(self, samples: Ints) -> None:
        """Takes samples out of the order: usually its first ones."""
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
            self._holder_known[:] = False  # what moves now may have been decided in the gap
        self.epoch = epoch
        self._remaining[:] = True


def _storage(hello: Hello) -> Storage | None:
    """What nodes keep; None: data does not live on several nodes."""
    shards = hello.shards
    if shards is None or len(shards.limits) < 2:
        return None
    room = (np.array(shards.limits) * ROOM).astype(np.int64)
    return Storage(room, shards.lengths_array(), shards.holders() < 0)


def _numbered(hello: Hello) -> Ints | None:
    """The number of each rank's node, by the nodes' order; None: one node, or unknown."""
    names = list(dict.fromkeys(hello.placement))
    if len(names) < 2 or len(hello.placement) != hello.world:
        return None
    return np.array([names.index(name) for name in hello.placement])
