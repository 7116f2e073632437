"""Detection of lost computing time: slow ranks, and uneven batches.

`model_of` fits the cost of batches and the course of each rank's speed over the steps.
`findings_of` returns a finding for each group of ranks that are slow together: lastingly,
temporarily or periodically. `data_of` returns the time that is lost because the batches of a step
differ in cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from paceline.policies.base import Floats
from paceline_backend.insight.attribution.model import fit
from paceline_backend.insight.verdict.courses import (
    Course,
    LevelPiece,
    SlowSpan,
    course_of,
    folded,
    levels,
    noise_of,
    occurrences,
    period_of,
    trend_of,
)
from paceline_backend.insight.verdict.findings import TimeChange, TimeLoss
from paceline_backend.insight.verdict.observed import Bools, ObservedSteps, mean_of
from paceline_backend.insight.verdict.thresholds import THRESHOLDS


@dataclass(frozen=True)
class SlownessModel:
    """Costs of batches, and the course of each rank's speed.

    Args:
        took_part: mask of the ranks that had a batch and reported its time, [K, W].
        typical: time of a rank's batch on the typical rank, in seconds, [K, W].
        off: logarithm of a rank's computing time ÷ `typical`, [K, W]; 0 where a rank has no batch.
        noise: σ of `off`, [W].
        courses: course of each rank's `off`.
        usual: level of each rank's `off` when the rank is not slow, [W].
        policies: the steps of each policy.
        planned: True if a plan divides the batches, False if the script does.
    """

    took_part: Bools
    typical: Floats
    off: Floats
    noise: Floats
    courses: list[Course]
    usual: Floats
    policies: Sequence[slice]
    planned: bool

    @cached_property
    def part(self) -> Floats:
        """Return the cost of each batch ÷ the cost of the mean batch of its step, [K, W]."""
        return np.asarray(self.typical / mean_of(self.typical, self.took_part, axis=1)[:, None])

    @cached_property
    def usual_part(self) -> Floats:
        """Return the usual cost of each rank's batches ÷ the cost of the mean batch, [K, W].

        The usual cost is the mean of `part` over consecutive steps in which its level is constant.
        It changes when a plan reacts to slowness, but not when sizes vary from step to step.
        """
        out = np.ones_like(self.part)
        for policy in self.policies:
            known, part = self.took_part[policy], self.part[policy]
            off = np.where(known, np.log(np.where(known, part, 1.0)), 0.0)
            noise = noise_of(off, known, THRESHOLDS.compute_noise)
            for rank, pieces in enumerate(levels(off, known, noise)):
                for begin, end in pieces:
                    theirs = part[begin:end, rank][known[begin:end, rank]]
                    if len(theirs):
                        out[policy][begin:end, rank] = theirs.mean()
        return out


def model_of(seen: ObservedSteps, took_part: Bools) -> SlownessModel:
    """Fit the cost of batches, and the course of each rank's time relative to that cost."""
    model = _with_costs_of(seen, seen, took_part)
    levels_of = np.stack([course.level(len(seen.step)) for course in model.courses], axis=1)
    levels_of += _of_spans(model)
    cleaned = replace(seen, compute_s=seen.compute_s / np.exp(levels_of))
    return _with_costs_of(cleaned, seen, took_part)


def _with_costs_of(cleaned: ObservedSteps, seen: ObservedSteps, took_part: Bools) -> SlownessModel:
    typical = fit(cleaned, took_part).typical  # type: ignore[arg-type]
    time = np.where(took_part, seen.compute_s, 1.0)
    off = np.where(took_part, np.log(time / typical), 0.0)
    noise = noise_of(off, took_part, THRESHOLDS.compute_noise)
    pieces = levels(off, took_part, noise)
    courses = [
        course_of(off[:, rank], took_part[:, rank], pieces[rank], float(noise[rank]))
        for rank in range(off.shape[1])
    ]
    usual = _usual(courses, len(off))
    return SlownessModel(
        took_part, typical, off, noise, courses, usual, seen.policies, seen.planned
    )


def _usual(courses: Sequence[Course], count: int) -> Floats:
    """Return each rank's level when it is not slow, [W].

    This is the rank's lowest level, but at most the level of the typical rank, which is the lower
    median over the ranks.
    """
    lowest = [lowest_level(course.base, count) for course in courses]
    typical = float(np.sort(lowest)[(len(lowest) - 1) // 2])
    return np.asarray(np.minimum(np.array(lowest), typical))


def lowest_level(base: Sequence[LevelPiece], count: int) -> float:
    """Return the lowest level of the pieces that are long enough, or of all pieces if none is.

    A piece is long enough if it covers `usual_share` of the `count` steps. For the first piece,
    `lasting_steps` steps are enough.
    """
    held = [piece for piece in base if piece.steps >= THRESHOLDS.usual_share * count]
    if base[0].steps >= THRESHOLDS.lasting_steps:
        held.append(base[0])
    return min(piece.level for piece in (held or base))


def _of_spans(model: SlownessModel) -> Floats:
    count = len(model.off)
    out = np.zeros_like(model.off)
    for rank, course in enumerate(model.courses):
        for span in course.spans:
            inside = slice(span.begin, span.end)
            out[inside, rank] = (model.off[:, rank] - course.level(count))[inside]
    return out


@dataclass(frozen=True)
class _Slow:
    rank: int
    kind: str
    since: int | None
    until: int | None
    # Steps in which the rank is slow.
    steps: Bools  # [K]
    # Factor by which the rank is slower in `steps`; 1 in other steps.
    slower: Floats  # [K]
    factor: float
    # Steps of spans with fewer than `pause_steps` steps, which count as pauses.
    short: Bools  # [K]
    period: int | None = None
    trend: tuple[float, float] | None = None
    times: int = 1


def findings_of(model: SlownessModel) -> list[TimeLoss]:
    """Return one finding for each group of ranks that are slow together."""
    slow: list[_Slow] = []
    for rank in range(model.off.shape[1]):
        slow += _of_rank(model, rank)
    weak = _weak_periods(model, slow)
    periodic = {each.rank for each in weak}
    # Most of the temporary slowness of these ranks consists of the pauses in `weak`, so it gets no
    # finding of its own.
    slow = [each for each in slow if each.kind != "transient" or each.rank not in periodic] + weak
    lasting = np.zeros(model.off.shape[1], bool)
    lasting[[each.rank for each in slow if each.kind == "node"]] = True
    return [_finding(model, group, lasting) for group in _groups(slow)]


def _of_rank(model: SlownessModel, rank: int) -> list[_Slow]:
    course, count = model.courses[rank], len(model.off)
    known, usual = model.took_part[:, rank], float(model.usual[rank])
    made: list[_Slow] = []
    spans = list(course.spans)
    begin = _lasting_from(course.base, usual)
    unsure = begin if begin is not None and not _is_sure(model, rank, begin) else None
    begin = None if unsure is not None else begin
    passed = [piece for piece in course.base if piece.level - usual > THRESHOLDS.least_log]
    if unsure is not None:
        passed = [piece for piece in passed if piece.end <= unsure]
    if begin is not None and (count - begin >= THRESHOLDS.lasting_steps or begin == 0):
        made += _lasting(model, rank, begin)
        passed = [piece for piece in passed if piece.end <= begin]
    spans += _runs(passed)
    spans = sorted(spans, key=lambda span: span.begin)
    if spans:
        level = course.level(count)
        base = np.where(level - usual > THRESHOLDS.least_log, usual, level)
        if made:
            base[made[0].steps] = level[made[0].steps]
            if made[0].trend is not None:
                base = usual + np.log(made[0].slower)
                spans = _above(model.off[:, rank] - base, known, spans)
        made += _passing(model.off[:, rank], base, known, spans, rank)
    return made


def _above(rest: Floats, known: Bools, spans: Sequence[SlowSpan]) -> list[SlowSpan]:
    kept = []
    for span in spans:
        inside = rest[span.begin : span.end][known[span.begin : span.end]]
        if len(inside) and float(np.median(inside)) > THRESHOLDS.least_log:
            kept.append(span)
    return kept


def _lasting_from(base: Sequence[LevelPiece], usual: float) -> int | None:
    """Return the first step of slowness that lasts to the end; None if there is none."""
    begin = None
    for piece in reversed(base):
        if piece.level - usual <= THRESHOLDS.least_log:
            break
        begin = piece.begin
    return begin


def _is_sure(model: SlownessModel, rank: int, begin: int) -> bool:
    steps = model.took_part[begin:, rank]
    above = (model.off[begin:, rank] - model.usual[rank])[steps]
    return bool(len(above)) and float(np.median(above)) > THRESHOLDS.sure_errors * float(
        model.noise[rank]
    ) / np.sqrt(len(above))


def _runs(pieces: Sequence[LevelPiece]) -> list[SlowSpan]:
    spans: list[SlowSpan] = []
    for piece in pieces:
        if spans and spans[-1].end == piece.begin:
            spans[-1] = SlowSpan(spans[-1].begin, piece.end)
        else:
            spans.append(SlowSpan(piece.begin, piece.end))
    return spans


def _lasting(model: SlownessModel, rank: int, begin: int) -> list[_Slow]:
    course, count = model.courses[rank], len(model.off)
    usual, off = float(model.usual[rank]), model.off[:, rank] - float(model.usual[rank])
    free = model.took_part[:, rank].copy()
    for span in course.spans:
        # A span that reaches the last step is not excluded from the fit, because it may be the last
        # level of growing slowness.
        if span.end < count:
            free[span.begin : span.end] = False
    trend = trend_of(off, free, _shifted(course.base, usual), float(model.noise[rank]))
    steps = np.arange(count) >= begin
    if trend is not None:
        if trend.first < np.exp(THRESHOLDS.least_log):
            trend = replace(trend, first=1.0)
        factors = trend.factors(count)
        since = trend.begin if trend.begin > count // 50 else None
        slower = np.maximum(factors, 1.0)
        return [
            _Slow(
                rank,
                "node",
                since,
                None,
                slower > 1,
                slower,
                float(factors[-1]),
                np.zeros(count, bool),
                trend=(float(factors[trend.begin]), float(factors[-1])),
            )
        ]
    slower = np.where(steps, np.exp(course.level(count) - usual), 1.0)
    factor = float(np.median(slower[steps]))
    short = np.zeros(count, bool)
    return [_Slow(rank, "node", begin or None, None, steps, slower, factor, short)]


def _shifted(base: Sequence[LevelPiece], usual: float) -> list[LevelPiece]:
    return [replace(piece, level=piece.level - usual) for piece in base]


def _passing(
    off: Floats,
    base: Floats,
    known: Bools,
    spans: Sequence[SlowSpan],
    rank: int,
    period: int | None = None,
) -> list[_Slow]:
    count = len(off)
    rest = off - base
    steps = np.zeros(count, bool)
    for span in spans:
        steps[span.begin : span.end] = True
    steps &= known
    if not steps.any():
        return []
    slower, short = np.ones(count), np.zeros(count, bool)
    usual = np.flatnonzero(~steps & known)
    for span in spans:
        inside = np.arange(span.begin, span.end)
        inside = inside[known[inside]]
        if not len(inside):
            continue
        if len(inside) >= THRESHOLDS.pause_steps:
            slower[inside] = np.exp(np.median(rest[inside]))
            continue
        short[inside] = True
        # Remove the noise of these steps. The estimate is the noise of the nearest usual steps.
        at = np.searchsorted(usual, inside).clip(0, max(len(usual) - 1, 0))
        noise = rest[usual[at]] if len(usual) else 0.0
        slower[inside] = np.exp(rest[inside] - noise)
    slower = np.maximum(slower, 1.0)
    period = period_of(spans) if period is None else period
    since, last = spans[0].begin, spans[-1].end
    goes_on = last == count
    if period is not None:
        goes_on = last + period > count - 1
    return [
        _Slow(
            rank,
            "periodic" if period is not None else "transient",
            since or None,
            None if goes_on else last - 1,
            steps,
            slower,
            float(np.median(slower[steps])),
            short,
            period=period,
            times=len(spans),
        )
    ]


def _weak_periods(model: SlownessModel, slow: Sequence[_Slow]) -> list[_Slow]:
    """Return pauses at a strict period that are too small to detect individually."""
    count = len(model.off)
    base = np.stack([course.level(count) for course in model.courses], axis=1)
    free = model.took_part.copy()
    periodic = set()
    for each in slow:
        if each.trend is not None:
            base[:, each.rank] = model.usual[each.rank] + np.log(each.slower)
        if each.kind == "periodic":
            periodic.add(each.rank)
    for rank, course in enumerate(model.courses):
        for span in course.spans:
            if span.end - span.begin > 3:
                free[span.begin : span.end, rank] = False
    off = (model.off - base) / model.noise
    made = []
    for rank, what in enumerate(folded(off, free)):
        if what is None or rank in periodic:
            continue
        known, spans = model.took_part[:, rank], model.courses[rank].spans
        spans = occurrences(off[:, rank], known, spans, *what)
        if len(spans) < 3 or not _is_strict(spans, model.courses[rank].spans, what[0]):
            continue
        made += _passing(model.off[:, rank], base[:, rank], known, spans, rank, what[0])
    return made


def _is_strict(times: Sequence[SlowSpan], seen: Sequence[SlowSpan], period: int) -> bool:
    expected = (times[-1].begin - times[0].begin) / period + 1
    if len(times) < THRESHOLDS.period_share * expected:
        return False
    theirs = sum(any(abs(span.begin - time.begin) <= 1 for time in times) for span in seen)
    return theirs >= THRESHOLDS.period_share * len(seen)


def _groups(slow: Sequence[_Slow]) -> list[list[_Slow]]:
    groups: list[list[_Slow]] = []
    order = sorted(slow, key=lambda each: (each.kind, each.since or 0, -float(each.slower.sum())))
    for each in order:
        for group in groups:
            if _alike(group[0], each):
                group.append(each)
                break
        else:
            groups.append([each])
    return groups


def _alike(first: _Slow, second: _Slow) -> bool:
    if first.kind != second.kind:
        return False
    if first.kind == "node":
        if (first.trend is None) != (second.trend is None):
            return False
        apart = THRESHOLDS.together_steps if first.trend is None else 8 * THRESHOLDS.together_steps
        return abs((first.since or 0) - (second.since or 0)) <= apart
    both = int((first.steps & second.steps).sum())
    return both >= THRESHOLDS.together_share * int((first.steps | second.steps).sum())


def _finding(model: SlownessModel, group: Sequence[_Slow], lasting: Bools) -> TimeLoss:
    ranks = sorted(each.rank for each in group)
    by_rank = sorted(group, key=lambda each: each.rank)
    slower = np.stack([each.slower for each in by_rank], axis=1)
    pause_s = None
    if group[0].kind != "node":
        short = np.stack([each.short for each in by_rank], axis=1)
        time_s = (model.typical * np.exp(model.off))[:, ranks]
        pause_s = np.where(short, time_s * (1 - 1 / slower), 0.0)
        slower = np.where(short, 1.0, slower)
    first = max(group, key=lambda each: float(each.slower.sum()))
    sinces = [each.since or 0 for each in group]
    since = int(np.median(sinces)) or None
    plans = model.planned and bool((slower > 1).any())
    dealt = _dealt(model, ranks, slower, lasting) if plans else None
    hidden_since = None
    if first.kind == "node" and dealt is not None:
        hidden_since = _hidden_since(dealt, slower)
    effect = TimeChange(np.array(ranks), slower=slower, dealt=dealt, pause_s=pause_s)
    return TimeLoss(
        kind=first.kind,
        ranks=tuple(ranks),
        effect=effect,
        since=since,
        until=None
        if any(each.until is None for each in group)
        else max(each.until for each in group if each.until is not None),
        factor=float(np.median([each.factor for each in group])),
        factors=(min(each.factor for each in group), max(each.factor for each in group)),
        period=first.period,
        trend=first.trend,
        times=first.times,
        hidden_since=hidden_since,
    )


def _dealt(model: SlownessModel, ranks: Sequence[int], slower: Floats, lasting: Bools) -> Floats:
    """Return slow ranks' usual batch costs ÷ the other ranks' median, [K, R]; at most 1.

    Values are 1 in steps in which a rank is not slow, or in which the batches are not clearly
    smaller. `slower` holds the slowdown factors of `ranks`, [K, R], and `lasting` is a mask of all
    lastingly slow ranks, [W].
    """
    mine = np.isin(np.arange(len(lasting)), ranks)
    others = ~(mine | lasting) if not (mine | lasting).all() else ~mine
    usual = model.usual_part
    if not others.any():
        return np.ones_like(slower)
    less = usual[:, list(ranks)] / np.median(usual[:, others], axis=1, keepdims=True)
    dealt = np.where(slower > 1, np.minimum(less, 1.0), 1.0)
    return np.asarray(
        np.where(np.median(less, axis=1, keepdims=True) <= THRESHOLDS.smaller_part, dealt, 1.0)
    )


def _hidden_since(dealt: Floats, slower: Floats) -> int | None:
    """Return the first step since which smaller batches compensate for a slowness, else None.

    The result is None unless the slowness is compensated in all of the last `policy_steps` steps.
    `dealt` comes from `_dealt`.
    """
    slow = (slower > 1).any(axis=1)
    much = np.median(slower, axis=1) - 1
    hidden = (1 / np.median(dealt, axis=1) - 1 >= THRESHOLDS.offset_share * much) | ~slow
    if not slow.any() or not hidden[-THRESHOLDS.policy_steps :].all():
        return None
    waited = np.flatnonzero(~hidden)
    since = int(waited[-1]) + 1 if len(waited) else 0
    return max(since, int(np.flatnonzero(slow)[0]))


def data_of(model: SlownessModel, others: Sequence[TimeLoss], apart: Bools) -> list[TimeLoss]:
    """Return the time lost to uneven batches as one finding.

    `others` are the findings about slow ranks. If the plan compensates for a slow rank in a step,
    only the deviation of each batch from the rank's usual cost counts as uneven in this step.
    `apart` is a mask of the steps in which ranks do not wait for each other, [K].
    """
    known, part = model.took_part, model.part
    dealt = [finding.effect.dealt for finding in others if finding.effect.dealt is not None]
    compensated = np.hstack([np.ones((len(part), 1)), *dealt]).min(axis=1) < 1
    ranks: tuple[int, ...] = ()
    if compensated.any():
        even = part / model.usual_part
        part = np.where(compensated[:, None], even / mean_of(even, known, axis=1)[:, None], part)
    else:
        ranks = _larger(part, known)
    # Where ranks do not wait for each other, a large batch on one rank delays no other rank.
    uneven = np.where(known & ~apart[:, None], part, 1.0)
    since, until = _course(model.policies, 1 - 1 / uneven.max(axis=1))
    effect = TimeChange(np.arange(part.shape[1]), dealt=uneven)
    return [TimeLoss("data", ranks, effect, since=since, until=until)]


def _course(policies: Sequence[slice], lost: Floats) -> tuple[int | None, int | None]:
    """Return `since` and `until` (see `TimeLoss`) of the policies under which batches are uneven.

    `lost` is the fraction of each step's computing time for which ranks wait on average, [K].
    """
    by_policy = [max(float(lost[policy].mean()), 0.0) for policy in policies]
    least = min(THRESHOLDS.uneven_share, THRESHOLDS.uneven_of_worst * max(by_policy))
    uneven = [policy for policy, mean in zip(policies, by_policy, strict=True) if mean >= least]
    end = uneven[-1].stop
    return uneven[0].start or None, None if end == len(lost) else end - 1


def _larger(part: Floats, known: Bools) -> tuple[int, ...]:
    many = np.maximum(known.sum(axis=0), 1)
    mean = mean_of(part, known, axis=0)
    spread = np.sqrt(mean_of((part - mean) ** 2, known, axis=0))
    usual = float(np.sort(mean)[(len(mean) - 1) // 2])
    larger = (mean > usual * (1 + THRESHOLDS.larger)) & (
        mean - usual > THRESHOLDS.larger_errors * spread / np.sqrt(many)
    )
    return tuple(np.flatnonzero(larger).tolist())
