"""The leader (rank 0) adopts the next segment and distributes its shards to the ranks.

Rank 0's follower calls `Leader.advance` for each segment. The leader adopts the controller's newest
valid proposal. If no proposal arrives in time, the leader coasts: it plans a few steps itself, with
the last segment's policy, synchronisation and split of the load.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.batch_limits.budget import Budget
from paceline.core.cost import features
from paceline.core.dealing import cut, cut_within
from paceline.core.ledger import BatchRules, Ledger
from paceline.core.pool import is_pooled
from paceline.core.streaming.ledger import StreamLedger
from paceline.core.terms import Terms
from paceline.train.checkpoint.position import Position
from paceline.train.context import RunContext
from paceline.train.epochs import epoch_order
from paceline.train.plan.homes import Homes
from paceline.train.plan.proposals import Proposals
from paceline.train.plan_shard import MicroBatch, PlanShard, left_key, put_shard, shard_key
from paceline.train.startup import Startup
from paceline.train.streams.gathering import Gathering
from paceline.train.sync import pool
from paceline.wire import ALLREDUCE, MOST_WHY, Adopted, Assignment, Plan, pack_samples

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

# Seconds for which the leader waits for a proposal if the controller seems alive and no long wait
# is due.
PROPOSAL_WAIT_S = 0.05
# Maximum number of steps that are coasted in one segment, because a switch of the policy takes
# effect only after these steps.
MOST_COASTED = 16
# Maximum number of seconds of training in one coasted segment, if plans arrive too late even for
# `MOST_COASTED` steps. On an overloaded machine planning takes seconds, in which small models train
# for many steps.
MOST_COASTED_S = 10.0
# If nobody plans, or local batches must stay equal, a coasted segment lasts at least
# `ALONE_S` seconds, but has at most `MOST_ALONE` steps. Planning it takes 0.5 ms. Segments may be
# long then, because no switch of the policy waits for their end.
ALONE_S, MOST_ALONE = 0.25, 64
# The leader makes a long wait for a plan only after this many plans came too late.
MOST_LATE = 8
# Seconds of the first long wait, in which the leader waits for a plan because plans always come too
# late. If no plan arrives, the next wait is twice as long, up to `LONGEST_WAIT_S`.
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 5.0
# The time between two long waits is at least this multiple of the next wait's length, so waiting
# takes at most a twentieth of the time.
BETWEEN_WAITS = 20.0
# Number of newest segments from which the time of a step is estimated.
_PACE = 8
# Number of bytes of a sample's index in the result of `pack_samples`.
_SAMPLE_BYTES = 4

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Maximum number of seconds that rank 0 keeps the store for other ranks after its loop ended early.
_FAREWELL_S = 2.0
# Maximum number of seconds that rank 0 keeps the store once all ranks have read the end of the
# plan, so that they can announce that they leave.
_LEAVING_S = 0.5
# Maximum number of seconds that rank 0 keeps the store for ranks that still compute, and that will
# read the end of the plan.
_FAREWELL_TO_END_S = 600.0


class Leader:
    """Source of all ranks' segments: adopted proposals, or coasted segments if none came in time.

    Rank 0 has the only leader. Not thread-safe, except `asked_to_end`.

    Args:
        context: the run's terms and limits, and where its data is.
        startup: rank 0's result of the start-up. If several ranks share each batch, all ranks of a
            group read copies of the group's shards.
        start: position at which training begins; its `used` has the samples that the epoch used in
            earlier attempts.
        proposals: the plans of a controller or of rank 0; None: nobody plans.
        announce: called with each adopted segment.
        uneven: returns True if ranks may have different numbers of iterations of the script's loop.
    """

    def __init__(
        self,
        context: RunContext,
        startup: Startup,
        start: Position,
        *,
        proposals: Proposals | None = None,
        announce: Callable[[Adopted], None] | None = None,
        uneven: Callable[[], bool] = lambda: False,
    ) -> None:
        assert startup.sizes is not None, "rank 0 has the sizes"
        terms, limits = context.terms, context.limits
        self._homes = Homes(context.data.shards) if context.data is not None else None
        self._uneven = uneven
        # File whose existence announces that nodes will join or leave, so that the plan must end.
        self._reform = context.environment.reform
        # Set to True, by any thread, to end the plan as an operator's stop does.
        self.asked_to_end = False
        self._terms = terms
        self._world = startup.world
        # Size λ of each sample, [N]; empty for a stream.
        self._given_sizes = startup.sizes
        self._store = startup.store
        self._stores = [startup.store, *startup.stores[1:]]
        self._proposals = proposals
        self._attempt = context.environment.attempt
        self._announce = announce
        # Maximum that each rank computes in one pass, [W]: a number of samples, or a total size if
        # there is a token budget. Larger local batches are cut into micro-batches.
        self._micro = limits.of_micro_batches or limits.tokens_of_micro_batches
        self._epoch_steps = context.epoch_steps
        budget: Budget | None = None
        if terms.token_budget is not None:
            tokens = limits.tokens_of_parts
            most = np.array(tokens) if tokens else None
            budget = Budget(terms.token_budget, startup.sizes, most)
        self._rules = BatchRules(
            terms.global_batch,
            terms.drop_last,
            np.array(limits.of_parts) if limits.of_parts else None,
            terms.shapes.samples,
            budget,
        )
        self._stream: Gathering | None = None
        if context.reader is not None:
            stream = context.reader.stream
            self._stream = Gathering(stream, self._rules, terms.seed, startup.world, startup.store)
        self._ledger = self._ledger_of(start.epoch, start.used)
        # The next segment's first step.
        self._step = start.step
        self._last: Plan | None = None
        # Number of the newest segment in the store.
        self._newest = -1
        # Number of proposals that had arrived when the last segment was chosen.
        self._received = 0
        # The reason why ranks get equal local batches and proposals are ignored; empty: proposals
        # are used.
        self._equal_because = ""
        # Number of steps to coast: more than in the run's terms while the controller's plans arrive
        # too late.
        self._coast_steps = terms.coast_steps
        self._waits = Waits()
        # The times at which the newest segments were chosen, and their first steps.
        self._begun: deque[tuple[float, int]] = deque(maxlen=_PACE)
        # The newest step in which the optimiser stepped. The loop sets this attribute, and does not
        # call `used` with an earlier step.
        self.stepped = -1
        # The epoch's adopted segments that have steps after `stepped`. For each segment: its first
        # step, its samples, and the number of its samples up to the end of each step.
        self._ahead: deque[tuple[int, Ints, Ints]] = deque()

    def _ledger_of(self, epoch: int, used: Ints | None = None) -> Ledger | StreamLedger:
        terms = self._terms
        if self._stream is not None:
            return self._stream.begin(epoch)
        order = epoch_order(terms.samples, terms.seed, epoch)
        return Ledger(epoch, order, self._rules, used, self._epoch_steps.ends(epoch, used))

    @property
    def _sizes(self) -> Floats:
        """Return the size λ of each sample; for a stream, of each sample that ranks have read."""
        return self._given_sizes if self._stream is None else self._stream.ledger.sizes

    @property
    def seq(self) -> int:
        """Return the number of the next segment."""
        return 0 if self._last is None else self._last.seq + 1

    def advance(self, epoch: int) -> PlanShard:
        """Distribute the next segment of an epoch, or the end of the plan (see `PlanShard.stop`).

        Return rank 0's shard, which is not in the store.
        """
        if epoch != self._ledger.epoch:
            self._ledger = self._ledger_of(epoch)
            self._ahead.clear()
        if self._homes is not None:
            self._homes.enter(epoch)
        if self._reform is not None and self._reform.exists():
            logger.info("nodes join or leave: all ranks end before step %d", self._step)
            return self._end(epoch, reform=True)
        if self._stream is not None and (why := self._stream.gather(self._stops)):
            return self._end(epoch, reform=False, failed=why)
        segment = self._proposed()
        if self._stops():
            reason = self._proposals.stop_reason if self._proposals is not None else None
            logger.warning("stopping: %s", reason or "the process received a signal to end")
            return self._end(epoch, reform=False)
        return self._adopt(segment or self._coasted())

    def keep_equal(self, why: str, *, ignore_limits: bool = False) -> None:
        """Plan with equal local batches from now on, and ignore proposals; `why` is the reason.

        With `ignore_limits`, local batches are equal even if they exceed a rank's limit. Call it
        before the first step.
        """
        self._equal_because = why[:MOST_WHY]
        if ignore_limits and isinstance(self._ledger, Ledger):
            self._rules = replace(self._rules, limits=None)
            self._ledger.ignore_limits()

    def _stops(self) -> bool:
        return self.asked_to_end or (
            self._proposals is not None and self._proposals.stop_reason is not None
        )

    def used(self, step: int) -> Ints:
        """Return the epoch's samples used by steps up to and including `step`, ascending.

        `step` must not be earlier than `stepped`.
        """
        planned = [
            samples[ends[min(step - first, len(ends) - 1)] if step >= first else 0 :]
            for first, samples, ends in self._ahead
        ]
        return np.setdiff1d(self._ledger.used(), np.concatenate([[], *planned]))

    def unread(self) -> bool:
        """Return whether a rank still has to read its newest shard; ignore ranks that have left."""
        return any(store.check([shard_key(self._newest, rank)]) for store, rank in self._present())

    def wait_for_readers(
        self, *, at_the_end: bool, failed: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until no other rank needs the store, which ends with this rank's process.

        A rank no longer needs the store once it has read the end of the plan, or has left.
        `at_the_end`: the loop ran to its end on this rank, so ranks that still compute will read
        the end of the plan, too. `failed` returns True if ranks are out of step, so that some ranks
        never read the end of the plan.
        """
        needed = self.unread if at_the_end else self._present
        began = time.monotonic()
        warned = False
        while needed():
            waited = time.monotonic() - began
            if failed() or waited >= (_FAREWELL_TO_END_S if at_the_end else _FAREWELL_S):
                return
            if waited >= _FAREWELL_S and not warned:
                logger.warning("waiting for a rank that has not reached the end of the plan yet")
                warned = True
            time.sleep(0.01)
        # Wait a moment for ranks that are about to announce that they leave. If the store ended
        # first, the announcement would fail, and torch would print a stack trace.
        until = time.monotonic() + _LEAVING_S
        while at_the_end and time.monotonic() < until and self._present():
            time.sleep(0.01)

    def _present(self) -> list[tuple[Store, int]]:
        others = [(store, rank) for store in self._stores for rank in range(self._world)][1:]
        return [(store, rank) for store, rank in others if not store.check([left_key(rank)])]

    def _end(self, epoch: int, *, reform: bool, failed: str = "") -> PlanShard:
        end = PlanShard(
            *(epoch, self.seq, self._step, [], [], [], [], b"", False),
            stop=True,
            reform=reform,
            failed=failed,
        )
        self._put(self.seq, [end] * self._world)
        return end

    def _put(self, seq: int, shards: list[PlanShard]) -> None:
        self._newest = seq
        for store in self._stores:
            for rank, shard in enumerate(shards):
                if rank > 0 or store is not self._store:
                    put_shard(store, seq, rank, shard)

    def _proposed(self) -> Plan | None:
        proposals = self._proposals
        if proposals is None:
            return None
        if self._equal_because:
            # This call discards proposals, so that they do not accumulate in memory.
            proposals.take(self.seq, 0.0)
            return None
        patience_s = self._patience_s(proposals)
        made = self._taken(proposals, time.monotonic() + patience_s)
        if made is None:
            self._consider_lateness(proposals)
        else:
            self._coast_steps = self._terms.coast_steps
        self._received = proposals.received
        if patience_s > PROPOSAL_WAIT_S:
            self._waits.waited(came=made is not None)
        elif made is not None:
            self._waits.in_time()
        return made

    def _taken(self, proposals: Proposals, deadline: float) -> Plan | None:
        while proposal := proposals.take(self.seq, deadline - time.monotonic()):
            plan = proposal.plan
            refusal = self._ledger.refusal(plan, self._world)
            if plan.first_step != self._step:
                refusal = f"it begins at step {plan.first_step}, not {self._step}"
            if refusal is None:
                return plan if self._stream is None else self._stream.ledger.filled(plan)
            logger.warning(
                "proposal for segment %d from controller %s refused: %s",
                plan.seq,
                proposal.controller,
                refusal,
            )
        return None

    def _consider_lateness(self, proposals: Proposals) -> None:
        """Double the number of coasted steps if a plan came for a segment that has begun already.

        If planning takes longer than the coasted steps, plans would always be too late, and the
        policy would never take effect.
        """
        newest = proposals.newest
        if (
            newest is not None
            and proposals.received > self._received
            and newest.plan.seq < self.seq
        ):
            self._coast_steps = min(2 * self._coast_steps, self._most_coasted())
            self._waits.late()

    def _most_coasted(self) -> int:
        return max(MOST_COASTED, self._steps_in(MOST_COASTED_S))

    def _steps_in(self, seconds: float) -> int:
        """Estimate the number of steps that fit into a duration; 0 if no step time is known."""
        if not self._begun:
            return 0
        began, first = self._begun[0]
        return int(seconds * (self._step - first) / max(time.monotonic() - began, 1e-3))

    def _patience_s(self, proposals: Proposals) -> float:
        """Return the seconds to wait for a proposal: 0 unless the controller seems alive.

        The controller seems alive if it made the last segment, or has proposed a segment since
        then.
        """
        kept_up = self._last is not None and self._last.source != "coast"
        if not kept_up and proposals.received == self._received:
            return 0.0
        return max(PROPOSAL_WAIT_S, self._waits.due_s)

    def _coasted(self) -> Plan:
        last = self._last
        started = time.perf_counter()
        shares = list(last.shares) if last is not None else []
        synchroniser = last.synchroniser if last is not None else ALLREDUCE
        # Under relaxed synchronisation ranks synchronise at a segment's end, so segments should be
        # long.
        steps = min(self._coast_steps, self._most_coasted())
        if self._proposals is None or self._equal_because:
            steps = max(steps, min(MOST_ALONE, self._steps_in(ALONE_S)))
        if synchroniser != ALLREDUCE:
            steps = max(MOST_COASTED, steps)
        homes = None
        if self._homes is not None and last is not None and last.homes:
            homes = self._homes.nodes, self._homes.of
        paces = last.paces if last is not None else None
        if self._stream is not None:
            self._stream.ledger.paces = paces
        batches = self._ledger.coast(steps, self._world, self._sizes, shares, homes)
        assignment = Assignment.of(batches, self._world)
        made = Plan(
            seq=self.seq,
            epoch=self._ledger.epoch,
            first_step=self._step,
            counts=assignment.counts.tolist(),
            indices=pack_samples(assignment.samples),
            policy=last.policy if last is not None else "bsp",
            version=last.version if last is not None else 0,
            source="equal" if self._equal_because else "coast",
            epoch_end=self._ledger.finished_with(self._ledger.left - len(assignment.samples)),
            shares=shares,
            plan_s=time.perf_counter() - started,
            threads=list(last.threads) if last is not None else [],
            synchroniser=synchroniser,
            why=self._equal_because,
            homes=homes is not None,
            paces=paces,
        )
        return made.keeping(assignment)

    def _adopt(self, plan: Plan) -> PlanShard:
        assignment = plan.assignment
        pooled = self._pools(plan)
        plan = msgspec.structs.replace(plan, pooled=pooled).keeping(assignment)
        shards = self._shards(plan)
        if plan.pooled:
            pool.put(self._store, shards)
        # The nodes' shards are added last: they are long, and only the ranks with a prefetcher
        # need them.
        if self._homes is not None:
            for rank, of_node in zip(
                self._homes.prefetchers, self._homes.node_shards(plan), strict=True
            ):
                shards[rank] = msgspec.structs.replace(shards[rank], node=of_node)
        self._put(plan.seq, shards)
        while self._ahead and self._ahead[0][0] + len(self._ahead[0][2]) - 1 <= self.stepped:
            self._ahead.popleft()
        ends = np.cumsum(assignment.counts.sum(axis=1))
        self._ahead.append((plan.first_step, assignment.samples, ends))
        self._ledger.use(assignment.samples)
        self._begun.append((time.monotonic(), self._step))
        self._step += plan.steps
        self._last = plan
        if self._announce is not None:
            self._announce(Adopted(self._attempt, plan, time.time()))
        return shards[0]

    def _pools(self, plan: Plan) -> bool:
        return self._world > 1 and is_pooled(plan.synchroniser) and self._uneven()

    def _shards(self, plan: Plan) -> list[PlanShard]:
        counts, samples = plan.assignment.counts, plan.assignment.samples
        of = features(self._sizes[samples], counts)
        samples, ends = _by_rank(samples, counts)
        micro: list[list[list[MicroBatch]]] = [[]] * self._world
        if self._micro:
            of_ranks = np.split(samples, ends[:-1])
            whole = zip(self._micro, of_ranks, counts.T, of.load.T, strict=True)
            made = [cut_steps(*of_rank, self._sizes, self._terms) for of_rank in whole]
            samples = np.concatenate([in_order for in_order, _ in made])
            micro = [pieces for _, pieces in made]
        # Ranks identify a sample of a stream by the number of samples that they had read before it.
        if self._stream is not None:
            samples = self._stream.ledger.places[samples]
        uneven = np.flatnonzero((counts != counts[:, :1]).any(axis=1)).tolist()
        weights = weights_of(self._terms.loss_mean, counts, of.load)
        ett: list[list[float]] = np.transpose(plan.ett_s).tolist() or [[]] * self._world
        # Each array is converted to a list at once, which is faster than one conversion per rank.
        columns = zip(
            counts.T.tolist(),
            of.load.T.tolist(),
            weights.T.tolist(),
            ett,
            _packed(samples, ends),
            of.squares.T.tolist(),
            of.longest.T.tolist(),
            plan.threads or [0] * self._world,
            micro,
            strict=True,
        )
        return [
            PlanShard(
                epoch=plan.epoch,
                segment=plan.seq,
                first_step=plan.first_step,
                counts=of_rank,
                loads=loads,
                weights=weights,
                ett_s=ett_s,
                indices=indices,
                epoch_end=plan.epoch_end,
                squares=squares,
                longest=longest,
                threads=threads,
                synchroniser=plan.synchroniser,
                pooled=plan.pooled,
                micro=cuts,
                uneven=uneven,
            )
            for of_rank, loads, weights, ett_s, indices, squares, longest, threads, cuts in columns
        ]


def weights_of(loss_mean: str, counts: Ints, loads: Floats) -> Floats:
    """Return each rank's weight in the update, [steps, W].

    `counts` are numbers of samples, `loads` the sums of the samples' sizes, [steps, W] each. See
    `Session` for `loss_mean`.
    """
    if loss_mean == "ranks":
        of_ranks: Floats = (counts > 0) / counts.shape[1]
        return of_ranks
    share = counts if loss_mean == "samples" else loads
    weights: Floats = share / share.sum(axis=1, keepdims=True)
    return weights


def _by_rank(samples: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Regroup samples from step-major to rank-major order, by the `counts`, [steps, W].

    Also return the end of each rank's samples, [W].
    """
    ranks = np.tile(np.arange(counts.shape[1]), counts.shape[0])
    in_order = np.argsort(np.repeat(ranks, counts.ravel()), kind="stable")
    return samples[in_order], np.cumsum(counts.sum(axis=0))


def _packed(samples: Ints, ends: Ints) -> list[bytes]:
    """Return each rank's samples as bytes, [W]; `ends` has the end of each rank's samples, [W]."""
    packed, cuts = pack_samples(samples), (_SAMPLE_BYTES * ends).tolist()
    return [packed[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]


class Waits:
    """Schedule of a few long waits for plans that always arrive late, on an overloaded machine.

    Coasting for more steps gives the controller more time, but a segment ends with its epoch, and
    epochs may be short. Without long waits, no plan and no switch of the policy would ever take
    effect. A single plan is useful for long, because coasting repeats its split of the load.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._late = 0
        self._next_s = FIRST_WAIT_S
        self._waited_at = clock()

    @property
    def due_s(self) -> float:
        """Return the seconds of a long wait for the next plan; 0 if no long wait is due."""
        rested_s = self._clock() - self._waited_at
        return (
            self._next_s
            if self._late >= MOST_LATE and rested_s >= BETWEEN_WAITS * self._next_s
            else 0.0
        )

    def late(self) -> None:
        """Count a plan that arrived too late for its segment."""
        self._late += 1

    def in_time(self) -> None:
        """Reset, because a plan arrived in time without a long wait."""
        self._late, self._next_s = 0, FIRST_WAIT_S

    def waited(self, *, came: bool) -> None:
        """Record the end of a long wait; `came` is True if a plan arrived during the wait."""
        self._waited_at = self._clock()
        if not came:
            self._next_s = min(2 * self._next_s, LONGEST_WAIT_S)


def cut_steps(
    most: float, samples: Ints, counts: Ints, loads: Floats, sizes: Floats, terms: Terms
) -> tuple[Ints, list[list[MicroBatch]]]:
    """Cut a rank's local batches that exceed `most` into micro-batches.

    Return the rank's samples in the order in which it trains them, and the micro-batches of each
    step, [steps], or an empty list if no step is cut.

    Args:
        most: maximum that the rank computes in one pass: a number of samples, or with a token
            budget a total size.
        samples: the rank's samples of all steps, in the order of the steps.
        counts: number of samples in each step, [steps].
        loads: total size of the samples in each step, [steps].
        sizes: size λ of each sample, [N].
    """
    by_tokens = terms.token_budget is not None
    amounts = (loads if by_tokens else counts).tolist()
    if not any(amount > most for amount in amounts):
        return samples, []
    grid = terms.shapes.samples
    steps, micro = [], []
    for amount, of_step in zip(amounts, np.split(samples, np.cumsum(counts)[:-1]), strict=True):
        whole, pieces = sizes[of_step], list[Ints]()
        if amount > most:
            pieces = cut_within(whole, most) if by_tokens else cut(whole, int(most), grid)
        steps.append(of_step[np.concatenate(pieces)] if pieces else of_step)
        micro.append([_micro_batch(whole, whole[piece], terms) for piece in pieces])
    return np.concatenate(steps), micro


def _micro_batch(whole: Floats, sizes: Floats, terms: Terms) -> MicroBatch:
    """Describe a micro-batch with these sizes, cut from a local batch with the sizes `whole`."""
    share = len(sizes) / len(whole)
    if terms.loss_mean == "size":
        share = float(sizes.sum() / whole.sum())
    squares, longest = float((sizes**2).sum()), float(sizes.max())
    return MicroBatch(len(sizes), float(sizes.sum()), squares, longest, share)
