"""A run's ranks as emulated devices: fitted models multiplied by measured errors.

The error of a rank in a step is its measured ÷ its modelled compute time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.core.cost import Features
from paceline.core.emulation import Emulation, Rates
from paceline.policies import Models
from paceline.policies.base import Floats, Ints
from paceline_backend.insight.whatif.measured import MeasuredSteps
from paceline_backend.insight.whatif.thresholds import THRESHOLDS
from paceline_backend.simulator.sync import Costs


class Resampled(Emulation, frozen=True, kw_only=True):
    """Devices whose step takes the modelled time multiplied by the error of a measured step.

    Each simulated step uses the errors of all ranks in one measured step. A slowdown of several
    ranks at once is therefore simulated as it was measured.
    """

    models: Models
    ratio: Floats  # [S, W]
    remainder_s: Floats  # [S]
    exchanges: Costs
    first_step: int

    def compute_s(self, step: int, batch: Features, threads: Any = 1) -> Floats:
        """Return compute times; `threads` has no effect, as telemetry does not show its effect."""
        return np.asarray(self.models.ett(batch) * self.ratio[self._row(step)])

    def rates(self, step: int, threads: Any = 1) -> Rates:
        """Return the rates of a step; see `Emulation.rates`."""
        models, ratio = self.models, self.ratio[self._row(step)]
        return Rates(models.a * ratio, models.c * ratio, models.b * ratio)

    def all_reduce_s(self, step: int, batches: Features) -> Floats:
        """Return the time of a step's all-reduce, optimizer and loop on each rank, [W]."""
        return np.full(len(batches.samples), self.remainder_s[self._row(step)])

    def costs(self, world: int) -> Costs:
        """Return the durations of exchanges of relaxed synchronisation."""
        return self.exchanges

    def _row(self, step: int) -> int:
        return (step - self.first_step) % len(self.ratio)


def resampled(models: Models, measured: MeasuredSteps, ratio: Floats, first_step: int) -> Resampled:
    """Return devices that use the errors of the measured steps cyclically, in their order.

    The order preserves periodic and temporary slowness. `ratio` is measured ÷ modelled compute
    time, [S, W]. `first_step` is the run's step number of the first simulated step.
    """
    return Resampled(
        a_s=[],
        b_s=[],
        cost=models.cost,
        data_s=measured.loading_s.tolist(),
        models=models,
        ratio=ratio,
        remainder_s=measured.remainder_s,
        exchanges=measured.costs(measured.rest_s),
        first_step=first_step,
    )


def blocks(rng: np.random.Generator, of: int, count: int, draws: int | None = None) -> Ints:
    """Draw `count` indices below `of`, as blocks of consecutive indices.

    The result is [count], or [draws, count] if `draws` is given.
    """
    block = THRESHOLDS.draw_block_steps
    shape = (-(-count // block),) if draws is None else (draws, -(-count // block))
    starts = rng.integers(0, of, shape)
    indices = (starts[..., None] + np.arange(block)) % of
    return np.asarray(indices.reshape(*shape[:-1], -1)[..., :count])


def ratios(models: Models, measured: MeasuredSteps) -> Floats:
    """Return measured ÷ modelled compute time, [S, W]; NaN unless a record covers one batch."""
    modelled = models.ett(measured.features)
    ratio = np.full(modelled.shape, np.nan)
    np.divide(measured.compute_s, modelled, out=ratio, where=measured.single & (modelled > 0))
    return ratio


def filled(ratio: Floats) -> Floats:
    """Return `ratio` with NaN replaced by the rank's median, or by 1 if the rank had no samples."""
    never = np.isnan(ratio).all(axis=0)
    ratio = np.where(never, 1.0, ratio)
    return np.asarray(np.where(np.isnan(ratio), np.nanmedian(ratio, axis=0), ratio))
