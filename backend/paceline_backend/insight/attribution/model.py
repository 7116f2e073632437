"""What each rank's step should have taken, from what its batch holds and how fast the rank is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from scipy.optimize import nnls

from paceline_backend.policies.base import Floats, Ints, usable

Bools = npt.NDArray[np.bool_]

FEW = 4  # rows of a rank below which a lasting slowness cannot be told from a passing one
_ROUNDS = 5  # of shape and speeds in turn; more changes nothing
_PRIOR = 0.12  # as in the linear predictor: a cost is thought to be proportional to load
_SLOPE = 0.5  # by how much (1 σ) a rank's cost of load may differ from its cost in all
_SIGMA = 1.4826  # σ of a normal distribution ÷ its median absolute deviation
_LEAST_NOISE = 0.005
_MOST_NOISE = 0.06  # what varies more is no machine's usual noise (1 % … 5 %): it counts
_SINGLE = 4.5  # σ: one step by itself sticks out (once in 150,000 by chance),
_SEVERAL = 2.5  # σ: the median of so many steps does: nearly as rare
_WIDTH = 5
_OUTLIER = 1.1  # and at least by this factor
_ALIKE = 0.02  # speeds that differ by less count as the same


@dataclass(frozen=True)
class Rows:
    """What W ranks reported of K steps, ascending; arrays are [K, W], NaN where there is no record.

    A rank without samples in a step (0 in `samples`) takes no part in it: nobody waits for it.
    """

    step: Ints  # [K]
    samples: Floats  # n
    load: Floats  # Λ, user's size unit
    squares: Floats  # Σλ²
    longest: Floats  # max λ
    data_s: Floats
    compute_s: Floats  # T

    def __post_init__(self) -> None:
        shape = self.compute_s.shape
        for name in ("samples", "load", "squares", "longest", "data_s"):
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name}: {getattr(self, name).shape}; compute_s has {shape}")
        if len(shape) != 2 or self.step.shape != shape[:1]:
            raise ValueError(f"step, compute_s: {self.step.shape}, {shape}; give [K] and [K, W]")

    @property
    def took_part(self) -> Bools:
        """Which ranks had a batch, and told of it, [K, W]."""
        return np.asarray(usable(self.samples, self.load, self.compute_s), bool)

    def of(self, steps: Bools) -> Rows:
        """Only some steps, [K]."""
        return Rows(**{name: values[steps] for name, values in vars(self).items()})


@dataclass(frozen=True)
class Model:
    """Each rank's step as typical cost · speed · what is left: ``T = own · rest``, [K, W].

    Where a rank took no part, all are as if it were typical.
    """

    typical: Floats  # s its batch would take the typical rank
    equal: Floats  # [K, 1] s the step's mean batch would take the typical rank
    own: Floats  # s its batch takes this rank usually
    own_equal: Floats  # s the step's mean batch would take this rank
    rest: Floats  # T / own
    passing: Bools  # whether that is more than noise
    factor: Floats  # [W] time at equal load ÷ the typical rank's; NaN: unknown
    noise: float  # relative standard deviation of a usual step


def fit(rows: Rows, took_part: Bools) -> Model:
    """Fits costs that all ranks share, and what each rank makes of them.

    A batch costs a non-negative combination of Λ, Σλ², n·max λ, n·max λ² (padding, attention), n
    and 1. A rank takes a multiple of that, and its own part of it that does not depend on load.
    Medians and reweighted least squares, so that passing slowdowns in less than half of a rank's
    steps change nothing. The typical rank is the lower median: of two, the faster one.

    Args:
        rows: K ≥ 1 steps.
        took_part: which ranks count, at least one in each step, [K, W].
    """
    time = np.where(took_part, rows.compute_s, 1.0)
    columns = _columns(rows, took_part)
    known = took_part.sum(axis=0) >= FEW
    shape = columns[..., 0]
    rate = _rates(time / shape, took_part, known)
    keep = took_part.copy()
    for _ in range(_ROUNDS):
        shape = columns @ _combine(columns[keep], (time / rate)[keep])
        rate = _rates(time / shape, took_part, known)
        off = np.abs(np.log(time / (rate * shape)))
        noise = _noise(off[took_part], int(known.sum()) + 1)
        keep = took_part & (off <= max(4 * noise, np.log(_OUTLIER)))
    typical_rate = _typical(rate[known]) if known.any() else 1.0
    typical, rate = shape * typical_rate, rate / typical_rate
    equal = _mean_of(typical, took_part)
    slope, centre = _slopes(time / (rate * typical), typical, keep, noise)
    alike = np.abs(np.log(rate)) <= np.maximum(
        _ALIKE, 3 * 1.25 * noise / np.sqrt(np.maximum(took_part.sum(axis=0), 1))
    )
    rate, slope = np.where(alike | ~known, 1.0, rate), np.where(alike | ~known, 1.0, slope)
    own = rate * _bend(typical, slope, centre)
    own_equal = rate * _bend(np.broadcast_to(equal, own.shape), slope, centre)
    rest = np.where(took_part, time / own, 1.0)
    usual_s = np.median(equal)
    factor = rate * _bend(np.full(len(rate), usual_s), slope, centre) / usual_s
    return Model(
        typical,
        equal,
        own,
        own_equal,
        rest,
        _sticks_out(np.log(rest), min(noise, _MOST_NOISE)) & took_part,
        np.where(known, factor, np.nan),
        noise,
    )


def _columns(rows: Rows, took_part: Bools) -> Floats:
    """What a batch's cost is made of, each with mean 1, load first; 1 where there is no batch."""
    n, load, longest = rows.samples, rows.load, rows.longest
    made = [load, rows.squares, n * longest, n * longest**2, n, np.ones_like(load)]
    means = [float(column[took_part].mean()) for column in made]
    # Records of older releases have neither squares nor longest.
    scaled = [column / mean for column, mean in zip(made, means, strict=True) if mean > 0]
    return np.stack([np.where(took_part, column, 1.0) for column in scaled], axis=-1)


def _combine(columns: Floats, time: Floats) -> Floats:
    """Non-negative least squares of relative errors, [C] from [R, C] and [R]."""
    level = float(np.median(time))
    design = columns * (level / time)[:, None]
    gram = design.T @ design
    prior = np.full(len(gram), _PRIOR**2)
    prior[0] = 1e-9
    root = np.linalg.cholesky(gram + np.diag(prior))
    target = np.linalg.solve(root, design.sum(axis=0))
    return np.asarray(nnls(root.T, target)[0]) * level


def _rates(ratio: Floats, took_part: Bools, known: Bools) -> Floats:
    """Each rank's median, [W]; of all, where a rank has too few rows."""
    rate = np.full(ratio.shape[1], float(np.median(ratio[took_part])))
    if known.any():
        rate[known] = np.nanmedian(np.where(took_part, ratio, np.nan)[:, known], axis=0)
    return rate


def _typical(values: Floats) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])


def _noise(off: Floats, fitted: int) -> float:
    """σ of a step, from absolute deviations [R] after so many medians were taken."""
    freedom = len(off) / max(len(off) - fitted, 1)
    return max(_SIGMA * float(np.median(off)) * float(np.sqrt(freedom)), _LEAST_NOISE)


def _mean_of(values: Floats, took_part: Bools) -> Floats:
    """Mean of each step's ranks, [K, 1]."""
    total = np.where(took_part, values, 0.0).sum(axis=1, keepdims=True)
    return np.asarray(total / took_part.sum(axis=1, keepdims=True))


def _slopes(ratio: Floats, typical: Floats, keep: Bools, noise: float) -> tuple[Floats, Floats]:
    """How much more of each rank's cost depends on load than the typical rank's, around where.

    Both [W]. Drawn towards 1 as far as its batches tell too little.
    """
    kept = np.maximum(keep.sum(axis=0), 1)
    centre = np.where(keep, typical, 0.0).sum(axis=0) / kept
    centre = np.where(centre > 0, centre, 1.0)
    x = np.where(keep, (typical - centre) / typical, 0.0)
    error = np.where(keep, ratio - 1, 0.0)
    error = np.where(keep, error - error.sum(axis=0) / kept, 0.0)
    slope = 1 + (x * error).sum(axis=0) / ((x * x).sum(axis=0) + (noise / _SLOPE) ** 2)
    return np.asarray(slope), np.asarray(centre)


def _bend(typical: Floats, slope: Floats, centre: Floats) -> Floats:
    """Cost with another slope around the centre; far outside of what was seen it stays positive."""
    return np.asarray(np.maximum(centre + slope * (typical - centre), 0.2 * typical))


def _sticks_out(off: Floats, noise: float) -> Bools:
    """Where a rank is off its usual time by more than noise: by itself, or some steps together."""
    least = float(np.log(_OUTLIER))
    found = np.abs(off) > max(_SINGLE * noise, least)
    if len(off) >= _WIDTH:
        padded = np.pad(off, ((_WIDTH // 2, _WIDTH // 2), (0, 0)), mode="reflect")
        around = np.median(sliding_window_view(padded, _WIDTH, axis=0), axis=-1)
        found |= np.abs(around) > max(_SEVERAL * noise, least)
    return np.asarray(found)
