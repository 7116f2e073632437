"""A run's ranks as emulated devices: fitted models, times the errors that were measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.cost import Features
from paceline.core.emulation import Emulation
from paceline_backend.insight.whatif.measured import Measured
from paceline_backend.policies import Models
from paceline_backend.policies.base import Floats, Ints
from paceline_backend.simulator.sync import Costs

BLOCK = 8  # steps that stay together: slowdowns pass, they do not come and go within a step
_PRIOR = 0.12  # how little c and b are trusted to differ, as in `policies.linear`
_LEAST = 1e-3  # share of the time that load explains at least


class Resampled(Emulation, frozen=True, kw_only=True):
    """Ranks whose step k takes what `models` say, times what row ``rows[k]`` measured over that.

    A row is a step that was measured, with all its ranks: what slowed several down at once, or one
    for a while, does so again.
    """

    models: Models
    ratio: Floats  # [S, W]
    remainder_s: Floats  # [S]
    rest_s: Floats  # [W]
    round_s: float
    rows: Ints  # [steps]
    first_step: int

    def compute_s(self, step: int, batch: Features, threads: Any = 1) -> Floats:
        """See `Emulation.compute_s`. What threads would do cannot be told from telemetry."""
        return np.asarray(self.models.ett(batch) * self.ratio[self._row(step)])

    def communication_s(self, step: int, batch: Features) -> Floats:
        """What a step takes beyond its slowest rank, [W]."""
        return np.full(len(batch.samples), self.remainder_s[self._row(step)])

    def costs(self, world: int) -> Costs:
        """Of relaxed synchronisers."""
        return Costs(self.round_s, own_s=self.rest_s)

    def _row(self, step: int) -> int:
        return int(self.rows[(step - self.first_step) % len(self.rows)])


def resampled(
    models: Models, measured: Measured, ratio: Floats, steps: int, first_step: int, salt: int
) -> Resampled:
    """One way in which it might go on: a block bootstrap of steps, and of the models' errors.

    Args:
        models: fitted.
        measured: S steps.
        ratio: measured over modelled compute time, [S, W].
        steps: how many to draw.
        first_step: the first of them.
        salt: another one gives another draw.
    """
    rng = np.random.default_rng([salt, first_step])
    rows = blocks(rng, len(measured), steps)
    return Resampled(
        a_s=[],
        b_s=[],
        data_s=measured.data_s.mean(axis=0).tolist(),
        models=perturbed(models, measured, ratio, blocks(rng, len(measured), len(measured))),
        ratio=ratio,
        remainder_s=measured.remainder_s,
        rest_s=measured.rest_s,
        round_s=measured.round_s,
        rows=rows,
        first_step=first_step,
    )


def blocks(rng: np.random.Generator, of: int, count: int, draws: int | None = None) -> Ints:
    """Indices below `of` in blocks of `BLOCK`, round the end: [count], or [draws, count]."""
    shape = (-(-count // BLOCK),) if draws is None else (draws, -(-count // BLOCK))
    starts = rng.integers(0, of, shape)
    indices = (starts[..., None] + np.arange(BLOCK)) % of
    return np.asarray(indices.reshape(*shape[:-1], -1)[..., :count])


def ratios(models: Models, measured: Measured) -> Floats:
    """Measured over modelled compute time, [S, W]; NaN where a rank had no samples."""
    modelled = models.ett(measured.features)
    ratio = np.full(modelled.shape, np.nan)
    np.divide(measured.compute_s, modelled, out=ratio, where=modelled > 0)
    return ratio


def filled(ratio: Floats) -> Floats:
    """With a rank's median where it had no samples; 1 if it never had."""
    never = np.isnan(ratio).all(axis=0)
    ratio = np.where(never, 1.0, ratio)
    return np.asarray(np.where(np.isnan(ratio), np.nanmedian(ratio, axis=0), ratio))


def perturbed(
    models: Models, measured: Measured, ratio: Floats, rows: npt.NDArray[np.int64]
) -> Models:
    """The models as they might have come out, had the errors fallen on other steps.

    A residual bootstrap: the least squares of relative errors that `policies.linear` does, of
    errors alone. Single large errors, which it leaves out, are cut.
    """
    modelled = np.maximum(models.ett(measured.features), 1e-300)  # [S, W]
    known = measured.features.samples > 0
    error = ratio - np.median(ratio, axis=0)
    most = 4 * np.median(np.abs(error), axis=0)
    error = np.clip(error, -most, most)[rows]
    load = models.cost.load(measured.features)
    typical = _mean(modelled, known)
    scale = np.stack([_mean(load, known), _mean(measured.features.samples, known)], 1)
    columns = [load / scale[:, 0], measured.features.samples / scale[:, 1], np.ones_like(load)]
    design = np.stack(columns, 2) * (known * typical / modelled)[:, :, None]  # [S, W, 3]
    gram = np.einsum("swi,swj->wij", design, design)
    # A rank known by a row or two could be anything: as if there were one more without error.
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


def _mean(values: Any, known: npt.NDArray[np.bool_]) -> Floats:
    """Of each rank over the steps in which it had samples, [W]; 1 if there is none."""
    count = known.sum(axis=0)
    total = np.where(known, values, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), 1.0)
