"""Virtual training for several benchmarks: simulated, but planned like real training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.cost import Features
from paceline_backend.simulator import Simulation

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Trained:
    """Result of a virtual training of S steps on W workers.

    Args:
        epoch: epoch of each step, [S].
        features: batches of the workers, [S, W].
        compute_s: computing times, [S, W].
        step_s: times of the steps, including communication, [S].
        plan_s: mean real seconds of planning per step.
    """

    epoch: npt.NDArray[np.int64]
    features: Features
    compute_s: Floats
    step_s: Floats
    plan_s: float

    def since(self, epoch: int) -> Trained:
        """Return the steps from an epoch on."""
        keep = self.epoch >= epoch
        of = Features(*(column[keep] for column in self.features))
        return Trained(self.epoch[keep], of, self.compute_s[keep], self.step_s[keep], self.plan_s)

    @property
    def straggler_effect(self) -> Floats:
        """(max T − min T) / mean T of the ranks that computed, in each step, [S] (LBB Eq. 4)."""
        busy = np.where(self.features.samples > 0, self.compute_s, np.nan)
        spread = np.nanmax(busy, axis=1) - np.nanmin(busy, axis=1)
        return np.asarray(spread / np.nanmean(busy, axis=1))


def train(simulation: Simulation) -> Trained:
    """Run a simulation to its end, planned as a controller plans real training.

    The policy gets no speeds: it learns the devices' speeds from the steps.
    """
    ran = []
    while not simulation.finished:
        ran.append(simulation.advance())
    columns = (np.concatenate(column) for column in zip(*(r.features for r in ran), strict=True))
    epoch = np.repeat([r.plan.epoch for r in ran], [len(r.step_s) for r in ran])
    return Trained(
        epoch,
        Features(*columns),
        np.concatenate([r.compute_s for r in ran]),
        np.concatenate([r.step_s for r in ran]),
        sum(r.plan_s for r in ran) / len(epoch),
    )
