"""Arranges feedback as a table of steps and workers, for allocators."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from paceline_backend.policies.values import Feedback, Floats, Ints, usable


@dataclass(frozen=True)
class StepTable:
    """The workers' records of some steps; arrays are [steps, W], oldest first.

    `usable` is a bool array: True where the record shows the worker's speed.
    """

    step: Ints  # [steps]
    samples: Ints
    compute_s: Floats
    usable: Any

    @staticmethod
    def of(feedback: Feedback, world: int, first: int) -> StepTable:
        """Return the feedback on the steps from `first` on."""
        late = feedback.step >= first
        rows = Feedback(*(getattr(feedback, f.name)[late] for f in fields(feedback)))
        rows = rows.by_step(world)
        says = usable(rows.samples, rows.load, rows.compute_s)
        return StepTable(rows.step[:, 0], rows.samples, rows.compute_s, says)

    def __len__(self) -> int:
        return len(self.step)

    def sums(self) -> tuple[Floats, Floats, Ints]:
        """Return samples, seconds and number of usable steps of each worker, [W] each."""
        samples = np.where(self.usable, self.samples, 0).sum(axis=0).astype(np.float64)
        compute_s = np.where(self.usable, self.compute_s, 0.0).sum(axis=0)
        return samples, compute_s, self.usable.sum(axis=0)
