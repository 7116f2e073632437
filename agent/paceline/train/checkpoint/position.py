"""Where training is, as a checkpoint keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Position:
    """A point in training: its start, or a point in or after an epoch."""

    epoch: int = 0
    step: int = 0  # number of the next step
    used: npt.NDArray[np.int64] | None = None  # samples used in the epoch; rank 0 knows them

    def as_state(self, samples: int, rank: int) -> dict[str, Any]:
        """The position as values that ``torch.load(weights_only=True)`` accepts."""
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
        """The position that `as_state` made a state of.

        Raises:
            ValueError: the state is of a data set of another length, or not rank 0's.
        """
        if state["samples"] != samples:
            raise ValueError(
                f"the checkpoint is of a data set of {state['samples']} samples, "
                f"this one has {samples}: give the Session the same data"
            )
        if state["rank"] != 0:
            raise ValueError(
                f"the checkpoint's session state is rank {state['rank']}'s: save rank 0's"
            )
        return Position(state["epoch"], state["step"], state["used"].numpy().astype(np.int64))
