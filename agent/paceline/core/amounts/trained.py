"""How many samples a run has trained on, as every rank can count by itself."""

from __future__ import annotations


class Trained:
    """Counts samples over all ranks: each step takes a global batch, an epoch's last one the rest.

    Where training goes on from a checkpoint, epochs before it count as whole ones.

    Args:
        samples: of the data set; 0: a stream, each of whose steps counts as a global batch.
        global_batch: samples of a step.
        drop_last: an epoch's incomplete last step is left out.
    """

    def __init__(self, samples: int, global_batch: int, *, drop_last: bool) -> None:
        self._batch = global_batch
        rest = samples % global_batch if drop_last else 0
        self._of_epoch = samples - rest if samples else 2**53
        self._before = 0  # samples before the steps of this epoch, or before the checkpoint in it
        self._first = 0  # the first of these steps
        self._left = self._of_epoch  # samples that they have

    def resume(self, epoch: int, step: int, used: int) -> None:
        """Goes on from a checkpoint.

        Args:
            epoch: in which training goes on.
            step: the next one.
            used: samples that the epoch has used already.
        """
        self._before = epoch * self._of_epoch + used
        self._first, self._left = step, max(0, self._of_epoch - used)

    def begin_epoch(self, step: int) -> None:
        """Another epoch begins with this step."""
        self._before = self.upto(step - 1)
        self._first, self._left = step, self._of_epoch

    def upto(self, step: int) -> int:
        """Samples of all steps up to and including one of the present epoch."""
        return self._before + min((step + 1 - self._first) * self._batch, self._left)
