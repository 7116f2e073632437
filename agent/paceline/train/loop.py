"""Training loop of a rank: Paceline's work around each iteration of the script's loop.

This module has plain training: the plan's steps, the gate (`sync.gate.SyncGate`) at which ranks
synchronise, the statistics of BatchNorm layers, and the parts in `wiring`, which are made in the
loader's first iteration and released by `close`. Everything optional is a feature
(`feature.Feature`), whose hooks the loop calls. The loop also calls two features directly:
`WorkSharing` decides which rank trains a batch, and `Checkpoints` restores the random generators.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator

from torch.distributed import DistError

from paceline.core.errors import PacelineError
from paceline.train.checkpoint.saver import Saver
from paceline.train.context import RunContext
from paceline.train.ddp import trained
from paceline.train.feature import Feature, Hooks
from paceline.train.features.checkpoints import Checkpoints
from paceline.train.features.choice import in_order, made
from paceline.train.features.signals import Signals
from paceline.train.features.uneven import WorkSharing
from paceline.train.plan_shard import LocalStep, left_key
from paceline.train.startup import Startup
from paceline.train.state import TrainingState
from paceline.train.sync.discovery import exception_ends_loop
from paceline.train.timing import RunningStep
from paceline.train.wiring import agree_on_lookahead, connect, describe, warn_of_restarts


class Loop(TrainingState):
    """Training loop of this rank, and its state. Not thread-safe.

    In each epoch the loader calls, in this order:

    1. `begin_epoch`, and `steps`, whose steps the loader reads ahead;
    2. for each batch of a step: `begin_step`, or `begin_turn` if the batch is a further micro-batch
       of the step, and `end_turn` once the body of the script's loop has run;
    3. after the batches of a planned step: `sharing.take_over` until it returns None, and
       `end_step`;
    4. `end_epoch`.
    """

    def __init__(self, context: RunContext, startup: Startup) -> None:
        super().__init__(context, startup)
        self._ran_out = False
        self._checkpoints: Checkpoints | None = None
        self._add(*made(self, self.close))
        sharing = (each for each in self.features if isinstance(each, WorkSharing))
        # None unless ranks may take over batches from each other.
        self.sharing = next(sharing, None)

    def _add(self, *features: Feature) -> None:
        self.features = in_order([*self.features, *features])
        self.on = Hooks(self.features)

    def save_with(self, saver: Saver) -> None:
        """Save with `saver`, and resume from its newest checkpoint. Call before the first step."""
        if self._checkpoints is not None:
            raise PacelineError("session.checkpoint was called before: call it only once")
        self._checkpoints = Checkpoints(self, saver)
        self._add(self._checkpoints, Signals(self.ask_to_end, self.close))
        if (position := saver.load()) is not None:
            self.progress.resume(position)

    def close(self) -> None:
        """End the background threads within a few seconds; they deliver pending messages first."""
        self._stopped, self.closed = self.stopped, True
        for close in self.on.close:
            close()
        self.gate.close()
        for release in self.on.release:
            release()
        startup, wiring = self._startup, self.wiring
        if wiring is not None:
            wiring.follower.close()
        if startup is not None and not startup.leads:
            if wiring is not None:
                wiring.hand_over()
            self._disconnect()
            # Rank 0, which hosts the store, may have ended first.
            with contextlib.suppress(RuntimeError):
                startup.store.set(left_key(startup.rank), "")
        if wiring is not None:
            wiring.close(ran_out=self._ran_out, failed=self.is_out_of_step)
        if startup is not None and startup.leads:
            self._disconnect()
        if startup is not None and startup.lanes is not None:
            startup.lanes.close()
        for closed in self.on.closed:
            closed()
        # Loader and script may keep this object alive, but the store's server and port must be
        # released.
        self.wiring = self._startup = None

    def _disconnect(self) -> None:
        for disconnect in self.on.disconnect:
            disconnect()

    def begin_epoch(self, lookahead: int, profile: Callable[[], None]) -> bool:
        """Begin the next epoch; return True if it has steps.

        `profile` is called before the first epoch that has steps.
        """
        self.refuse_closed()
        for before_epoch in self.on.before_epoch:
            before_epoch()
        if self.stopped:
            return False
        if not self.progress.begin_epoch():
            self.restore_random()
            return False
        self.findings.lookahead = lookahead
        if self.wiring is None:
            profile()
            self._connect()
        self.progress.enter_epoch()
        self._ran_out = False
        for begin_epoch in self.on.begin_epoch:
            begin_epoch(self.progress.epoch)
        return True

    def _connect(self) -> None:
        """Make the rank's `Wiring` at the first iteration. All ranks call this."""
        for begin in self.on.begin:
            begin()
        startup, start = self.startup, self.progress.start
        agree_on_lookahead(startup, self.findings.lookahead)
        saves, streams = self._checkpoints is not None, self.context.reader is not None
        environment = self.context.environment
        warn_of_restarts(environment, start, startup.process, saves=saves, streams=streams)
        self.context = dataclasses.replace(self.context, environment=environment.claim())
        for connect_feature in self.on.connect:
            connect_feature()
        parameters = {id(p): p for p in trained(self.gate.models)}
        size = sum(p.numel() * p.element_size() for p in parameters.values())
        self.findings.gradient_bytes = size or None
        hello = describe(self.context, startup, start, self.findings)
        wiring = connect(self.context, startup, start, self.activity, self._may_differ, hello)
        if wiring.rounds is not None:
            self.gate.on_round = wiring.rounds.accept
        self.gate.suitability.on_fallback = wiring.on_fallback
        self.wiring = wiring
        for evaluation in self._evaluations:
            self.evaluated(evaluation)

    def _may_differ(self) -> bool:
        return self.sharing is not None and self.sharing.may_differ

    def restore_random(self) -> None:
        """Restore the random generators' states if training continues from a checkpoint."""
        if self._checkpoints is not None:
            self._checkpoints.restore_random()

    def steps(self) -> Iterator[LocalStep]:
        """Yield the steps of the epoch that has begun, in the order of loading."""
        assert self.wiring is not None
        # Each loader fetches the same number of iterations ahead. A step with micro-batches has
        # several iterations, a different number on each rank, so ranks fetch different numbers of
        # steps ahead. Rank 0 therefore plans the steps of the whole lookahead first. Otherwise the
        # loaders of other ranks would wait until rank 0's loader needs these steps.
        plans_first = self.wiring.leader is not None and self.context.limits.micro_batches
        ahead = self.findings.lookahead if plans_first else 0
        try:
            yield from self.wiring.follower.steps(self.progress.epoch, ahead)
        except DistError as error:
            raise self.current.explained(error) from error

    def begin_step(self, step: LocalStep, data_s: float) -> bool:
        """Begin a step whose batch is loaded; the script waited `data_s` seconds for the batch.

        Return True if the loop's body must run on the batch. Otherwise the step is already over for
        this rank: another rank has taken the batch over, or this rank has no samples in the step.
        """
        assert self.wiring is not None
        for begin_step in self.on.begin_step:
            begin_step(step)
        self.gate.begin(step)
        self.finish_step()
        mine = True
        if self.sharing is not None:
            step, mine = self.sharing.claim(step)
        self.progress.step = step.step
        running = self._begin_running(step.micro[0] if step.micro else step, data_s)
        if not mine:
            running.body_done()
        return mine

    def begin_turn(self, micro: LocalStep, data_s: float) -> None:
        """Begin a further micro-batch of the current step, once it is loaded; see `begin_step`."""
        self.finish_step()
        self._begin_running(micro, data_s)

    def _begin_running(self, turn: LocalStep, data_s: float) -> RunningStep:
        for begin_turn in self.on.begin_turn:
            begin_turn(turn)
        if self.current.accumulates:
            self.gate.begin_turn(turn)
        device = self.context.device
        hold_s = device.begin(turn) if device.changes_steps or turn.threads else None
        running = RunningStep(turn, device.clock, data_s, hold_s)
        self.current.enter(running)
        return running

    def end_turn(self, closing: bool) -> None:
        """End an iteration; `closing` is True if a break, return or exception ended the loop."""
        running = self.current.running or self.running()
        if not closing:
            for end_turn in self.on.end_turn:
                end_turn(running)
        try:
            if running.step.more:
                self.gate.turn_done(closing)
            else:
                self.gate.body_done(closing)
        except PacelineError as error:
            if not closing:
                raise
            self.fail_later(error)
        running.body_done()
        self.statistics.samples += len(running.step.indices)
        for turn_ended in self.on.turn_ended:
            turn_ended(running, closing)

    def end_step(self, step: LocalStep) -> None:
        """End a planned step on this rank, after its own batch and the batches it took over."""
        if self.gate.relaxed is not None:
            self.gate.end_step(step)
        # The leader forgets the samples of steps up to `stepped`. A checkpoint needs the samples of
        # all steps after the newest one in which the optimiser stepped, so keep those samples.
        leader = self.wiring.leader if self.wiring is not None else None
        if leader is not None and (self._checkpoints is None or self.gate.stepped):
            leader.stepped = step.step
        for step_ended in self.on.step_ended:
            step_ended(step)

    def end_epoch(self, ran_out: bool) -> None:
        """End the loop over the loader; `ran_out` is False if the script left the loop early."""
        # If the loader itself failed, for example in reading a sample, its error is the current
        # exception.
        own = sys.exception()
        failed = own is not None and not isinstance(own, GeneratorExit)
        raised = not ran_out and (failed or exception_ends_loop())
        try:
            for end_epoch in self.on.end_epoch:
                end_epoch(ran_out, raised)
            self.gate.end(ran_out)
            # Averaging the statistics is a collective, so all ranks must have left the loop after
            # the same step.
            if self.failure is None and not raised:
                self.statistics.agree()
        except PacelineError as error:
            if ran_out:
                raise
            self.fail_later(error)
        for epoch_ended in self.on.epoch_ended:
            epoch_ended(ran_out)
        self.finish_step()
        self.progress.in_epoch, self._ran_out = False, ran_out
        for left_epoch in self.on.left_epoch:
            left_epoch(self.progress.epoch)
        if (reporter := self.reporter) is not None:
            reporter.flush()
        if ran_out and self.stopped:
            for stopped in self.on.stopped:
                stopped()
