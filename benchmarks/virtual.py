"""Virtual training: simulated, planned as real training is, shared by several benchmarks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.cost import Features
from paceline.wire import ALLREDUCE
from paceline_backend.insight.whatif.measured import MeasuredSteps, with_spans
from paceline_backend.simulator import Simulation, TrainedSegment

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Trained:
    """What was trained: S steps, and what planning cost."""

    epoch: npt.NDArray[np.int64]  # epoch of each step, [S]
    features: Features  # [S, W]
    compute_s: Floats  # [S, W]
    step_s: Floats  # communication included, [S]
    plan_s: float  # mean real time that planning took for a step

    def since(self, epoch: int) -> Trained:
        """The steps from an epoch on."""
        keep = self.epoch >= epoch
        of = Features(*(column[keep] for column in self.features))
        return Trained(self.epoch[keep], of, self.compute_s[keep], self.step_s[keep], self.plan_s)

    @property
    def straggler_effect(self) -> Floats:
        """(max T − min T) / mean T of the ranks that computed, in each step, [S] (LBB Eq. 4)."""
        busy = np.where(self.features.samples > 0, self.compute_s, np.nan)
        spread = np.nanmax(busy, axis=1) - np.nanmin(busy, axis=1)
        return np.asarray(spread / np.nanmean(busy, axis=1))


def module_at(path: Path) -> Any:
    """The module in a file with scenarios."""
    name = f"scenarios of {path.resolve()}"  # a benchmark may have the name of the file
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def measured(ran: Sequence[TrainedSegment], newest: int) -> MeasuredSteps:
    """What a forecast knows of the newest steps of a simulation."""
    columns = (np.concatenate(column) for column in zip(*(r.features for r in ran), strict=True))
    features = Features(*columns)
    of = MeasuredSteps(
        step=np.concatenate([r.segment.first_step + np.arange(len(r.step_s)) for r in ran]),
        features=features,
        compute_s=np.concatenate([r.compute_s for r in ran]),
        data_s=np.concatenate([r.data_s for r in ran]),
        sync_s=np.concatenate([r.wait_s + r.communication_s for r in ran]),
        rank_step_s=np.concatenate([r.rank_step_s for r in ran]),
        load=features.load.sum(axis=1),
    )
    of = of.since(max(len(of) - newest, 0))
    relaxed = [r for r in ran if r.segment.synchroniser != ALLREDUCE]

    def reduced_s(seqs: list[int]) -> list[float]:
        of_segments = [r for r in relaxed if r.segment.seq in seqs]
        return [round_.reduced_s for r in of_segments for round_ in r.rounds][-256:]

    return with_spans(of, [r.segment for r in relaxed], reduced_s)


def train(simulation: Simulation) -> Trained:
    """Trains to the end, planned as a controller plans real training.

    The policy gets no speeds: it learns the devices' speeds from the steps.
    """
    ran = []
    while not simulation.finished:
        ran.append(simulation.advance())
    columns = (np.concatenate(column) for column in zip(*(r.features for r in ran), strict=True))
    epoch = np.repeat([r.segment.epoch for r in ran], [len(r.step_s) for r in ran])
    return Trained(
        epoch,
        Features(*columns),
        np.concatenate([r.compute_s for r in ran]),
        np.concatenate([r.step_s for r in ran]),
        sum(r.plan_s for r in ran) / len(epoch),
    )
