"""Training on emulated devices under a policy, in the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.cost import Features
from paceline.core.emulation import Emulation
from paceline.policies.base import Feedback, Floats, Ints, Policy
from paceline.wire import Hello
from paceline_backend.simulator import Simulation, TrainedSegment
from support.records import hello


@dataclass(frozen=True)
class Trained:
    """Arrays are [S, W]."""

    counts: Ints
    loads: Floats
    compute_s: Floats

    @property
    def step_s(self) -> Floats:
        return np.asarray(self.compute_s.max(axis=1))

    def effect(self, first: int, last: int) -> float:
        """Mean SE of some steps' times, of the ranks with samples."""
        mean_s = np.nanmean(np.where(self.counts > 0, self.compute_s, np.nan)[first:last], axis=0)
        return float((np.nanmax(mean_s) - np.nanmin(mean_s)) / np.nanmean(mean_s))

    def changes(self) -> list[int]:
        """The steps from which on counts are others."""
        return [int(k) + 1 for k in np.flatnonzero((np.diff(self.counts, axis=0) != 0).any(axis=1))]


def feedback_of(compute_s: Any, samples: Any = 1, first: int = 0) -> Feedback:
    """Steps that take such times, [S][W], of samples of size 1: so many of each rank, [W]."""
    times_s = np.array(compute_s, np.float64)
    step, rank = np.divmod(np.arange(times_s.size), times_s.shape[1])
    n = np.array(np.broadcast_to(samples, times_s.shape), np.int64).ravel()
    load = n.astype(np.float64)
    time_s = np.where(n > 0, times_s.ravel(), 0.0)
    return Feedback(first + step, rank, n, load, time_s, load, np.ones(len(n)))


def rows_of(batches: Features, compute_s: Floats) -> Feedback:
    """Steps from 0 on, in which ranks had these batches and took these times, both [S, W]."""
    step, rank = np.divmod(np.arange(compute_s.size), compute_s.shape[1])
    samples, load, squares, longest = (np.ravel(column) for column in batches)
    return Feedback(step, rank, samples, load, compute_s.ravel(), squares, longest)


def endless(sizes: Floats, world: int, global_batch: int) -> Hello:
    """The start of a run without a last epoch, whose plans take effect at once."""
    encoded = np.asarray(sizes, "<f8").tobytes()
    return hello(world, global_batch=global_batch, sizes=encoded, seed=3, epochs=None, lookahead=0)


def train(simulation: Simulation) -> list[TrainedSegment]:
    ran = []
    while not simulation.finished:
        ran.append(simulation.advance())
    return ran


def simulate(
    policy: Policy, devices: Emulation, sizes: Floats, global_batch: int, steps: int, **fields: Any
) -> Trained:
    """Trains at least so many steps, for ever the same epochs."""
    fields = {"epochs": None, "sizes": np.asarray(sizes, "<f8").tobytes(), **fields}
    world = len(devices.a_s)
    run = Simulation(hello(world, global_batch=global_batch, **fields), devices, policy)
    ran = []
    while run.step < steps and not run.finished:
        ran.append(run.advance())
    return Trained(
        np.concatenate([r.features.samples for r in ran])[:steps],
        np.concatenate([r.features.load for r in ran])[:steps],
        np.concatenate([r.compute_s for r in ran])[:steps],
    )
