"""Detection of the step since which all ranks have had their present speeds."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from paceline_backend.policies.base import Floats

# The median of a block is a rank's speed.
_BLOCK = 8  # steps
# A speed has changed if it differs by more than this and by more than chance.
_CHANGED = 0.15  # relative
# Probability that chance alone looks like another speed.
_BY_CHANCE = 0.001
# σ of a normal distribution ÷ its median absolute deviation.
_SIGMA = 1.4826


def same_speeds(ratio: Floats) -> int:
    """Return the first row since which all ranks have had their present speeds.

    This is the first row of the earliest block of steps in which each rank was as fast as now.
    Temporary slowdowns after that block are kept. `ratio` is measured ÷ modelled compute time by a
    model of the present speeds, [S, W]; NaN where a rank had no samples.
    """
    first = len(ratio) % _BLOCK
    blocks = np.log(np.maximum(ratio[first:], 1e-9)).reshape(-1, _BLOCK, ratio.shape[1])
    known = np.asarray(~np.isnan(blocks).all(axis=1), bool)  # [blocks, W]
    median = np.nanmedian(np.where(known[:, None], blocks, 0.0), axis=1)
    alike = np.flatnonzero((np.abs(median) <= _by_chance(blocks, median, known)).all(axis=1))
    if not len(alike):
        return max(0, len(ratio) - _BLOCK)
    return 0 if alike[0] == 0 else first + _BLOCK * int(alike[0])


def _by_chance(blocks: Floats, median: Floats, known: npt.NDArray[np.bool_]) -> Floats:
    """Return the deviation of a block's median up to which the speed counts as unchanged, [W].

    Each rank's spread is measured within blocks, where a lasting change of speed does not widen it.
    """
    within = np.abs(np.where(known[:, None], blocks - median[:, None], np.nan))
    sigma = np.zeros(blocks.shape[2])
    ever = known.any(axis=0)
    sigma[ever] = _SIGMA * np.nanmedian(within[:, :, ever], axis=(0, 1))
    z = NormalDist().inv_cdf(1 - _BY_CHANCE / 2 / median.size)
    # The factor 1.25 is the standard deviation of a median ÷ that of a mean.
    return np.asarray(np.maximum(np.log(1 + _CHANGED), z * 1.25 * sigma / np.sqrt(_BLOCK)))
