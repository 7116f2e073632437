"""Analysis of a time series over steps: its levels, temporary spans, periods and trends.

A series has one value for each step, such as the logarithm of a rank's slowdown. `levels` divides
it into pieces of constant level. `course_of` then separates the lasting level from the spans of
temporary slowness. `period_of` and `folded` detect periodic spans, and `trend_of` detects growth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from paceline.policies.base import Floats, Ints
from paceline_backend.insight.verdict.observed import Bools
from paceline_backend.insight.verdict.thresholds import THRESHOLDS

# σ of a normal distribution ÷ its median absolute deviation.
_SIGMA = 1.4826


def noise_of(series: Floats, known: Bools, least: float) -> Floats:
    """Estimate the noise of each series, as a standard deviation σ, [W].

    The estimate uses the differences between consecutive steps, so changes of level and temporary
    spans hardly affect it. `series` and the mask of `known` values are [K, W]. The result is at
    least `least`.
    """
    both = known[1:] & known[:-1]
    off = np.where(both, np.abs(np.diff(series, axis=0)), np.nan)
    some = both.any(axis=0)
    own = np.full(series.shape[1], least)
    if some.any():
        own[some] = _SIGMA / np.sqrt(2) * np.nanmedian(off[:, some], axis=0)
    # With fewer than `lasting_steps` steps, an estimate from a single rank is too uncertain, so all
    # ranks get the estimate from all ranks together.
    if len(series) < THRESHOLDS.lasting_steps and some.any():
        return np.full(series.shape[1], max(_SIGMA / np.sqrt(2) * float(np.nanmedian(off)), least))
    pooled = float(np.sort(own)[(len(own) - 1) // 2])
    return np.asarray(np.maximum(np.clip(own, pooled, 2 * pooled), least))


def levels(series: Floats, known: Bools, noise: Floats) -> list[list[tuple[int, int]]]:
    """Divide each series where its level changes; return the pieces of each series as [begin, end).

    The cuts minimise the squared errors plus a price for each cut (optimal partitioning; Jackson et
    al., 2005). The price is the reduction of the errors that the best cut would cause by chance in
    a series whose level does not change. `series` and the mask of `known` values are [K, W];
    `noise` is σ of each series, [W].
    """
    count, world = series.shape
    scaled = np.where(known, series / noise, 0.0)
    centre = np.where(known, scaled, np.nan)
    some = known.any(axis=0)
    middle = np.zeros(world)
    middle[some] = np.nanmedian(centre[:, some], axis=0)
    scaled = np.where(known, scaled - middle, 0.0)
    zero = np.zeros((1, world))
    sums = np.concatenate([zero, scaled.cumsum(axis=0)])
    squares = np.concatenate([zero, (scaled**2).cumsum(axis=0)])
    counts = np.concatenate([zero, known.cumsum(axis=0)])
    # With few steps, the estimate of the noise is uncertain, so the price of a cut is higher.
    price = max(18.0, 2 * np.log(count * world) + 8.0) + THRESHOLDS.unsure / count
    best = np.empty((count + 1, world))
    best[0] = -price
    came = np.zeros((count + 1, world), np.int64)
    for end in range(1, count + 1):
        many = np.maximum(counts[end] - counts[:end], 1.0)
        total = best[:end] + (squares[end] - squares[:end])
        total -= (sums[end] - sums[:end]) ** 2 / many
        came[end] = total.argmin(axis=0)
        best[end] = total[came[end], np.arange(world)] + price
    pieces = []
    for rank in range(world):
        mine, end = [], count
        while end > 0:
            begin = int(came[end, rank])
            mine.append((begin, end))
            end = begin
        pieces.append(mine[::-1])
    return pieces


@dataclass
class LevelPiece:
    """Piece of a series, steps [begin, end), in which the level is constant."""

    begin: int
    end: int
    level: float

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return self.end - self.begin


@dataclass(frozen=True)
class SlowSpan:
    """Steps [begin, end) in which a series is above its level before and after them."""

    begin: int
    end: int


@dataclass(frozen=True)
class Course:
    """Course of one series: its lasting level, and the spans above it."""

    # Pieces of the lasting level. They cover all steps: the steps of a removed span belong to a
    # neighbouring piece.
    base: list[LevelPiece]
    spans: list[SlowSpan] = field(default_factory=list)

    def level(self, count: int) -> Floats:
        """Return the lasting level in each of `count` steps, [K]."""
        out = np.empty(count)
        for piece in self.base:
            out[piece.begin : piece.end] = piece.level
        return out


def course_of(
    series: Floats,
    known: Bools,
    pieces: Sequence[tuple[int, int]],
    noise: float,
    least: float = THRESHOLDS.least_log,
    least_short: float = THRESHOLDS.least_log_short,
) -> Course:
    """Separate temporary spans from the lasting level of a series, [K].

    A piece of fewer than `lasting_steps` steps is a span if its level is above the levels of both
    neighbouring pieces by more than `least`, or by more than `least_short` if the piece has fewer
    than `short_steps` steps. `pieces` come from `levels`, and `noise` is σ of the series.
    """
    return _Peeling(series, known, pieces, noise, least).course(least_short)


class _Peeling:
    """Removal of the short pieces of a series, one by one, until only lasting levels remain."""

    def __init__(
        self,
        series: Floats,
        known: Bools,
        pieces: Sequence[tuple[int, int]],
        noise: float,
        least: float,
    ) -> None:
        self._series, self._noise, self._least = series, noise, least
        # Mask of the steps from which levels are computed: known steps outside of removed pieces.
        self._counts = known.copy()
        self._base: list[LevelPiece] = []
        for begin, end in pieces:
            values = series[begin:end][known[begin:end]]
            if len(values):
                self._base.append(LevelPiece(begin, end, float(np.median(values))))
            elif self._base:
                self._base[-1].end = end
        if self._base:
            self._base[0].begin = 0

    def course(self, least_short: float) -> Course:
        if not self._base:
            return Course([LevelPiece(0, len(self._series), 0.0)])
        spans: list[SlowSpan] = []
        while len(self._base) > 1:
            at, above = _bump(self._base, self._least, least_short)
            if at is None:
                break
            piece = self._base[at]
            if above:
                spans.append(SlowSpan(piece.begin, piece.end))
            self._counts[piece.begin : piece.end] = False
            self._take_out(at)
        self._merge()
        return Course(self._base, _closed(sorted(spans, key=lambda span: span.begin)))

    def _take_out(self, at: int) -> None:
        """Remove a piece: merge its neighbours if their levels are equal, else extend one."""
        base = self._base
        piece = base.pop(at)
        if at == 0:
            base[0].begin = piece.begin
        elif at == len(base):
            base[-1].end = piece.end
        else:
            before, after = base[at - 1], base[at]
            if abs(before.level - after.level) <= self._same(before, after):
                base[at - 1 : at + 1] = [self._joined(before, after)]
            elif (
                abs(piece.level - after.level) < abs(piece.level - before.level)
                and piece.level <= after.level + self._least
            ):
                after.begin = piece.begin
            else:
                before.end = piece.end

    def _merge(self) -> None:
        base, at = self._base, 0
        while at + 1 < len(base):
            first, second = base[at], base[at + 1]
            if abs(first.level - second.level) <= self._same(first, second) / 2:
                base[at : at + 2] = [self._joined(first, second)]
                at = max(at - 1, 0)
            else:
                at += 1

    def _joined(self, first: LevelPiece, second: LevelPiece) -> LevelPiece:
        steps = np.arange(first.begin, second.end)
        steps = steps[self._counts[steps]]
        level = min(first.level, second.level)
        if len(steps):
            level = float(np.median(self._series[steps]))
        return LevelPiece(first.begin, second.end, level)

    def _same(self, first: LevelPiece, second: LevelPiece) -> float:
        chance = self._noise * float(np.sqrt(1 / first.steps + 1 / second.steps))
        return max(self._least, 4 * chance)


def _bump(base: list[LevelPiece], least: float, least_short: float) -> tuple[int | None, bool]:
    """Return the index of the next piece to remove, and whether it is above its neighbours.

    The index is None if no piece must be removed. Only pieces of fewer than `lasting_steps` steps
    are removed: first pieces above their neighbours, the highest one first, then pieces below them,
    and very short pieces near the level of a neighbour.
    """
    highest: tuple[float, int] | None = None
    lowest: tuple[float, int] | None = None
    for at, piece in enumerate(base):
        if piece.steps >= THRESHOLDS.lasting_steps:
            continue
        near = [base[k].level for k in (at - 1, at + 1) if 0 <= k < len(base)]
        needed = least_short if piece.steps < THRESHOLDS.short_steps else least
        up, down = piece.level - max(near), min(near) - piece.level
        if up > needed and (highest is None or up > highest[0]):
            highest = (up, at)
        is_dip = (down > 0 and len(near) == 2) or (
            -needed <= up <= needed and piece.steps < THRESHOLDS.short_steps
        )
        if is_dip and (lowest is None or down > lowest[0]):
            lowest = (down, at)
    if highest is not None:
        return highest[1], True
    return (None if lowest is None else lowest[1]), False


def _closed(spans: list[SlowSpan]) -> list[SlowSpan]:
    made: list[SlowSpan] = []
    for span in spans:
        if (
            made
            and span.begin - made[-1].end <= THRESHOLDS.gap_steps
            and span.begin - made[-1].end
            < max(span.end - span.begin, made[-1].end - made[-1].begin)
        ):
            made[-1] = SlowSpan(made[-1].begin, span.end)
        else:
            made.append(span)
    return made


def period_of(spans: Sequence[SlowSpan]) -> int | None:
    """Return the distance in steps at which spans recur; None if they are not periodic.

    Each occurrence may be up to `jitter_steps` steps early or late, and three in ten occurrences
    may be missing.
    """
    begins = np.array([span.begin for span in spans])
    lengths = [span.end - span.begin for span in spans]
    if len(begins) < 3 or max(lengths) > 1.5 * min(lengths) + 2 * THRESHOLDS.jitter_steps:
        return None
    apart = np.diff(begins)
    usual = int(np.median(apart))
    candidates = sorted({usual, int(apart.min())}, reverse=True)
    for period in candidates:
        if period < 3 * THRESHOLDS.jitter_steps - 2:
            continue
        times = np.round(apart / period)
        if (times < 1).any() or (np.abs(apart - times * period) > THRESHOLDS.jitter_steps).any():
            continue
        if len(begins) >= THRESHOLDS.expected_share * (times.sum() + 1):
            # The distance from the first to the last occurrence gives the most exact period.
            return round(float(begins[-1] - begins[0]) / float(times.sum()))
    return None


def folded(off: Floats, free: Bools) -> list[tuple[int, int] | None]:
    """Return, for each series, the period and phase of steps that are regularly high, or None.

    The function finds pauses that are too small to detect individually. `off` is the deviation of
    each step from its level in units of σ, and `free` is a mask of the steps that are used. Both
    are [K, W].
    """
    count, world = off.shape
    values = np.where(
        free, np.clip(off, -THRESHOLDS.clipped_sigmas, THRESHOLDS.clipped_sigmas), 0.0
    )
    best = np.full(world, THRESHOLDS.folded_sigmas)
    made: list[tuple[int, int] | None] = [None] * world
    for period in range(4, count // 3 + 1):
        rows = -(-count // period)
        padded = np.zeros((rows * period, world))
        padded[:count] = values
        many = np.zeros((rows * period, world))
        many[:count] = free
        folds = many.reshape(rows, period, world).sum(axis=0)
        score = padded.reshape(rows, period, world).sum(axis=0) / np.sqrt(np.maximum(folds, 1))
        score[folds < 3] = 0.0
        phase = score.argmax(axis=0)
        top = score[phase, np.arange(world)]
        for rank in np.flatnonzero(top > best):
            best[rank], made[rank] = top[rank], (period, int(phase[rank]))
    return made


def occurrences(
    off: Floats, known: Bools, spans: Sequence[SlowSpan], period: int, phase: int
) -> list[SlowSpan]:
    """Return the spans at which a slowdown with this period and phase occurred.

    `off` is the deviation of each step from its level in units of σ, and `known` is a mask of the
    steps with a value, both [K]. `spans` are the spans that were detected individually; a span that
    starts where an occurrence is expected is returned as this occurrence.
    """
    made: list[SlowSpan] = []
    at = phase
    while at < len(off):
        near = [span for span in spans if abs(span.begin - at) <= 1]
        around = np.arange(max(at - 1, 0), min(at + 2, len(off)))
        best = int(around[np.argmax(np.where(known[around], off[around], -np.inf))])
        if near:
            made.append(near[0])
            at = near[0].begin
        elif known[best] and off[best] > 1.5:
            made.append(SlowSpan(best, best + 1))
            at = best
        at += period
    return made


@dataclass(frozen=True)
class Trend:
    """Slowdown factor that grows linearly, and then stays constant."""

    begin: int
    end: int
    # Factors before and after the growth.
    first: float
    last: float

    def factors(self, count: int) -> Floats:
        """Return the factor in each of `count` steps, [K]."""
        share = np.clip((np.arange(count) - self.begin) / max(self.end - self.begin, 1), 0, 1)
        return np.asarray(self.first + (self.last - self.first) * share)


def trend_of(
    series: Floats, known: Bools, base: Sequence[LevelPiece], noise: float
) -> Trend | None:
    """Return a trend if it fits the series better than several ascending levels do, else None.

    `series` holds logarithms of slowdown factors, and `base` the levels. `known` is a mask of the
    steps that are used, without steps of temporary spans. `series` and `known` are [K], and `noise`
    is σ of the series.
    """
    stairs, most = 1, 1
    for before, after in pairwise(base):
        stairs = stairs + 1 if after.level > before.level else 1
        most = max(most, stairs)
    if most < THRESHOLDS.trend_levels:
        return None
    steps = np.flatnonzero(known)
    if len(steps) < THRESHOLDS.lasting_steps:
        return None
    count = len(series)
    values = series[steps]
    level = np.empty(count)
    for piece in base:
        level[piece.begin : piece.end] = piece.level
    by_steps = _huber(values - level[steps], noise) + 9.0 * (len(base) - 1)
    every = max(count // 24, 1)
    coarse = _best_line(values, steps, range(0, count, every), [*range(every, count, every), count])
    if coarse is None:
        return None
    some = max(every // 6, 1)
    begin, end = coarse.begin, coarse.end
    begins = range(max(begin - every, 0), min(begin + every, count), some)
    ends = range(max(end - every, 1), min(end + every, count) + 1, some)
    fine = _best_line(values, steps, begins, ends) or coarse

    def error(trend: Trend) -> float:
        return _huber(values - np.log(trend.factors(count)[steps]), noise) + 18.0

    to_the_end = _best_line(values, steps, [fine.begin], [count])
    # If a trend that grows to the last step fits about as well, it is the simpler explanation.
    if to_the_end is not None and error(to_the_end) <= error(fine) + 4.0:
        fine = to_the_end
    return fine if error(fine) <= by_steps and fine.last > 1.05 * fine.first else None


def _best_line(
    values: Floats, steps: Ints, begins: Sequence[int], ends: Sequence[int]
) -> Trend | None:
    """Fit a trend that starts at one of `begins` and ends at one of `ends`; None if none fits.

    `values` are logarithms of factors at `steps`, [n]. The fit minimises squared errors of factors,
    relative to each step's own factor, so that noise has the same weight everywhere.
    """
    pairs = np.array([(b, e) for b in begins for e in ends if e - b >= THRESHOLDS.trend_steps])
    if not len(pairs):
        return None
    begin, end = pairs[:, :1], pairs[:, 1:]
    share = np.clip((steps - begin) / (end - begin), 0, 1)  # [pairs, n]
    weight = np.exp(-values)
    first, second = weight * (1 - share), weight * share
    aa, ab, bb = (first**2).sum(1), (first * second).sum(1), (second**2).sum(1)
    x, y = first.sum(1), second.sum(1)
    det = aa * bb - ab**2
    fine = det > 1e-9
    det = np.where(fine, det, 1.0)
    low, high = (x * bb - y * ab) / det, (y * aa - x * ab) / det
    off = np.minimum((first * low[:, None] + second * high[:, None] - 1) ** 2, 0.25)
    fine &= (low > 0) & (high > 0)
    if not fine.any():
        return None
    at = int(np.where(fine, off.sum(1), np.inf).argmin())
    return Trend(int(pairs[at, 0]), int(pairs[at, 1]), float(low[at]), float(high[at]))


def _huber(off: Floats, noise: float) -> float:
    """Return the sum of squared errors in units of σ²; each error is limited to 3 σ."""
    return float(np.minimum((off / noise) ** 2, 9.0).sum())
