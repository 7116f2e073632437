"""A position in training, as a checkpoint stores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Position:
    """A point in training: the start of training, or a point in or after an epoch.

    `step` is the number of the next step. `used` has the indices of the samples that the epoch has
    used so far; only rank 0 knows them.
    """

    epoch: int = 0
    step: int = 0
    used: npt.NDArray[np.int64] | None = None

    def as_state(self, samples: int, rank: int) -> dict[str, Any]:
        """Return the position as values that ``torch.load(weights_only=True)`` accepts."""
        used = np.empty(0, np.int64) if self.used is None else self.used
        return {
            "samples": samples,
            "rank": rank,
            "epoch": self.epoch,
            "step": self.step,
            "used": torch.from_numpy(used),
        }

    @staticmethod
    def of_state(state: dict[str, Any], samples: int) -> Position:
        """Restore a position.

        Raises:
            ValueError: the state is from a data set of another length, or was not saved by rank 0.
        """
        if state["samples"] != samples:
            raise ValueError(
                f"the checkpoint is of a data set of {state['samples']} samples, "
                f"this one has {samples}: give the Session the same data"
            )
        if state["rank"] != 0:
            raise ValueError(
                f"the checkpoint has the session state of rank {state['rank']}: save the state of "
                "rank 0"
            )
        return Position(state["epoch"], state["step"], state["used"].numpy().astype(np.int64))
