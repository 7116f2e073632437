"""Ranks whose loops have different numbers of iterations, which a script's own calls must not see.

With ``Session(uneven_steps=True)`` ranks take batches of a segment over from each other
(`sync.pool`), so a fast rank's loop has more iterations than a slow one's. With
``Session(micro_batches=True)`` a step has several iterations on a rank that computes its batch in
parts. In both cases collectives of the script are refused in iterations that not all ranks have,
and its learning-rate schedules are stepped by planned steps (`sync.uneven`).
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

from msgspec.structs import replace

from paceline.train.feature import Feature
from paceline.train.fsdp.model import is_sharded
from paceline.train.parts import Step
from paceline.train.state import TrainingState
from paceline.train.sync.gathers import refuse_uneven
from paceline.train.sync.pool import SharedBatches, ends_span
from paceline.train.sync.uneven import Schedules, refuse_collectives
from paceline.train.timing import RunningStep

logger = logging.getLogger(__name__)

_GIVE_LIMITS = "give Session(limits=…), or call session.profile before the loop"


class _UnevenLoops(Feature):
    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._accept_collectives = refuse_collectives(state.current)
        self._schedules = Schedules(state.current)

    def turn_over(self, running: RunningStep, closing: bool) -> None:
        # If the script left the loop, it may not have come to its schedule's step.
        if not closing and not running.step.more:
            self._schedules.turn_over(running.step)

    def close(self) -> None:
        self._accept_collectives()
        self._schedules.close()


class MicroBatches(_UnevenLoops):
    """Steps with several iterations of the script's loop."""

    def connect(self) -> None:
        terms, limits = self._state.context.terms, self._state.context.limits
        by_samples = terms.token_budget is None
        if by_samples and not limits.samples and self._state.meeting.leads:
            logger.warning("micro_batches=True has no effect without limits: %s", _GIVE_LIMITS)

    def begin_turn(self, turn: Step) -> None:
        """Find the script's schedules, which are held back while micro-batches follow."""
        gate = self._state.gate
        if turn.place == 0 and gate.relaxed is not None:
            self._schedules.look(gate.chosen())
        if turn.more:
            self._schedules.look(None)


class WorkSharing(_UnevenLoops):
    """Batches that ranks take over from each other, under most relaxed synchronisers."""

    def __init__(self, state: TrainingState) -> None:
        super().__init__(state)
        # Set from the first iteration until the session is closed.
        self._pool: SharedBatches | None = None
        # The newest batch that was taken over from another rank.
        self._taken: Step | None = None
        # Ranks may take over each other's batches in the current step.
        self._pools = False

    @property
    def may_differ(self) -> bool:
        """Return True if ranks may differ in their iterations from the next segment on.

        They may not in the first segment of a relaxed synchroniser. Then it is not known yet if it
        suits the script, and how the script steps its schedules.
        """
        return self._schedules.known

    def connect(self) -> None:
        meeting, limits = self._state.meeting, self._state.context.limits.of_parts
        self._pool = SharedBatches(meeting.store, meeting.rank, meeting.world, limits)

    def claim(self, step: Step) -> tuple[Step, bool]:
        """Return a step as this rank trains it; False if its batch is another rank's now.

        `step` has begun. It is this rank's shard: as planned, or as `take_over` returned it.
        """
        gate = self._state.gate
        self._pools = gate.pools(step)
        if self._pools:
            self._schedules.reach(step, step.step)
        elif gate.relaxed is not None:
            self._schedules.look(gate.chosen())
        taken = step is self._taken
        mine = taken or self._is_mine(step)
        if not taken and ends_span(step):
            step = replace(step, shared=True)
        if gate.relaxed is None and step.pooled:
            # The script does not suit relaxed synchronisation, so all ranks make this step.
            step = replace(step, pooled=False)
        return (step if mine else step.without_batch()), mine

    def _is_mine(self, step: Step) -> bool:
        if self._pool is None or not step.pooled:
            return True
        # Without pooling, all ranks make each step together.
        if not step.samples:
            return not self._pools
        return self._pool.begins(step, may_leave=self._pools)

    def is_lost(self, step: Step) -> bool:
        """Return True if this rank need not load a planned batch, as it will not train it."""
        return self._pool is not None and step.pooled and self._pool.is_lost(step)

    def take_over(self, step: Step) -> Step | None:
        """Return another rank's batch, to be trained after this planned step; None: no batch."""
        self._taken = None
        if self._pool is not None and ends_span(step) and self._state.gate.pools(step):
            running = self._state.current.running
            with nullcontext() if running is None else running.waiting():
                self._taken = self._pool.takes_over(step)
        return self._taken

    def turn_over(self, running: RunningStep, closing: bool) -> None:
        super().turn_over(running, closing)
        if self._pool is not None and self._state.gate.relaxed is not None:
            self._pool.worked(running.worked_s)

    def step_over(self, step: Step) -> None:
        if self._pool is not None and ends_span(step):
            self._pool.end_span(step)
        if self._pools and step.last:
            self._schedules.reach(step, step.segment_end)

    def closed(self) -> None:
        self._pool = None


class GatherCheck(Feature):
    """Check of the script's own gathers, whose tensors may differ between ranks."""

    def __init__(self, state: TrainingState) -> None:
        models = state.gate.models
        self._end = refuse_uneven(state.current, lambda: any(map(is_sharded, models)))

    def close(self) -> None:
        self._end()
