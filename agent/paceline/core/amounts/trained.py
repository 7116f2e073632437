"""How many samples a run has trained on, as every rank can count by itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Trained:
    """Counts samples over all ranks: each step takes a global batch, an epoch's last one the rest.

    With a token budget each step takes its own number of samples, which `ends` tells.

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
        self._ends: Ints | None = None  # samples up to the end of each of them

    def resume(self, epoch: int, step: int, used: int, ends: Ints | None = None) -> None:
        """Goes on from a checkpoint.

        Args:
            epoch: in which training goes on.
            step: the next one.
            used: samples that the epoch has used already.
            ends: see `begin_epoch`; of the epoch's steps that are left.
        """
        self._ends = ends
        self._before = epoch * self._of_epoch + used
        self._first, self._left = step, max(0, self._of_epoch - used)

    def begin_epoch(self, step: int, ends: Ints | None = None) -> None:
        """Another epoch begins.

        Args:
            step: its first.
            ends: how many samples each of its steps and those before it have together, [S]. None:
                each has a global batch.
        """
        self._before = self.upto(step - 1)
        self._ends = ends
        self._first, self._left = step, self._of_epoch

    def upto(self, step: int) -> int:
        """Samples of all steps up to and including one of the present epoch."""
        if self._ends is not None:
            steps = min(step + 1 - self._first, len(self._ends))
            return self._before + (int(self._ends[steps - 1]) if steps > 0 else 0)
        return self._before + min((step + 1 - self._first) * self._batch, self._left)
