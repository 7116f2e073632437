"""Token limits that ranks learned when their memory ran out in earlier attempts of the run."""

from __future__ import annotations

import logging
from dataclasses import replace

from paceline.core.amounts.budget import Budget
from paceline.train.amounts.budgeting import with_learned
from paceline.train.amounts.memory import Memory, learned_by
from paceline.train.feature import Feature
from paceline.train.state import TrainingState
from paceline.train.timing import RunningStep

logger = logging.getLogger(__name__)


class LearnedLimits(Feature):
    """Limits of a session with a token budget, from what ranks learned (`amounts.memory`)."""

    def __init__(self, state: TrainingState, budget: Budget) -> None:
        self._state, self._budget = state, budget
        # None before the first iteration.
        self._memory: Memory | None = None

    def connect(self) -> None:
        """Apply the limits that ranks learned in earlier attempts."""
        state = self._state
        meeting, before = state.meeting, state.context.limits
        self._memory = Memory(state.context.environment.memory, meeting.process)
        learned = learned_by(meeting, self._memory.known)
        limits = with_learned(before, learned, self._budget, state.findings.devices)
        state.context = replace(state.context, limits=limits)
        if meeting.leads and limits != before:
            logger.warning(
                "memory ran out in earlier attempts: token_limits is %s now", limits.tokens
            )

    def turn_over(self, running: RunningStep, closing: bool) -> None:
        if self._memory is not None and not closing:
            self._memory.fitted(running.step.load)

    def end_epoch(self, ran_out: bool, raised: bool) -> None:
        running = self._state.current.running
        if self._memory is not None and raised and running is not None:
            self._memory.left(running.step.load)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
