"""A run's ranks as emulated devices: fitted models multiplied by measured errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.cost import Features
from paceline.core.emulation import Emulation, Rates
from paceline_backend.insight.whatif.measured import Measured
from paceline_backend.policies import Models
from paceline_backend.policies.base import Floats, Ints
from paceline_backend.simulator.sync import Costs

BLOCK = 8  # steps that are drawn together, because slowdowns last for several steps
_PRIOR = 0.12  # prior weight of c and b, as in `policies.predict.linear`
_LEAST = 1e-3  # load explains at least this share of the time


class Resampled(Emulation, frozen=True, kw_only=True):
    """Ranks whose step k takes the modelled time multiplied by the error of row ``rows[k]``.

    A row is a measured step with all its ranks. A slowdown of several ranks at once, or of one rank
    for a while, is thus repeated as it was.
    """

    models: Models
    ratio: Floats  # [S, W]
    remainder_s: Floats  # [S]
    rest_s: Floats  # [W]
    round_s: float
    rows: Ints  # [steps]
    first_step: int

    def compute_s(self, step: int, batch: Features, threads: Any = 1) -> Floats:
        """See `Emulation.compute_s`. `threads` has no effect: telemetry does not show theirs."""
        return np.asarray(self.models.ett(batch) * self.ratio[self._row(step)])

    def rates(self, step: int, threads: Any = 1) -> Rates:
        """See `Emulation.rates`."""
        models, ratio = self.models, self.ratio[self._row(step)]
        return Rates(models.a * ratio, models.c * ratio, models.b * ratio)

    def communication_s(self, step: int, batch: Features) -> Floats:
        """Time of a step beyond its slowest rank's, [W]."""
        return np.full(len(batch.samples), self.remainder_s[self._row(step)])

    def costs(self, world: int) -> Costs:
        """What exchanges of relaxed synchronisers take."""
        return Costs(self.round_s, own_s=self.rest_s)

    def _row(self, step: int) -> int:
        return int(self.rows[(step - self.first_step) % len(self.rows)])


def resampled(
    models: Models, measured: Measured, ratio: Floats, steps: int, first_step: int, salt: int
) -> Resampled:
    """One way in which the run might go on: a block bootstrap of steps and of models' errors.

    Args:
        models: fitted.
        measured: S steps.
        ratio: measured ÷ modelled compute time, [S, W].
        steps: how many to draw.
        first_step: number of the first drawn step in the run.
        salt: another salt gives another draw.
    """
    rng = np.random.default_rng([salt, first_step])
    rows = blocks(rng, len(measured), steps)
    return Resampled(
        a_s=[],
        b_s=[],
        cost=models.cost,
        data_s=_mean(measured.data_s, measured.single, usual=0.0).tolist(),
        models=perturbed(models, measured, ratio, blocks(rng, len(measured), len(measured))),
        ratio=ratio,
        remainder_s=measured.remainder_s,
        rest_s=measured.rest_s,
        round_s=measured.round_s,
        rows=rows,
        first_step=first_step,
    )


def blocks(rng: np.random.Generator, of: int, count: int, draws: int | None = None) -> Ints:
    """Random blocks of `BLOCK` consecutive indices modulo `of`: [count], or [draws, count]."""
    shape = (-(-count // BLOCK),) if draws is None else (draws, -(-count // BLOCK))
    starts = rng.integers(0, of, shape)
    indices = (starts[..., None] + np.arange(BLOCK)) % of
    return np.asarray(indices.reshape(*shape[:-1], -1)[..., :count])


def ratios(models: Models, measured: Measured) -> Floats:
    """Measured ÷ modelled compute time, [S, W]; NaN where a record is not of one batch."""
    modelled = models.ett(measured.features)
    ratio = np.full(modelled.shape, np.nan)
    np.divide(measured.compute_s, modelled, out=ratio, where=measured.single & (modelled > 0))
    return ratio


def filled(ratio: Floats) -> Floats:
    """`ratio` with NaN replaced by the rank's median, or by 1 if the rank never had samples."""
    never = np.isnan(ratio).all(axis=0)
    ratio = np.where(never, 1.0, ratio)
    return np.asarray(np.where(np.isnan(ratio), np.nanmedian(ratio, axis=0), ratio))


def perturbed(
    models: Models, measured: Measured, ratio: Floats, rows: npt.NDArray[np.int64]
) -> Models:
    """The models as they would have come out if the errors had fallen on other steps.

    This is a residual bootstrap: the same least squares of relative errors as in
    `policies.predict.linear`, applied to the errors alone. That predictor leaves out single large
    errors; here they are cut.
    """
    modelled = np.maximum(models.ett(measured.features), 1e-300)  # [S, W]
    known = measured.single
    error = ratio - np.median(ratio, axis=0)
    most = 4 * np.median(np.abs(error), axis=0)
    error = np.clip(error, -most, most)[rows]
    load = models.cost.load(measured.features)
    typical = _mean(modelled, known)
    scale = np.stack([_mean(load, known), _mean(measured.features.samples, known)], 1)
    columns = [load / scale[:, 0], measured.features.samples / scale[:, 1], np.ones_like(load)]
    design = np.stack(columns, 2) * (known * typical / modelled)[:, :, None]  # [S, W, 3]
    gram = np.einsum("swi,swj->wij", design, design)
    # A rank with one or two rows is uncertain: add one row without error.
    gram += np.diag([1.0, 1.0 + _PRIOR**2, 1.0 + _PRIOR**2])
    shift = np.linalg.solve(gram, np.einsum("swi,sw->wi", design, error)[:, :, None])[:, :, 0]
    shift *= typical[:, None]
    a = models.a + shift[:, 0] / scale[:, 0]
    return replace(
        models,
        a=np.maximum(a, _LEAST * typical / scale[:, 0]),
        c=np.maximum(models.c + shift[:, 1] / scale[:, 1], 0.0),
        b=np.maximum(models.b + shift[:, 2], 0.0),
    )


def _mean(values: Any, known: npt.NDArray[np.bool_], usual: float = 1.0) -> Floats:
    """Mean of each rank over its known steps, [W]; `usual` without any."""
    count = known.sum(axis=0)
    total = np.where(known, values, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), usual)
