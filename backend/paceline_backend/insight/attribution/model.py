"""Model of each rank's expected step time, given its batch and the rank's speed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from paceline.policies.base import Floats, Ints, usable
from paceline.policies.predict.least_squares import non_negative
from paceline_backend.insight.attribution.thresholds import THRESHOLDS

Bools = npt.NDArray[np.bool_]

# σ of a normal distribution ÷ its median absolute deviation.
_SIGMA = 1.4826


@dataclass(frozen=True)
class Rows:
    """Reports of W ranks for K ascending steps; arrays are [K, W], NaN where a record is missing.

    A rank without samples in a step (0 in `samples`) does not take part in the step: no rank waits
    for it.
    """

    step: Ints  # [K]
    samples: Floats  # n
    load: Floats  # Λ, in the user's size unit
    squares: Floats  # Σλ²
    longest: Floats  # max λ
    data_s: Floats
    compute_s: Floats  # T
    # True if a plan divides the batches; False if the script does, regardless of the ranks' speeds.
    planned: bool = True

    def __post_init__(self) -> None:
        shape = self.compute_s.shape
        for name in ("samples", "load", "squares", "longest", "data_s"):
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name}: {getattr(self, name).shape}; compute_s has {shape}")
        if len(shape) != 2 or self.step.shape != shape[:1]:
            raise ValueError(f"step, compute_s: {self.step.shape}, {shape}; give [K] and [K, W]")

    @property
    def took_part(self) -> Bools:
        """Return a mask of the ranks that had a batch and reported its time, [K, W]."""
        return np.asarray(usable(self.samples, self.load, self.compute_s), bool)

    def of(self, steps: Bools) -> Rows:
        """Return the rows of the steps that the mask `steps`, [K], selects."""
        chosen = {
            name: values if name == "planned" else values[steps]
            for name, values in vars(self).items()
        }
        return Rows(**chosen)


@dataclass(frozen=True)
class SpeedModel:
    """Decomposition of each rank's computing time T into a product: ``T = own · rest``, [K, W].

    Where a rank did not take part in a step, its batch counts as a mean batch, and `rest` is 1. For
    the typical rank see `fit`.
    """

    # Modelled time of the rank's batch on the typical rank.
    typical: Floats  # seconds
    # Modelled time of the step's mean batch on the typical rank.
    equal: Floats  # [K, 1], seconds
    # Modelled time of the rank's batch on the rank itself.
    own: Floats  # seconds
    # Modelled time of the step's mean batch on the rank itself.
    own_equal: Floats  # seconds
    rest: Floats  # T / own
    # True where `rest` differs from 1 by more than noise: the rank is slower or faster for a while.
    passing: Bools
    # Computing time ÷ the typical rank's computing time, at equal load; NaN: unknown.
    factor: Floats  # [W]
    # Relative standard deviation of the ranks' step times from `own`; a robust estimate that
    # slowdowns hardly change.
    noise: float


def fit(rows: Rows, took_part: Bools) -> SpeedModel:
    """Fit the cost of a batch, which does not depend on the rank, and each rank's speed.

    The cost of a batch with n samples of sizes λ and the load Λ = Σλ is a non-negative combination
    of Λ, Σλ², n·max λ, n·max λ² (padding, attention), n and 1. A rank's time is a multiple of this
    cost, except that the fraction of the time that does not depend on load can differ between
    ranks. The fit uses medians and reweighted least squares, so temporary slowdowns in less than
    half of a rank's steps do not change the result. The typical rank is the lower median of the
    ranks, sorted by their time for the same batch: of two ranks, the faster one.

    `rows` needs at least one step, and `took_part`, [K, W], at least one rank in each step.
    """
    time = np.where(took_part, rows.compute_s, 1.0)
    columns = _columns(rows, took_part)
    known = took_part.sum(axis=0) >= THRESHOLDS.fewest_rows
    shape, rate, keep, noise = _fit_costs(columns, time, took_part, known, rows.planned)
    typical_rate = _typical(rate[known]) if known.any() else 1.0
    typical, rate = shape * typical_rate, rate / typical_rate
    equal = _mean_of(typical, took_part)
    slope, centre = _slopes(time / (rate * typical), typical, keep, noise)
    alike = np.abs(np.log(rate)) <= np.maximum(
        THRESHOLDS.alike, 3 * 1.25 * noise / np.sqrt(np.maximum(took_part.sum(axis=0), 1))
    )
    rate, slope = np.where(alike | ~known, 1.0, rate), np.where(alike | ~known, 1.0, slope)
    own = rate * _bend(typical, slope, centre)
    own_equal = rate * _bend(np.broadcast_to(equal, own.shape), slope, centre)
    rest = np.where(took_part, time / own, 1.0)
    usual_s = np.median(equal)
    factor = rate * _bend(np.full(len(rate), usual_s), slope, centre) / usual_s
    return SpeedModel(
        typical,
        equal,
        own,
        own_equal,
        rest,
        _sticks_out(np.log(rest), min(noise, THRESHOLDS.most_noise)) & took_part,
        np.where(known, factor, np.nan),
        noise,
    )


def _fit_costs(
    columns: Floats, time: Floats, took_part: Bools, known: Bools, planned: bool
) -> tuple[Floats, Floats, Bools, float]:
    """Return batch costs, each rank's time ÷ cost, a mask of all rows but outliers, and the noise.

    A rank that becomes slow, and gets smaller batches from then on, has times that hardly change.
    If its rows count in the first iteration, costs seem independent of load, and the rows keep
    agreeing with that result in all later iterations. The fit therefore starts twice: once with all
    rows, and once with only those rows that agree with costs proportional to load. The second
    result is used if its deviations are clearly smaller.

    If the script divides its batches itself (`planned` is false), a fit in which all ranks are
    equally fast is tried first. A fit with different speeds could mistake the part of the cost that
    does not depend on load for a difference in speed: a rank whose batches are all larger would
    look slower or faster.
    """
    if not planned and (shape := _shared(columns, time, took_part)) is not None:
        rate = _rates(time / shape, took_part, known)
        off = np.abs(np.log(time / (rate * shape)))
        noise = _noise(off[took_part], int(known.sum()) + 1)
        return shape, rate, took_part & (off <= max(4 * noise, np.log(THRESHOLDS.outlier))), noise
    fitted = int(known.sum()) + 1

    def judged(shape: Floats) -> tuple[Floats, Floats, Bools, float, float]:
        rate = _rates(time / shape, took_part, known)
        off = np.abs(np.log(time / (rate * shape)))
        noise = _noise(off[took_part], fitted)
        keep = took_part & (off <= max(4 * noise, np.log(THRESHOLDS.outlier)))
        far = float(np.minimum(off[took_part], np.log(THRESHOLDS.outlier)).sum())
        return shape, rate, keep, noise, far

    ends = []
    _, proportional, near, _, _ = judged(columns[..., 0])
    for keep in (took_part,) if near.sum() == took_part.sum() else (took_part, near):
        rate = proportional
        for _ in range(THRESHOLDS.rounds):
            end = judged(columns @ _combine(columns[keep], (time / rate)[keep]))
            _, rate, keep, _, _ = end
        ends.append(end)
    first, second = ends[0], ends[-1]
    shape, rate, keep, noise, _ = second if second[-1] < THRESHOLDS.clearly * first[-1] else first
    return shape, rate, keep, noise


def _shared(columns: Floats, time: Floats, took_part: Bools) -> Floats | None:
    """Fit batch costs as if all ranks were equally fast; return None if a rank clearly is not."""
    keep = took_part
    for _ in range(THRESHOLDS.rounds):
        shape = columns @ _combine(columns[keep], time[keep])
        off = np.where(took_part, np.log(time / shape), 0.0)
        noise = _noise(np.abs(off[took_part]), 1)
        keep = took_part & (np.abs(off) <= max(4 * noise, np.log(THRESHOLDS.outlier)))
    medians = [
        abs(float(np.median(each[it])))
        for each, it in zip(off.T, took_part.T, strict=True)
        if it.any()
    ]
    return shape if max(medians) <= np.log(THRESHOLDS.near) else None


def _columns(rows: Rows, took_part: Bools) -> Floats:
    """Return the C terms of each batch's cost, [K, W, C]: load first, each scaled to mean 1."""
    n, load, longest = rows.samples, rows.load, rows.longest
    made = [load, rows.squares, n * longest, n * longest**2, n, np.ones_like(load)]
    means = [float(column[took_part].mean()) for column in made]
    # A term whose mean is 0 carries no information; this happens if all sizes are 0.
    scaled = [column / mean for column, mean in zip(made, means, strict=True) if mean > 0]
    return np.stack([np.where(took_part, column, 1.0) for column in scaled], axis=-1)


def _combine(columns: Floats, time: Floats) -> Floats:
    """Return the non-negative coefficients, [C], that fit `columns`, [R, C], to `time`, [R]."""
    level = float(np.median(time))
    design = columns * (level / time)[:, None]
    gram = design.T @ design
    prior = np.full(len(gram), THRESHOLDS.prior**2)
    prior[0] = 1e-9
    root = np.linalg.cholesky(gram + np.diag(prior))
    target = np.linalg.solve(root, design.sum(axis=0))
    return non_negative(np.asarray(root.T, np.float64), target)[0] * level


def _rates(ratio: Floats, took_part: Bools, known: Bools) -> Floats:
    """Return each rank's median of `ratio`, [W]; if a rank is not `known`, the median of all."""
    rate = np.full(ratio.shape[1], float(np.median(ratio[took_part])))
    if known.any():
        rate[known] = np.nanmedian(np.where(took_part, ratio, np.nan)[:, known], axis=0)
    return rate


def _typical(values: Floats) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])


def _noise(off: Floats, fitted: int) -> float:
    """Estimate the noise σ from absolute errors `off`, [R], of a fit with `fitted` parameters."""
    freedom = len(off) / max(len(off) - fitted, 1)
    return max(_SIGMA * float(np.median(off)) * float(np.sqrt(freedom)), THRESHOLDS.least_noise)


def _mean_of(values: Floats, took_part: Bools) -> Floats:
    total = np.where(took_part, values, 0.0).sum(axis=1, keepdims=True)
    return np.asarray(total / took_part.sum(axis=1, keepdims=True))


def _slopes(ratio: Floats, typical: Floats, keep: Bools, noise: float) -> tuple[Floats, Floats]:
    """Return slope and centre of each rank's time as a function of the `typical` time, both [W].

    The slope is 1 if the rank's time depends on load like the typical rank's time. The centre is
    the mean `typical` time of the rank's batches.
    """
    kept = np.maximum(keep.sum(axis=0), 1)
    centre = np.where(keep, typical, 0.0).sum(axis=0) / kept
    centre = np.where(centre > 0, centre, 1.0)
    x = np.where(keep, (typical - centre) / typical, 0.0)
    error = np.where(keep, ratio - 1, 0.0)
    error = np.where(keep, error - error.sum(axis=0) / kept, 0.0)
    slope = 1 + (x * error).sum(axis=0) / ((x * x).sum(axis=0) + (noise / THRESHOLDS.slope) ** 2)
    return np.asarray(slope), np.asarray(centre)


def _bend(typical: Floats, slope: Floats, centre: Floats) -> Floats:
    """Return each rank's time for batches that take `typical` on the typical rank.

    The time is a line through (`centre`, `centre`) with the rank's `slope`. The result is at least
    0.2 × `typical`, so that it stays positive far from the centre.
    """
    return np.asarray(np.maximum(centre + slope * (typical - centre), 0.2 * typical))


def _sticks_out(off: Floats, noise: float) -> Bools:
    """Return a mask of steps, single or several in a row, that deviate by more than noise.

    `off` is the logarithm of the measured ÷ the modelled time, [K, W], and `noise` is its σ.
    """
    least = float(np.log(THRESHOLDS.outlier))
    stands_out = np.abs(off) > max(THRESHOLDS.single_sigmas * noise, least)
    width = THRESHOLDS.several_steps
    if len(off) >= width:
        padded = np.pad(off, ((width // 2, width // 2), (0, 0)), mode="reflect")
        around = np.median(sliding_window_view(padded, width, axis=0), axis=-1)
        stands_out |= np.abs(around) > max(THRESHOLDS.several_sigmas * noise, least)
    return np.asarray(stands_out)
