"""State of training on a rank, which the session, the loop and its features share.

`Session` creates the state as a `loop.Loop`, a subclass that adds the methods that the loader
calls. Features (`feature.Feature`) get the state as a `TrainingState`, and exchange data only
through it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.core.errors import PacelineError
from paceline.train.batchnorm import RunningStatistics
from paceline.train.checkpoint.position import Position
from paceline.train.context import RunContext
from paceline.train.ddp import CurrentStep
from paceline.train.feature import Feature, Hooks
from paceline.train.long_phases import Activity
from paceline.train.mesh import SilentReporter
from paceline.train.profile import shared_moments
from paceline.train.progress import TrainingProgress
from paceline.train.report import Reporter
from paceline.train.startup import Startup, introduce
from paceline.train.sync.gate import SyncGate
from paceline.train.timing import RunningStep
from paceline.train.wiring import Findings, Wiring
from paceline.wire import Evaluation, Phase

logger = logging.getLogger(__name__)


class TrainingState:
    """State of training on this rank. Not thread-safe, except where a method says otherwise."""

    def __init__(self, context: RunContext, startup: Startup) -> None:
        self.context = context
        self._rank, self._filler = startup.rank, startup.filler
        # None once the session is closed.
        self._startup: Startup | None = startup
        accumulates = context.limits.micro_batches
        self.current = CurrentStep(startup.world, accumulates=accumulates, group=startup.group)
        seed = context.terms.seed
        self.gate = SyncGate(self.current, startup.store, startup.rank, seed, startup.lanes)
        self.statistics = RunningStatistics(self.current, self.gate.models)
        self.progress = TrainingProgress(context)
        self.findings = Findings()
        self.proofs = 0
        # True while this rank waits for other ranks' trials, of a proof or of a profile.
        self._waits_in_trials = False
        # The leader, follower and reporter of the rank; None before the loader's first iteration
        # and after `close`.
        self.wiring: Wiring | None = None
        self.features: list[Feature] = []
        self.on = Hooks(self.features)
        self._finished: deque[RunningStep] = deque(maxlen=2)
        # Evaluations that the script reported before the first iteration.
        self._evaluations: list[Evaluation] = []
        # True while this rank saves a checkpoint, or agrees with the other ranks on whether to save
        # one.
        self.saving = False
        # True once a signal has requested that all ranks end after the same step.
        self.asked_to_end = False
        # Function that returns True if a rank has failed, or the ranks' collectives no longer match
        # each other.
        self.is_out_of_step: Callable[[], bool] = lambda: False
        # An error that Python would swallow. The next use of the session raises it.
        self.failure: PacelineError | None = None
        self._stopped = False
        self.closed = False

    @property
    def startup(self) -> Startup:
        """Return the result of the ranks' start-up; raise a PacelineError after `close`."""
        self.refuse_closed()
        assert self._startup is not None
        return self._startup

    @property
    def fillers(self) -> list[int]:
        """Return a filler batch: the filler's index, repeated n times.

        n is the smallest number of samples that `Session(shapes=…)` allows, or this rank's limit
        if that is lower.
        """
        grid, limits = self.context.terms.shapes.samples, self.context.limits.samples
        return [self._filler] * (min(grid, max(1, limits[self._rank])) if limits else grid)

    @property
    def begun(self) -> bool:
        """Return True if the loader's first iteration has begun."""
        return self.wiring is not None

    @property
    def stopped(self) -> bool:
        """Return True if an operator or a signal ended the run."""
        if self.wiring is None:
            return self._stopped
        return self.wiring.follower.stopped and not self.wiring.follower.reforms

    @property
    def reforms(self) -> bool:
        """Return True if the plan ended because nodes join or leave."""
        return self.wiring is not None and self.wiring.follower.reforms

    @property
    def is_fresh(self) -> bool:
        """Return True if training has not begun and no checkpoint's position was loaded."""
        start = self.progress.start
        return not self.begun and start.step == 0 and start.used is None

    @property
    def reporter(self) -> Reporter | SilentReporter | None:
        """Return the object that reports this rank's steps; None if its steps are not reported."""
        return self.wiring.reporter if self.wiring is not None else None

    def introduce(self) -> None:
        """Exchange descriptions of the ranks' devices. All ranks call it for their first model."""
        startup, device = self.startup, self.context.device

        def trial() -> float | None:
            samples = max(1, self.context.terms.global_batch // startup.world)
            moments = shared_moments(startup.store, startup.sizes)
            return device.measured_flops(self.progress.step + 1, moments, samples)

        planned = self.context.planned
        self.findings.devices = introduce(startup, device.described(), trial, may_try=planned)

    @contextmanager
    def waiting_in_trials(self) -> Iterator[None]:
        """Show this rank as waiting for other ranks, whose trials are not over."""
        self._waits_in_trials = True
        try:
            yield
        finally:
            self._waits_in_trials = False

    def activity(self) -> Activity:
        """Return the rank's current or last step, and its phase. Any thread may call this."""
        running, wiring, step = self.current.running, self.wiring, self.progress.step
        if self.saving:
            return step, Phase.CHECKPOINT
        if self._waits_in_trials:
            return step + 1, Phase.SYNC
        if running is not None and (phase := running.phase) is not Phase.DATA:
            return running.step.step, phase
        if wiring is not None and wiring.follower.waits:
            return step, Phase.PLAN
        return step, Phase.DATA if self.progress.in_epoch else Phase.SCRIPT

    def running(self) -> RunningStep:
        """Return the current step; raise a PacelineError outside the loop over the loader."""
        if self.current.running is None:
            raise PacelineError(
                "there is no current step: this call needs one, so make it inside the loop over "
                "session.loader()"
            )
        return self.current.running

    def finish_step(self) -> None:
        """End the current iteration, if there is one, and report its times."""
        running = self.current.running
        if running is None:
            return
        self.current.enter(None)
        running.finish()
        self._finished.append(running)
        if running.recompiles:
            for recompiled in self.on.recompiled:
                recompiled(running)
        if self.wiring is not None and self.wiring.reporter is not None:
            self.wiring.reporter.accept(running)

    def figures(self) -> dict[str, float]:
        """Return `Session.figures` of the newest iteration that has ended on host and device.

        Return {} if there is none.
        """
        over = (turn.figures() for turn in reversed(self._finished) if turn.readable)
        return next(over, {})

    def evaluated(self, evaluation: Evaluation) -> None:
        """Report an evaluation, or keep it until the control plane is connected."""
        self.refuse_closed()
        if self.wiring is None:
            self._evaluations.append(evaluation)
        elif self.wiring.reporter is not None:
            self.wiring.reporter.evaluated(evaluation)

    def refuse_begun(self, wish: str) -> None:
        """Raise a PacelineError if training has begun; `wish` names the call that is too late."""
        self.refuse_closed()
        if self.begun:
            raise PacelineError(f"training has begun: {wish} before the loader's first iteration")

    def refuse_closed(self) -> None:
        """Raise a PacelineError if the session is closed, or an earlier loop failed."""
        if self.closed:
            raise PacelineError("this session is closed: create another Session")
        if self.failure is not None:
            raise PacelineError(str(self.failure)) from self.failure

    def fail_later(self, error: PacelineError) -> None:
        """Keep an error for the next use of the session.

        Python swallows an error that a generator raises while it is closed.
        """
        self.failure = error
        logger.warning("%s", error)

    def fail_waits(self, error: PacelineError) -> None:
        """Let this rank raise `error` where it waits for the plan. Any thread may call this."""
        if self.wiring is not None:
            self.wiring.follower.fail(error)

    def end_plan(self) -> None:
        """On rank 0, end the plan as an operator's stop does. Any thread may call this."""
        if self.wiring is not None and self.wiring.leader is not None:
            self.wiring.leader.asked_to_end = True

    def ask_to_end(self) -> bool:
        """Request that all ranks end after the same step; return False outside the script's loop.

        A signal's handler may call this.
        """
        self.asked_to_end = True
        self.end_plan()
        return self.progress.in_epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass over the loader; see `Loader.set_epoch`."""
        self.refuse_closed()
        self.progress.set_epoch(epoch, fresh=self.is_fresh)

    def position(self) -> Position:
        """Return the training position, with the current batch counted as used.

        A PacelineError is raised before a step's last micro-batch, because the optimiser has not
        stepped yet, and in the middle of an epoch of a stream.
        """
        running, progress = self.current.running, self.progress
        if running is not None and running.step.more:
            raise PacelineError(
                "state_dict() in the middle of a step: save where session.batch.last is true"
            )
        streams = self.context.reader is not None
        if streams and progress.in_epoch:
            raise PacelineError(
                "state_dict() in the middle of an epoch: a stream cannot be resumed there; save "
                "after the loop over the loader"
            )
        # A stop ends the loop in the middle of an epoch. A run that resumes from this position
        # trains the rest of that epoch or, with a stream, the whole epoch again.
        if progress.in_epoch or self.stopped:
            step = progress.step
            return Position(progress.epoch, step + 1) if streams else self.position_after(step)
        if not self.begun:
            return progress.start
        return Position(progress.next_epoch, progress.step + 1)

    def position_after(self, step: int) -> Position:
        """Return the position after a step of the current epoch."""
        leader = self.wiring.leader if self.wiring is not None else None
        used = leader.used(step) if leader is not None else None
        return Position(self.progress.epoch, step + 1, used)
