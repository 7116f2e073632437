"""Training loop of a rank: the state that its loader and its session share.

The session makes the `Loop` and queries it. The loader drives it, and calls it around each step of
the script's loop. The loop connects the rank's other parts (`wiring`) at the loader's first
iteration, and releases them in `close`. It does not load data, and it does not compute gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

from msgspec.structs import replace
from torch.distributed import DistError

from paceline.core.amounts.trained import Trained
from paceline.core.errors import PacelineError
from paceline.train.amounts.budgeting import with_learned
from paceline.train.amounts.memory import Memory, learned_by
from paceline.train.checkpoint.position import Position
from paceline.train.checkpoint.saver import Saver
from paceline.train.context import RunContext
from paceline.train.ddp import CurrentStep, trained
from paceline.train.ending import SignalHandler
from paceline.train.fsdp.model import is_sharded
from paceline.train.leaving import end_process
from paceline.train.lockstep import Lockstep
from paceline.train.meeting import Meeting, introduce, place
from paceline.train.norms.agreement import RunningStatistics
from paceline.train.parts import Step, left_key
from paceline.train.profile import Profile, shared_moments
from paceline.train.sync.discovery import exception_ends_loop
from paceline.train.sync.gate import SyncGate
from paceline.train.sync.gathers import refuse_uneven
from paceline.train.sync.pool import SharedBatches, ends_span
from paceline.train.sync.uneven import Schedules, refuse_collectives
from paceline.train.telling.compiling import ShapeWarning
from paceline.train.telling.trial import flops
from paceline.train.timing import RunningStep
from paceline.train.watch import Activity
from paceline.train.wiring import (
    Findings,
    Wiring,
    agree_on_lookahead,
    connect,
    describe,
    warn_of_restarts,
)
from paceline.wire import Evaluation, Phase, RankDevice

logger = logging.getLogger(__name__)

_PASSED = (
    "set_epoch({epoch}): the next pass over the loader is epoch {next}. Epochs only increase, and "
    "each pass over the loader counts as one, even if the script leaves it at once; after a "
    "checkpoint, use session.epochs(…)"
)
# A rank that fails because of another rank searches this long for that rank.
_NAMED_S = 0.5
_GIVE_LIMITS = "give Session(limits=…), or call session.profile before the loop"


class Loop:
    """Position and state of training on this rank. For one thread.

    The session makes it and queries it. The loader calls, in this order: `begin_epoch`; `steps`,
    which it reads ahead; for each batch `begin_step`, or `begin_turn` for the further micro-batches
    of a step, and `end_body` once the script's body has run; for each planned step, after its
    batch, `take_over` until that returns None, and `end_step`; `end_epoch`.
    """

    def __init__(self, context: RunContext, meeting: Meeting) -> None:
        self.context = context
        terms, limits = context.terms, context.limits
        self.rank = meeting.rank
        self._filler = meeting.filler
        self.profiles: list[Profile] = []
        # Samples of typical sizes, ascending; empty before profiling.
        self.typical: list[int] = []
        # Each rank's device, once a model is wrapped.
        self.devices: list[RankDevice] = []
        # The number of epochs that the script trains, if the session knows.
        self.epochs: int | None = None
        self.current = CurrentStep(
            meeting.world, accumulates=limits.micro_batches, group=meeting.group
        )
        self.gate = SyncGate(self.current, meeting.store, meeting.rank, terms.seed, meeting.lanes)
        self.statistics = RunningStatistics(self.current, self.gate.models)
        self._shapes = ShapeWarning(terms, meeting.world, self.gate.models)
        # Check the loss before the first step.
        self.proves = context.prove
        # The number of such checks that have begun.
        self.proofs = 0
        # True while this rank waits for other ranks in such a check.
        self.waits_in_proof = False
        # Steps that the loader fetches before training reaches them.
        self._lookahead = 0
        self._refusing = (
            refuse_collectives(self.current)
            if context.uneven_steps or limits.micro_batches
            else lambda: None
        )
        self._refusing_gathers = (
            refuse_uneven(self.current, lambda: any(map(is_sharded, self.gate.models)))
            if meeting.world > 1
            else lambda: None
        )
        self._schedules = Schedules(self.current)
        self._ending = SignalHandler(self._ask_to_end)
        # Set if the script declares checkpoints.
        self.saver: Saver | None = None
        # The loader's first iteration sets `wiring`, `memory` (with a token budget), `lockstep` and
        # `pool` (both if there are several ranks).
        self.wiring: Wiring | None = None
        self.memory: Memory | None = None
        # The newest finished iterations of the script's loop.
        self._over: deque[RunningStep] = deque(maxlen=2)
        self.lockstep: Lockstep | None = None
        self.pool: SharedBatches | None = None
        # The newest batch that was taken over from another rank.
        self._taken: Step | None = None
        # None once the loop is closed.
        self._meeting: Meeting | None = meeting
        self._start = Position()
        self.trained = Trained(terms.samples, terms.global_batch, drop_last=terms.drop_last)
        self.trained.resume(0, 0, 0, self.context.epoch_steps.ends(0))
        # Evaluations that the script reported before the first iteration.
        self._evaluations: list[Evaluation] = []

        # The epoch that the loader is in, or was in last.
        self.epoch = 0
        # The step of the run that the script is in, or was in last.
        self.step = -1
        self.next_epoch = 0
        # The epoch's newest step that has ended and is not saved.
        self._ended: Step | None = None
        # The newest step of the epoch, or the one before the epoch, after which no gradients
        # accumulate. None: gradients have been accumulating since the epoch before.
        self._stepped: int | None = -1
        # The checkpoint was taken in the epoch's last step.
        self._epoch_is_done = False
        self._in_epoch = False
        # True while this rank saves, or asks the other ranks if a checkpoint is due.
        self._saving = False
        # The newest loop over the loader ran to its end.
        self._ran_out = False
        # An error that Python swallowed. The next use of the session raises it.
        self._failure: PacelineError | None = None
        # The value of `stopped` at closing.
        self._stopped = False
        self.closed = False

    # Methods for the session.

    @property
    def fillers(self) -> list[int]:
        """Return a filler batch: as many samples as the grid, or as many as fit in memory."""
        grid, limits = self.context.terms.shapes.samples, self.context.limits.samples
        return [self._filler] * (min(grid, max(1, limits[self.rank])) if limits else grid)

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps of the whole epoch that the loader is in, or of the next one."""
        return self.context.epoch_steps.of(self.epoch if self._in_epoch else self.next_epoch)

    @property
    def begun(self) -> bool:
        """Return True if the loader's first iteration has begun."""
        return self.wiring is not None

    @property
    def stopped(self) -> bool:
        """Return True if an operator ended the run."""
        if self.wiring is None:
            return self._stopped
        return self.wiring.follower.stopped and not self.wiring.follower.reforms

    @property
    def at_epoch_end(self) -> bool:
        """Return True if the next pass is empty: a checkpoint was taken in an epoch's last step."""
        return self._epoch_is_done

    @property
    def meeting(self) -> Meeting:
        """Return the result of the ranks' rendezvous; raise a PacelineError after `close`."""
        self.refuse_closed()
        assert self._meeting is not None
        return self._meeting

    def introduce(self) -> None:
        """Exchange the ranks' devices; all ranks call it once a model is in place."""
        known, own = self.context.environment.run is not None, self.context.device.described()
        self.devices = introduce(self.meeting, own, self._trial, may_try=known)

    def _trial(self) -> float | None:
        store, samples = (
            self.meeting.store,
            max(1, self.context.terms.global_batch // self.meeting.world),
        )
        moments = shared_moments(store, self.meeting.sizes)
        hold = self.context.device.trial(self.step + 1, moments, overhead=False)
        return flops(self.context.device.place, partial(hold, samples))

    def activity(self) -> Activity:
        """Return the rank's current or last step, and its phase. Any thread may call this."""
        running, wiring = self.current.running, self.wiring
        if self._saving:
            return self.step, Phase.CHECKPOINT
        if self.waits_in_proof:
            return self.step + 1, Phase.SYNC
        if running is not None and (phase := running.phase) is not Phase.DATA:
            return running.step.step, phase
        if wiring is not None and wiring.follower.waits:
            return self.step, Phase.PLAN
        return self.step, Phase.DATA if self._in_epoch else Phase.SCRIPT

    def running(self) -> RunningStep:
        """Return the current step; raise a PacelineError outside the loop over the loader."""
        if self.current.running is None:
            raise PacelineError(
                "there is no current step: use this inside the loop over session.loader()"
            )
        return self.current.running

    def figures(self) -> dict[str, float]:
        """Return the figures of the newest iteration that is over on host and device, or {}."""
        over = (turn.figures() for turn in reversed(self._over) if turn.readable)
        return next(over, {})

    def evaluated(self, evaluation: Evaluation) -> None:
        """Report an evaluation, or keep it until the control plane is connected."""
        self.refuse_closed()
        if self.wiring is None:
            self._evaluations.append(evaluation)
        elif self.wiring.reporter is not None:
            self.wiring.reporter.evaluated(evaluation)

    def refuse_begun(self, wish: str) -> None:
        """Raise a PacelineError if training has begun; `wish` is the call to make before."""
        self.refuse_closed()
        if self.begun:
            raise PacelineError(f"training has begun: {wish} before the loader's first iteration")

    def refuse_closed(self) -> None:
        """Raise a PacelineError if the session is closed, or an earlier loop failed."""
        if self.closed:
            raise PacelineError("this session is closed: create another Session")
        if self._failure is not None:
            raise PacelineError(str(self._failure)) from self._failure

    def position(self) -> Position:
        """Return the training position, with the current batch counted as used.

        Before a step's last micro-batch, a PacelineError is raised: the optimiser has not stepped.
        """
        running = self.current.running
        if running is not None and running.step.more:
            raise PacelineError(
                "state_dict() in the middle of a step: save where session.batch.last is true"
            )
        # A stop leaves an epoch in its middle; the run that resumes here trains the rest of it.
        if self._in_epoch or self.stopped:
            if self.context.reader is not None:
                return self._position_in_stream()
            leader = self.wiring.leader if self.wiring is not None else None
            used = leader.used(self.step) if leader is not None else None
            return Position(self.epoch, self.step + 1, used)
        if not self.begun:
            return self._start
        return Position(self.next_epoch, self.step + 1)

    def _position_in_stream(self) -> Position:
        """Return the position after an operator's stop: a stream begins that epoch again."""
        if self._in_epoch:
            raise PacelineError(
                "state_dict() in the middle of an epoch: a stream cannot be resumed there; save "
                "after the loop over the loader"
            )
        return Position(self.epoch, self.step + 1)

    def resume(self, position: Position) -> None:
        """Begin at a checkpoint's position. Call it before the first iteration."""
        assert position.used is not None
        self.next_epoch = self.epoch = position.epoch
        self.step = position.step - 1
        terms, epoch_steps = self.context.terms, self.context.epoch_steps
        left = terms.samples - len(position.used)
        self._epoch_is_done = bool(terms.samples) and terms.epoch_over(left)
        after = Position(position.epoch + 1, position.step)
        self._start = after if self._epoch_is_done else position
        if self.context.reader is None:
            used, ends = position.used, epoch_steps.ends(position.epoch, position.used)
            self.trained.resume(position.epoch, position.step, len(used), ends)
        if self._epoch_is_done or self.context.reader is not None:
            self.trained.begin_epoch(position.step, epoch_steps.ends(position.epoch + 1))

    @property
    def is_fresh(self) -> bool:
        """Return True if training has not begun and no checkpoint's position was loaded."""
        return not self.begun and self._start.step == 0 and self._start.used is None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass over the loader; see `Loader.set_epoch`."""
        self.refuse_closed()
        if self._in_epoch:
            raise PacelineError("set_epoch: call it before the loop over the loader, not in it")
        if epoch < self.next_epoch:
            raise PacelineError(_PASSED.format(epoch=epoch, next=self.next_epoch))
        self.next_epoch = epoch
        if self.is_fresh:
            self.epoch, self._start = epoch, Position(epoch)
            self.trained.resume(0, 0, 0, self.context.epoch_steps.ends(epoch))

    def save_with(self, saver: Saver) -> None:
        """Use a saver, and begin at its newest checkpoint. Call it before the first iteration."""
        if self.saver is not None:
            raise PacelineError("this session has checkpoints already: declare them once")
        self.saver = saver
        if (position := saver.load()) is not None:
            self.resume(position)

    def close(self) -> None:
        """End the background threads within a few seconds; they deliver pending messages first."""
        self._stopped, self.closed = self.stopped, True
        if self.lockstep is not None:
            self.lockstep.end()
        if self.memory is not None:
            self.memory.close()
        self._refusing()
        self._refusing_gathers()
        self._schedules.close()
        self.gate.close()
        if self.saver is not None:
            self.saver.close()
        if self.context.data is not None:
            self.context.data.close()
        if self.context.reader is not None:
            self.context.reader.close()
        if self.wiring is not None:
            self.wiring.follower.close()
        if self._meeting is not None and not self._meeting.leads:
            if self.lockstep is not None:
                self.lockstep.close()
            # Rank 0, which hosts the store, may have ended first.
            with contextlib.suppress(RuntimeError):
                self._meeting.store.set(left_key(self.rank), "")
        if self.wiring is not None:
            self.wiring.close(ran_out=self._ran_out, failed=self._is_out_of_step)
        if self.lockstep is not None and self._meeting is not None and self._meeting.leads:
            self.lockstep.close()
        if self._meeting is not None and self._meeting.lanes is not None:
            self._meeting.lanes.close()
        self._ending.close()
        # Loader and script may still exist; the store's server and its port must be released.
        self.wiring = self._meeting = self.pool = None

    # Methods for the loader.

    def begin_epoch(self, lookahead: int) -> bool:
        """Begin the next epoch and return True if it has steps. `lookahead` is in steps."""
        self.refuse_closed()
        self._leave_if_asked()
        if self.stopped:
            return False
        self.epoch = self.next_epoch
        self.next_epoch += 1
        if self._epoch_is_done:
            self._epoch_is_done = False
            self.restore_random()
            return False
        self._lookahead = lookahead
        if self.saver is not None:
            self._ending.install()
        if self.wiring is None:
            self._watch_ranks()
            self.wiring = self._connect(lookahead)
            for evaluation in self._evaluations:
                self.evaluated(evaluation)
        if self.epoch != self._start.epoch or self.step + 1 != self._start.step:
            self.trained.begin_epoch(self.step + 1, self.context.epoch_steps.ends(self.epoch))
        self._in_epoch, self._ran_out, self._ended = True, False, None
        self._stepped = self.step if self.gate.stepped else None
        if self.lockstep is not None:
            self.lockstep.begin_epoch(self.epoch)
        if self.context.reader is not None:
            self.context.reader.begin(self.epoch)
        return True

    @property
    def least_fair(self) -> int:
        """Return the samples of the largest local batch when a step is split equally."""
        return -(-self.context.terms.global_batch // self.meeting.world)

    @property
    def short(self) -> bool:
        """Return True if the limits leave no room for equal local batches."""
        limits = self.context.limits.of_parts
        return bool(limits) and min(limits) < self.least_fair

    @property
    def may_be_uneven(self) -> bool:
        """Return True if local batches may be uneven, by a control plane's plan or by limits."""
        meeting = self.meeting
        if meeting.world == 1 or meeting.lanes is not None:
            return False
        return self.context.environment.run is not None or self.short

    def steps(self) -> Iterator[Step]:
        """Yield the steps of the epoch that has begun, in the order of loading."""
        assert self.wiring is not None
        # Fetching looks ahead by iterations of the loop, and a step with micro-batches takes
        # several of them, so ranks fetch different numbers of steps ahead. Unless rank 0, which
        # plans, plans the whole lookahead first, the other ranks' fetching waits for that of rank
        # 0.
        plans_first = self.wiring.leader is not None and self.context.limits.micro_batches
        steps = self.wiring.follower.steps(self.epoch, self._lookahead if plans_first else 0)
        try:
            yield from steps
        except DistError as error:
            raise (error if self.lockstep is None else self.lockstep.explained(error)) from error

    def restore_random(self) -> None:
        """Restore the random numbers when training continues from a checkpoint."""
        if self.saver is not None:
            self.saver.restore_random()

    def begin_step(self, step: Step, data_s: float) -> bool:
        """Begin a step whose batch is loaded, for which the script waited `data_s` seconds.

        Return True if the batch goes to the loop's body. If False, the batch is another rank's now,
        or empty, and the step is over on this rank. `step` is this rank's shard of the step: as
        planned, or as `take_over` returned it.
        """
        assert self.wiring is not None
        taken = step is self._taken
        if not taken and ends_span(step):
            step = replace(step, shared=True)
        if self.lockstep is not None:
            self.lockstep.begin_step(step.step, relaxed=self.gate.relaxed is not None)
        self.gate.begin(step)
        self._finish_step()
        if self.gate.pools(step):
            self._schedules.reach(step, step.step)
        elif self.gate.relaxed is not None:
            self._schedules.look(self.gate.chosen())
        mine = taken or self._is_mine(step)
        if self.gate.relaxed is None and step.pooled:
            # The script does not suit relaxed synchronisation, so all ranks make this step.
            step = replace(step, pooled=False)
        if not mine:
            step = step.without_batch()
        self.step = step.step
        running = self._begin_running(step.turns[0], data_s)
        if not mine:
            running.body_done()
        return mine

    def begin_turn(self, micro: Step, data_s: float) -> None:
        """Begin a further micro-batch of the current step, which is loaded; see `begin_step`."""
        self._finish_step()
        self._begin_running(micro, data_s)

    def _begin_running(self, step: Step, data_s: float) -> RunningStep:
        if step.more:
            self._schedules.look(None)
        self.gate.begin_turn(step)
        hold_s = self.context.device.begin(step)
        self.current.running = RunningStep(step, self.context.device.clock, data_s, hold_s)
        return self.current.running

    def _is_mine(self, step: Step) -> bool:
        if self.pool is None or not step.pooled:
            return True
        # Without pooling, all ranks make each step together.
        pooled = self.gate.pools(step)
        if not step.samples:
            return not pooled
        return self.pool.begins(step, may_leave=pooled)

    def _may_differ(self) -> bool:
        """Return True if ranks may have different numbers of iterations from the next segment on.

        They may not in the first segment of a relaxed synchroniser. Then it is not known yet if it
        suits the script, and how the script steps its schedules.
        """
        return self.context.uneven_steps and self._schedules.known

    def is_lost(self, step: Step) -> bool:
        """Return True if this rank need not load a planned batch, as it will not train it."""
        return self.pool is not None and step.pooled and self.pool.is_lost(step)

    def take_over(self, step: Step) -> Step | None:
        """Return another rank's batch, to be trained after this planned step; None: no batch."""
        self._taken = None
        if self.pool is not None and ends_span(step) and self.gate.pools(step):
            running = self.current.running
            with nullcontext() if running is None else running.waiting():
                self._taken = self.pool.takes_over(step)
        return self._taken

    def end_step(self, step: Step) -> None:
        """End a planned step: this rank is done with its own batch, and with those taken over."""
        self._ended = step
        if self.gate.stepped or self.saver is None:
            self._stepped = step.step
            if self.wiring is not None and self.wiring.leader is not None:
                self.wiring.leader.stepped(step.step)
        pooled = self.gate.pools(step)
        self.gate.end_step(step)
        if self.pool is not None and ends_span(step):
            self.pool.end_span(step)
        if pooled and step.last:
            self._schedules.reach(step, step.segment_end)
        if self.gate.relaxed is None:
            self._save(step)

    def end_body(self, closing: bool) -> None:
        """End the loop's body; `closing` if a break, a return or an exception left the loop."""
        running = self.running()
        if not closing and not running.step.more:
            self._keep_in_step(running)
        try:
            if running.step.more:
                self.gate.turn_done(closing)
            else:
                self.gate.body_done(closing)
        except PacelineError as error:
            if not closing:
                raise
            self._fail_later(error)
        running.body_done()
        self.statistics.trained(running.step)
        if self.memory is not None and not closing:
            self.memory.fitted(running.step.load)
        # If the script left the loop, it may not have come to its schedule's step.
        if not closing and not running.step.more:
            self._schedules.turn_over(running.step)
        if self.pool is not None and self.gate.relaxed is not None:
            self.pool.worked(running.worked_s)

    def end_epoch(self, ran_out: bool) -> None:
        """End the loop over the loader; `ran_out` unless the script left the loop early."""
        # An error of the loader itself, as in reading a sample, is the current exception here.
        own = sys.exception()
        failed = own is not None and not isinstance(own, GeneratorExit)
        raised = not ran_out and (failed or exception_ends_loop())
        if self.lockstep is not None and raised:
            self.lockstep.leave(raised=True)
            # The call logs the reason.
            self.lockstep.explained(PacelineError(), _NAMED_S)
        if self.memory is not None and raised and self.current.running is not None:
            self.memory.left(self.current.running.step.load)
        try:
            if self.lockstep is not None and not raised:
                self._end_in_step(self.lockstep, ran_out)
            self.gate.end(ran_out)
            # Statistics are a collective: all ranks must have left after the same step.
            if self._failure is None and not raised:
                self.statistics.agree()
        except PacelineError as error:
            if ran_out:
                raise
            self._fail_later(error)
        if ran_out:
            if self._ended is not None:
                self._save(self._ended)
            self._leave_if_asked()
            self._save_last()
        # The script may destroy the process groups after its last epoch, so pending saves must end
        # before. A stop makes this epoch the last one.
        last = self.stopped or self.epochs is None or self.next_epoch >= self.epochs
        if self.saver is not None and last:
            self.saver.wait()
        self._finish_step()
        self._in_epoch, self._ran_out = False, ran_out
        if self.context.data is not None:
            self.context.data.epoch_over(self.epoch)
        if self.context.reader is not None:
            self.context.reader.close()
        if self.wiring is not None and self.wiring.reporter is not None:
            self.wiring.reporter.flush()
        if ran_out and self.stopped:
            self._ending.deliver(self.close)

    def _watch_ranks(self) -> None:
        if self.meeting.world == 1:
            return
        self.lockstep = Lockstep(
            self.meeting,
            place(),
            self.activity,
            self._fail,
            self._end_plan,
        )
        self.current.reducing, self.current.explained = self._reducing, self.lockstep.explained

    def _fail(self, error: PacelineError) -> None:
        if self.wiring is not None:
            self.wiring.follower.fail(error)

    def _ask_to_end(self) -> bool:
        """Ask all ranks to end after the same step; return False outside the script's loop."""
        if self.lockstep is not None:
            self.lockstep.ask_to_end()
        self._end_plan()
        return self._in_epoch

    def _end_plan(self) -> None:
        if self.wiring is not None and self.wiring.leader is not None:
            self.wiring.leader.asked_to_end = True

    def _save_last(self) -> None:
        """Save the training position after an operator's stop, or after a signal."""
        if self.saver is None or not self.stopped or self._failure is not None:
            return
        self._finish_step()
        self._saving = True
        try:
            self.statistics.agree()
            self.saver.save_last(self._last_position(), self._reported())
        finally:
            self._saving = False

    def _last_position(self) -> Position | None:
        """Return the position of the optimiser's last step, or None if it is in an earlier epoch.

        Gradients accumulated since that step are lost.
        """
        if self.gate.stepped:
            return self.position()
        if self._stepped is None or not self._in_epoch:
            return None
        leader = self.wiring.leader if self.wiring is not None else None
        used = leader.used(self._stepped) if leader is not None else None
        return Position(self.epoch, self._stepped + 1, used)

    def _is_out_of_step(self) -> bool:
        return self.lockstep is not None and self.lockstep.failed

    def _reducing(self, running: RunningStep, model: int) -> None:
        if self.lockstep is not None:
            self.lockstep.reducing(running.step.step, model, running.meeting)

    def _keep_in_step(self, running: RunningStep) -> None:
        """End a body; if it had no backward pass, wait for the other ranks."""
        if self.lockstep is None:
            return
        step, relaxed = running.step.step, self.gate.relaxed is not None
        if running.passes or not self.gate.models:
            self.lockstep.end_body(step, passes=True, relaxed=relaxed)
            return
        with nullcontext() if relaxed else running.waiting():
            self.lockstep.end_body(step, passes=False, relaxed=relaxed)

    def _end_in_step(self, lockstep: Lockstep, ran_out: bool) -> None:
        if ran_out:
            lockstep.end_epoch()
        elif self._failure is None:
            # Only statistics are exchanged after this, and only if all ranks left after the same
            # step.
            waits = self.statistics.differ and self.gate.relaxed is None
            lockstep.leave(raised=False, waits=waits)

    def _leave_if_asked(self) -> None:
        """End this rank if nodes join or leave, after all ranks have saved the training position.

        If the script left its loop early, this runs when the next epoch starts.
        """
        if self.wiring is None or not self.wiring.follower.reforms:
            return
        self._finish_step()
        if self.saver is not None:
            self.statistics.agree()
            self.saver.save_last(self._last_position(), self._reported())
        self.close()
        assert self.context.environment.reform is not None
        end_process(self.context.environment.reform)

    def _fail_later(self, error: PacelineError) -> None:
        """Keep an error for the next use of the session.

        Python swallows an error that a generator raises while it is closed.
        """
        self._failure = error
        logger.warning("%s", error)

    def _save(self, step: Step) -> None:
        """Save a checkpoint if it is due. All ranks are synchronised after this step."""
        if self.saver is None:
            return
        self._saving = True
        try:
            if self.saver.due(step, self.gate.stepped):
                self._ended = None
                # Finish the step first: saving is no part of its time.
                self._finish_step()
                self.statistics.agree()
                self.saver.save(self.position(), self._reported())
        finally:
            self._saving = False

    def _reported(self) -> threading.Event | None:
        """Return an event that is set once all steps so far are reported; None without a run."""
        reporter = self.wiring.reporter if self.wiring is not None else None
        return reporter.reported() if reporter is not None else None

    def _finish_step(self) -> None:
        running, self.current.running = self.current.running, None
        if running is None:
            return
        running.over()
        self._over.append(running)
        self._shapes.look(running.recompiles)
        if self.wiring is not None and self.wiring.reporter is not None:
            self.wiring.reporter.over(running)

    def _learn(self) -> None:
        """Apply the memory limits that ranks learned in earlier attempts; each rank calls it."""
        if (budget := self.context.epoch_steps.budget) is None:
            return
        self.memory = Memory(self.context.environment.memory, self.meeting.process)
        learned, before = learned_by(self.meeting, self.memory.known), self.context.limits
        limits = with_learned(before, learned, budget, self.devices)
        self.context = dataclasses.replace(self.context, limits=limits)
        if self.meeting.leads and limits != before:
            logger.warning(
                "memory ran out in earlier attempts: token_limits is %s now", limits.tokens
            )

    def _gradient_bytes(self) -> int | None:
        parameters = {id(p): p for p in trained(self.gate.models)}
        return sum(p.numel() * p.element_size() for p in parameters.values()) or None

    def _connect(self, lookahead: int) -> Wiring:
        meeting = self.meeting
        agree_on_lookahead(meeting, lookahead)
        self._shapes.begin(on_cuda=self.context.device.on_cuda)
        saves, streams = self.saver is not None, self.context.reader is not None
        warn_of_restarts(
            self.context.environment, self._start, meeting.process, saves=saves, streams=streams
        )
        environment = self.context.environment.claim()
        self.context = dataclasses.replace(self.context, environment=environment)
        self._learn()
        terms, limits = self.context.terms, self.context.limits
        by_samples = terms.token_budget is None
        if by_samples and limits.micro_batches and not limits.samples and meeting.leads:
            logger.warning("micro_batches=True has no effect without limits: %s", _GIVE_LIMITS)
        findings = Findings(
            lookahead, self.epochs, self.devices, self.profiles, self._gradient_bytes()
        )
        hello = describe(self.context, meeting, self._start, findings)
        wiring = connect(self.context, meeting, self._start, self.activity, self._may_differ, hello)
        if wiring.rounds is not None:
            self.gate.on_round = wiring.rounds.over
        self.gate.suitability.on_fallback = wiring.on_fallback
        if meeting.world > 1:
            self.pool = SharedBatches(meeting.store, self.rank, meeting.world, limits.of_parts)
        return wiring
