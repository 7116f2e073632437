"""Detection of time in which ranks do not compute.

The kinds of causes are `input` (data loading), `network` (reductions), `between` (time between
steps) and `planning` (waits for a plan).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.policies.base import Floats
from paceline_backend.insight.verdict.courses import (
    SlowSpan,
    course_of,
    levels,
    noise_of,
    period_of,
)
from paceline_backend.insight.verdict.findings import TimeChange, TimeLoss
from paceline_backend.insight.verdict.observed import Bools, ObservedSteps, Times
from paceline_backend.insight.verdict.slowness import lowest_level
from paceline_backend.insight.verdict.thresholds import THRESHOLDS


@dataclass(frozen=True)
class Excess:
    """Excess of a wait over its usual length.

    Args:
        more_s: time by which the wait is longer than usual, [K]; 0 where it is not longer.
        spans: steps in which the wait is longer, oldest first.
        lasting: index of the step from which on the wait is longer in all steps; None: at the end,
            the wait has its usual length, or is longer for fewer than `lasting_steps` steps.
        usual_s: usual length of the wait.
    """

    more_s: Floats
    spans: list[SlowSpan]
    lasting: int | None
    usual_s: float


def excess_of(series_s: Floats, unit_s: float) -> Excess:
    """Return the excess of a wait, [K], over its usual length.

    The usual length is the lowest level that lasts long enough; see `lowest_level`. `unit_s` is the
    time of a usual step, to which noise and thresholds are relative.
    """
    values = (series_s / unit_s)[:, None]
    known = np.ones_like(values, bool)
    noise = noise_of(values, known, THRESHOLDS.wait_noise)
    [pieces] = levels(values, known, noise)
    return _excess(values[:, 0], pieces, float(noise[0]), unit_s, None)


def _excess(
    values: Floats,
    pieces: Sequence[tuple[int, int]],
    noise: float,
    unit_s: float,
    usual_s: float | None,
) -> Excess:
    count = len(values)
    needed = max(THRESHOLDS.least_wait, 4 * noise)
    course = course_of(values, np.ones(count, bool), pieces, noise, THRESHOLDS.least_wait, needed)
    usual = lowest_level(course.base, count) if usual_s is None else usual_s / unit_s
    higher = [
        piece
        for piece in course.base
        if piece.level - usual > max(THRESHOLDS.least_wait, 2 * noise)
    ]
    lasting = None
    for piece in reversed(course.base):
        if piece not in higher:
            break
        lasting = piece.begin
    if lasting is not None and lasting > 0 and count - lasting < THRESHOLDS.lasting_steps:
        lasting = None
    spans = list(course.spans)
    spans += [
        SlowSpan(piece.begin, piece.end)
        for piece in higher
        if lasting is None or piece.end <= lasting
    ]
    spans.sort(key=lambda span: span.begin)
    longer = np.zeros(count, bool)
    for span in spans:
        longer[span.begin : span.end] = True
    if lasting is not None:
        longer[lasting:] = True
    more = np.where(longer, np.maximum(values - usual, 0.0), 0.0)
    return Excess(more * unit_s, spans, lasting, usual * unit_s)


def _times_of(excess: Excess, count: int) -> tuple[int | None, int | None, int | None, int]:
    """Return `since`, `until`, `period` and `times` of the `TimeLoss` about an excess."""
    spans = excess.spans
    if excess.lasting is not None:
        since = excess.lasting
        for span in reversed(spans):
            if since - span.end <= 3:
                since = min(span.begin, since)
        return since or None, None, None, 1
    if not spans:
        return None, None, None, 1
    period = period_of(spans)
    since, last = spans[0].begin, spans[-1].end
    usual_gap = float(np.median(np.diff([span.begin for span in spans]))) if len(spans) > 2 else 0.0
    goes_on = last == count or (len(spans) > 2 and count - last <= 2 * usual_gap)
    return since or None, None if goes_on else last - 1, period, len(spans)


def network_of(times: Times, unit_s: float) -> list[TimeLoss]:
    """Return findings about long reductions of gradients; `unit_s` is the time of a usual step."""
    return _of_series("network", times.reduce_s, times, unit_s)


def between_of(times: Times, unit_s: float) -> list[TimeLoss]:
    """Return findings about time between steps; `unit_s` is the time of a usual step."""
    return _of_series("between", times.between_s, times, unit_s)


def _of_series(kind: str, series_s: Floats, times: Times, unit_s: float) -> list[TimeLoss]:
    count = len(series_s)
    excess = excess_of(series_s, unit_s)
    made, nobody = [], np.arange(0)

    def effect(more_s: Floats) -> TimeChange:
        return TimeChange(nobody, **{"reduce_s" if kind == "network" else "between_s": more_s})

    if excess.more_s.any():
        since, until, period, often = _times_of(excess, count)
        made.append(
            TimeLoss(kind, (), effect(excess.more_s), since, until, period=period, times=often)
        )
    usual_s = np.minimum(series_s, excess.usual_s) if excess.more_s.any() else series_s
    if excess.usual_s >= THRESHOLDS.always_share * float(np.median(times.steps_s)):
        # All steps are affected, so one finding covers also the steps with longer waits.
        return [TimeLoss(kind, (), effect(usual_s + excess.more_s))]
    return made


def planning_of(
    seen: ObservedSteps, times: Times, took_part: Bools, unit_s: float
) -> list[TimeLoss]:
    """Return a finding if all ranks often wait for a plan in the first steps of segments."""
    first = seen.first
    if first.sum() < 2 or first.all():
        return []
    least = np.where(took_part, times.data_s, np.inf).min(axis=1)
    least = np.where(np.isfinite(least), least, 0.0)
    usual = float(np.median(least[~first]))
    others = np.abs(least[~first] - usual)
    needed = max(4 * float(np.median(others)), THRESHOLDS.least_wait * unit_s)
    waits = least - usual > needed
    theirs = waits & first
    if (
        theirs.sum() < THRESHOLDS.fewest_plans
        or theirs.sum() < THRESHOLDS.plans_share * waits.sum()
    ):
        return []
    since_then = first & (np.arange(len(first)) >= np.flatnonzero(theirs)[0])
    if theirs.sum() < THRESHOLDS.plans_share * since_then.sum():
        return []
    more = np.where(theirs, least - usual, 0.0)
    world = times.data_s.shape[1]
    own = np.clip(times.data_s - usual, 0.0, THRESHOLDS.longest_plan * more[:, None])
    data_s = np.where(took_part, own, 0.0)
    at = int(np.flatnonzero(theirs)[0])
    since = None if at == np.flatnonzero(first)[0] else at
    effect = TimeChange(np.arange(world), data_s=data_s)
    return [TimeLoss("planning", (), effect, since, times=int(theirs.sum()))]


def input_of(times: Times, took_part: Bools, unit_s: float) -> list[TimeLoss]:
    """Return findings about waits for data loaders; `times` must not include waits for plans."""
    values = times.data_s / unit_s
    noise = noise_of(values, took_part, THRESHOLDS.wait_noise)
    pieces = levels(values, took_part, noise)
    count, world = values.shape
    lowest = []
    for rank in range(world):
        course = course_of(
            values[:, rank],
            took_part[:, rank],
            pieces[rank],
            float(noise[rank]),
            THRESHOLDS.least_wait,
        )
        lowest.append(lowest_level(course.base, count))
    typical = float(np.sort(lowest)[(world - 1) // 2])
    each = [
        _excess(values[:, rank], pieces[rank], float(noise[rank]), unit_s, typical * unit_s)
        for rank in range(world)
    ]
    usual_s = times.data_s - np.stack([excess.more_s for excess in each], axis=1)
    calm_s = replace(times, data_s=usual_s).steps_s
    made: list[TimeLoss] = []
    if typical * unit_s >= THRESHOLDS.always_input_share * float(np.median(calm_s)):
        everyone = np.arange(world)
        made.append(TimeLoss("input", tuple(range(world)), TimeChange(everyone, data_s=usual_s)))
    return made + _inputs(each, count)


def _inputs(each: Sequence[Excess], count: int) -> list[TimeLoss]:
    """Return one finding for each group of ranks that wait in the same steps.

    If there are very many groups, the ranks wait in turn: the groups become a single finding that
    names no rank. Groups with far longer waits than the others keep a finding of their own.
    """
    waiting = [rank for rank, excess in enumerate(each) if excess.more_s.any()]
    groups: list[list[int]] = []
    for rank in sorted(waiting, key=lambda rank: -each[rank].more_s.sum()):
        for group in groups:
            if _together(each[group[0]], each[rank]):
                group.append(rank)
                break
        else:
            groups.append([rank])
    if len(groups) > max(3, THRESHOLDS.in_turn * len(each)):
        total = [each[group[0]].more_s.sum() for group in groups]
        own = [
            group
            for group, sum_s in zip(groups, total, strict=True)
            if sum_s > 5 * np.median(total)
        ]
        rest = [rank for group in groups if group not in own for rank in group]
        return [_input(each, group, count) for group in own] + [
            _input(each, rest, count, named=False)
        ]
    return [_input(each, group, count) for group in groups]


def _together(first: Excess, second: Excess) -> bool:
    mine, theirs = first.more_s > 0, second.more_s > 0
    both = int((mine & theirs).sum()) / max(int((mine | theirs).sum()), 1)
    if first.lasting is not None and second.lasting is not None:
        return abs(first.lasting - second.lasting) <= 5 or both >= THRESHOLDS.lasting_wait_share
    return both >= (
        THRESHOLDS.wait_share if first.lasting is second.lasting else THRESHOLDS.lasting_wait_share
    )


def is_everyone(ranks: Sequence[int], world: int) -> bool:
    """Return whether a group is large enough to count as all ranks."""
    return len(ranks) >= THRESHOLDS.everyone * world


def _input(
    each: Sequence[Excess], ranks: Sequence[int], count: int, named: bool = True
) -> TimeLoss:
    ranks = sorted(ranks)
    data_s = np.stack([each[rank].more_s for rank in ranks], axis=1)
    worst = max(ranks, key=lambda rank: float(each[rank].more_s.sum()))
    since, until, period, often = _times_of(each[worst], count)
    everyone = is_everyone(ranks, len(each))
    culprits = tuple(range(len(each))) if everyone else tuple(ranks)
    return TimeLoss(
        "input",
        culprits if named else (),
        TimeChange(np.array(ranks), data_s=data_s),
        since if named else None,
        until if named else None,
        period=period if named else None,
        times=often,
    )
