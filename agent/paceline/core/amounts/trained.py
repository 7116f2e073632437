"""The number of samples that a run has trained on; each rank counts without communication."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Trained:
    """A counter of samples over all ranks.

    Each step takes a global batch, and an epoch's last step takes the rest. With a token budget,
    `ends` gives each step's number of samples. After a resume, epochs before the checkpoint count
    as whole ones.

    Args:
        samples: size of the data set; 0: a stream, each of whose steps counts as a global batch.
        global_batch: samples of a step.
        drop_last: an epoch's incomplete last step is left out.
    """

    def __init__(self, samples: int, global_batch: int, *, drop_last: bool) -> None:
        self._batch = global_batch
        rest = samples % global_batch if drop_last else 0
        self._of_epoch = samples - rest if samples else 2**53
        # Samples before the steps of this epoch that are counted here: those of earlier epochs, and
        # those before a checkpoint in this epoch.
        self._before = 0
        # The first of these steps.
        self._first = 0
        # Samples of these steps.
        self._left = self._of_epoch
        # Samples up to the end of each of these steps.
        self._ends: Ints | None = None

    def resume(self, epoch: int, step: int, used: int, ends: Ints | None = None) -> None:
        """Continue from a checkpoint with a step, of whose epoch `used` samples are used already.

        `ends` is that of `begin_epoch`, for the epoch's remaining steps.
        """
        self._ends = ends
        self._before = epoch * self._of_epoch + used
        self._first, self._left = step, max(0, self._of_epoch - used)

    def begin_epoch(self, step: int, ends: Ints | None = None) -> None:
        """Start another epoch with a step.

        `ends` [S] has the number of samples up to the end of each of its steps. None: each step has
        a global batch.
        """
        self._before = self.upto(step - 1)
        self._ends = ends
        self._first, self._left = step, self._of_epoch

    def upto(self, step: int) -> int:
        """Return the samples of all steps up to and including a step of the present epoch."""
        if self._ends is not None:
            steps = min(step + 1 - self._first, len(self._ends))
            return self._before + (int(self._ends[steps - 1]) if steps > 0 else 0)
        return self._before + min((step + 1 - self._first) * self._batch, self._left)
