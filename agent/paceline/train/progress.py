"""Progress of training on this rank: its epoch, its step, and the samples trained so far.

Each rank counts without communication.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.core.errors import PacelineError
from paceline.train.checkpoint.position import Position
from paceline.train.context import RunContext

Ints = npt.NDArray[np.int64]

_PASSED = (
    "set_epoch({epoch}): the next pass over the loader is epoch {next}. Epochs only increase, and "
    "each pass over the loader counts as one, even if the script leaves it at once; after a "
    "checkpoint, use session.epochs(…)"
)


class TrainingProgress:
    """Epoch and step that training has reached."""

    def __init__(self, context: RunContext) -> None:
        terms = context.terms
        self._terms, self._epoch_steps = terms, context.epoch_steps
        self._streams = context.reader is not None
        # The position from which this session begins to train.
        self.start = Position()
        # The epoch that the loader is in, or was in last.
        self.epoch = 0
        # The step of the run that the script is in, or was in last.
        self.step = -1
        self.next_epoch = 0
        self.in_epoch = False
        # True if training resumes from a checkpoint that was saved after an epoch's last step. Then
        # the first pass over the loader is empty.
        self.epoch_is_done = False
        self.trained = Trained(terms.samples, terms.global_batch, drop_last=terms.drop_last)
        self.trained.resume(0, 0, 0, self._epoch_steps.ends(0))

    def resume(self, position: Position) -> None:
        """Begin at a checkpoint's position. Call it before the first iteration."""
        assert position.used is not None
        self.next_epoch = self.epoch = position.epoch
        self.step = position.step - 1
        terms, ends = self._terms, self._epoch_steps.ends
        left = terms.samples - len(position.used)
        self.epoch_is_done = bool(terms.samples) and terms.epoch_finished(left)
        after = Position(position.epoch + 1, position.step)
        self.start = after if self.epoch_is_done else position
        if not self._streams:
            used, of_epoch = position.used, ends(position.epoch, position.used)
            self.trained.resume(position.epoch, position.step, len(used), of_epoch)
        if self.epoch_is_done or self._streams:
            self.trained.begin_epoch(position.step, ends(position.epoch + 1))

    def set_epoch(self, epoch: int, *, fresh: bool) -> None:
        """Set the epoch of the next pass; `fresh` is True if training begins with this epoch."""
        if self.in_epoch:
            raise PacelineError("set_epoch: call it before the loop over the loader, not in it")
        if epoch < self.next_epoch:
            raise PacelineError(_PASSED.format(epoch=epoch, next=self.next_epoch))
        self.next_epoch = epoch
        if fresh:
            self.epoch, self.start = epoch, Position(epoch)
            self.trained.resume(0, 0, 0, self._epoch_steps.ends(epoch))

    def begin_epoch(self) -> bool:
        """Begin the next epoch; return False if all of its steps precede the loaded checkpoint."""
        self.epoch = self.next_epoch
        self.next_epoch += 1
        is_done, self.epoch_is_done = self.epoch_is_done, False
        return not is_done

    def enter_epoch(self) -> None:
        """Enter the loop over the loader."""
        if self.epoch != self.start.epoch or self.step + 1 != self.start.step:
            self.trained.begin_epoch(self.step + 1, self._epoch_steps.ends(self.epoch))
        self.in_epoch = True

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of steps of the current epoch; between epochs, of the next one."""
        return self._epoch_steps.of(self.epoch if self.in_epoch else self.next_epoch)


class Trained:
    """Counter of the samples that all ranks together have trained.

    A step has `global_batch` samples; an epoch's last step has those that remain. With a token
    budget, `ends` gives the number of samples up to each step. After a resume, epochs before the
    checkpoint's epoch count with all of their samples.

    Args:
        samples: size of the data set; 0: a stream, where each step counts as `global_batch`
            samples.
        global_batch: number of samples of a step.
        drop_last: an epoch's incomplete last step is left out.
    """

    def __init__(self, samples: int, global_batch: int, *, drop_last: bool) -> None:
        self._batch = global_batch
        rest = samples % global_batch if drop_last else 0
        self._of_epoch = samples - rest if samples else 2**53
        # Number of samples before step `_first`, in this epoch and earlier ones.
        self._before = 0
        # The first step of this epoch; if training resumed in this epoch, the first step after the
        # checkpoint.
        self._first = 0
        # Number of samples from step `_first` to the end of the epoch.
        self._left = self._of_epoch
        # For each step from `_first` on: the number of samples from `_first` to the step's end.
        self._ends: Ints | None = None

    def resume(self, epoch: int, step: int, used: int, ends: Ints | None = None) -> None:
        """Continue an epoch at `step`, after a checkpoint; its earlier steps used `used` samples.

        `ends` is as for `begin_epoch`, but for the epoch's remaining steps.
        """
        self._ends = ends
        self._before = epoch * self._of_epoch + used
        self._first, self._left = step, max(0, self._of_epoch - used)

    def begin_epoch(self, step: int, ends: Ints | None = None) -> None:
        """Start another epoch, whose first step is `step`.

        `ends` [S] has the number of samples up to the end of each of the epoch's S steps. None:
        each step has `global_batch` samples.
        """
        self._before = self.upto(step - 1)
        self._ends = ends
        self._first, self._left = step, self._of_epoch

    def upto(self, step: int) -> int:
        """Return the number of samples of all steps up to and including a step of this epoch."""
        if self._ends is not None:
            steps = min(step + 1 - self._first, len(self._ends))
            return self._before + (int(self._ends[steps - 1]) if steps > 0 else 0)
        return self._before + min((step + 1 - self._first) * self._batch, self._left)
