"""Checkpoints in the loop: which step is saved, and the position from which training continues.

After each planned step whose gradients are all-reduced, and after each epoch, all ranks agree on
whether a checkpoint is due. If an operator or a signal ends the run, or nodes join or leave, all
ranks save once more.
"""

from __future__ import annotations

import threading

from paceline.train.checkpoint.position import Position
from paceline.train.checkpoint.saver import Saver
from paceline.train.feature import Feature
from paceline.train.plan_shard import LocalStep
from paceline.train.state import TrainingState


class Checkpoints(Feature):
    """Feature that saves checkpoints, for a session whose script declares them."""

    def __init__(self, state: TrainingState, saver: Saver) -> None:
        self._state, self._saver = state, saver
        # The epoch's newest step that has ended but is not in a checkpoint yet.
        self._ended: LocalStep | None = None
        # The newest step in which the optimiser stepped: a step of this epoch, or the last step
        # before this epoch. None: the optimiser stepped in neither.
        self._stepped: int | None = -1

    def restore_random(self) -> None:
        self._saver.restore_random()

    def before_epoch(self) -> None:
        """Save the training position if the plan has ended because nodes join or leave."""
        if self._state.reforms:
            self._save_last()

    def begin_epoch(self, epoch: int) -> None:
        self._ended = None
        self._stepped = self._state.progress.step if self._state.gate.stepped else None

    def step_ended(self, step: LocalStep) -> None:
        """Save a checkpoint if it is due and all ranks are synchronised after this step."""
        self._ended = step
        if self._state.gate.stepped:
            self._stepped = step.step
        if self._state.gate.relaxed is None:
            self._save(step)

    def epoch_ended(self, ran_out: bool) -> None:
        """Save a checkpoint if one is due or the run ends.

        After the last epoch, also wait until the checkpoint is written, because the script may
        destroy the process groups then. If the run is stopped, this epoch is the last one.
        """
        state = self._state
        if ran_out and self._ended is not None:
            self._save(self._ended)
        if ran_out and (state.stopped or state.reforms):
            self._save_last()
        epochs = state.findings.epochs
        if state.stopped or epochs is None or state.progress.next_epoch >= epochs:
            self._saver.wait()

    def release(self) -> None:
        self._saver.close()

    def _save(self, step: LocalStep) -> None:
        """Save a checkpoint if one is due, after a step at which all ranks are synchronised."""
        state = self._state
        state.saving = True
        try:
            if self._saver.due(step, state.gate.stepped):
                self._ended = None
                # Finish the step first, so that its time does not include saving.
                state.finish_step()
                state.statistics.agree()
                self._saver.save(state.position(), self._reported())
        finally:
            state.saving = False

    def _save_last(self) -> None:
        state = self._state
        state.finish_step()
        state.saving = True
        try:
            state.statistics.agree()
            self._saver.save_last(self._last_position(), self._reported())
        finally:
            state.saving = False

    def _last_position(self) -> Position | None:
        """Return the position of the optimiser's last step, or None if it is in an earlier epoch.

        Gradients accumulated since that step are lost.
        """
        state = self._state
        if state.gate.stepped:
            return state.position()
        if self._stepped is None or not state.progress.in_epoch:
            return None
        return state.position_after(self._stepped)

    def _reported(self) -> threading.Event | None:
        """Return an event that is set once all steps so far are reported; None without reports."""
        reporter = self._state.reporter
        return reporter.reported() if reporter is not None else None
