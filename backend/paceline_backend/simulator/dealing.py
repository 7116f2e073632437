"""Computes a segment's batches and their compute times, also where ranks take over batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.core.cost import Features, features
from paceline.core.emulation import Emulation
from paceline_backend.policies.base import Floats, Ints
from paceline_backend.simulator.sync import Bodies, Prices


class DealtBatches:
    """The batches of a segment: at first as planned, then as ranks shared them.

    Args:
        devices: of the ranks.
        first_step: of the segment.
        sizes: of the segment's samples, in the order of steps and ranks.
        counts: samples of each batch, [S, W].
        data_s: loading time, [S, W].
        load_s: each rank's time to load another rank's batch, [W].
        threads: CPU threads, a number or [W].
        limits: samples that fit into each rank's memory; empty: any number.
    """

    def __init__(
        self,
        devices: Emulation,
        first_step: int,
        sizes: Floats,
        counts: Ints,
        data_s: Floats,
        load_s: Floats,
        threads: Any,
        limits: list[int],
    ) -> None:
        self.features = features(sizes, counts.copy())
        self.data_s, self.compute_s = data_s, np.zeros(counts.shape)
        self._devices, self._first_step, self._samples = devices, first_step, len(sizes)
        self._threads, self._limits, self._load_s = threads, limits, load_s
        for at in range(len(counts)):
            self.compute_s[at] = self._taken_s(at)

    def step(self, at: int) -> Features:
        """Return the batches of a step of the segment, [W]."""
        return Features(*(column[at] for column in self.features))

    def room(self, rank: int) -> int:
        """See `Dealing.room`."""
        return self._limits[rank] if self._limits else self._samples

    def prices(self, at: int) -> Prices:
        """See `Dealing.prices`."""
        rates = self._devices.rates(self._first_step + at, self._threads)
        load = np.asarray(self._devices.cost.load(self.step(at)))
        return Prices(load, rates.load_s, rates.sample_s, rates.batch_s + self._load_s)

    def pool(self, bodies: Bodies) -> None:
        """See `Dealing.pool`."""
        rows, taken = slice(bodies.first, bodies.first + bodies.span), bodies.taken
        for name, column in zip(Features._fields, self.features, strict=True):
            values = bodies.of_planned(column)
            column[rows] = bodies.reported(values, most=name == "longest")
        data_s = np.where(taken, self._load_s, bodies.of_planned(self.data_s))
        compute_s = np.where(taken, bodies.work_s - data_s, bodies.of_planned(self.compute_s))
        self.data_s[rows] = bodies.reported(data_s)
        self.compute_s[rows] = bodies.reported(compute_s)

    def _taken_s(self, at: int) -> Floats:
        return self._devices.compute_s(self._first_step + at, self.step(at), self._threads)
