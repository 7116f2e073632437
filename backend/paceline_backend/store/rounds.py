"""Summarise the rounds of relaxed synchronisation by policy version and over time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import sqlalchemy as sa

from paceline.wire import RoundRecord
from paceline_backend.store import attempts, blobs
from paceline_backend.store.reads import Range, bucket_of, within
from paceline_backend.store.schema import rounds, runs, segments, steps

# Policy version, policy and synchronisation of a segment.
_Plan = tuple[int, str, str]


def newest_reduced_s(
    connection: sa.Connection, run: int, attempt: int, of_segments: Sequence[int], limit: int
) -> Sequence[float]:
    """Return the reduction times, in seconds, of the newest `limit` rounds in some segments."""
    c = rounds.c
    query = sa.select(c.reduced_s).where(
        c.run == run, c.attempt == attempt, c.segment.in_(of_segments)
    )
    newest = (c.step.desc(), c.number.desc(), c.rank)
    return connection.scalars(query.order_by(*newest).limit(limit)).all()


def rows(connection: sa.Connection, run: int, span: Range, limit: int) -> list[dict[str, Any]]:
    """Return the last `limit` rounds in a range of steps as `RoundRecord` fields, oldest first."""
    c = rounds.c
    query = (
        sa.select(*(c[name] for name in RoundRecord.__struct_fields__))
        .where(*_counting(connection, run, span))
        .order_by(c.step.desc(), c.segment.desc(), c.number.desc(), c.rank.desc())
        .limit(limit)
    )
    return [
        {**row, "staleness": _counts(row["staleness"])}
        for row in reversed(connection.execute(query).mappings().all())
    ]


def summary(connection: sa.Connection, run: int, span: Range, points: int) -> dict[str, Any]:
    """Summarise the rounds by policy version, and by the step in which each round ended.

    `points` is the maximum number of steps or buckets.
    """
    step = sa.select(rounds.c.step).limit(1)
    of_run = step.where(*_counting(connection, run, (None, None)))
    of_span = step.where(*_counting(connection, run, span))
    first = connection.execute(of_span.order_by(rounds.c.step)).scalar()
    last = connection.execute(of_span.order_by(rounds.c.step.desc())).scalar()
    return {
        "from": first,
        "to": last,
        "newest": connection.execute(of_run.order_by(rounds.c.step.desc())).scalar(),
        "in_force": in_force(connection, run, span),
        "over_time": _over_time(connection, run, span, bucket_of(first, last, points)),
    }


@dataclass
class _Sums:
    """Sums over the rounds of one policy version.

    A stretch is a sequence of consecutive segments with the same attempt, policy version and
    synchronisation.
    """

    # Steps of the first and of the last round; empty: no round.
    steps: list[int] = field(default_factory=list)
    rounds: int = 0
    world: int = 0
    contributors: int = 0
    # Number of rounds by their encoded `staleness`.
    shapes: Counter[bytes] = field(default_factory=Counter)
    dropped: int = 0
    samples: int = 0
    waited_s: list[float] = field(default_factory=list)
    reduced_s: float = 0.0
    copied_s: float = 0.0
    bytes: int = 0
    # Unix times of the start and of the end of each stretch, by the number of the stretch.
    began: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)

    @property
    def lasted_s(self) -> float:
        """Return the total duration of the stretches in seconds, without the time between them."""
        return sum(ended - self.began[stretch] for stretch, ended in self.ended.items())

    @property
    def staleness(self) -> list[int]:
        """Return the number of gradients of each age, [age]."""
        total: list[int] = []
        for shape, times in self.shapes.items():
            pairs = zip_longest(total, _counts(shape), fillvalue=0)
            total = [before + times * more for before, more in pairs]
        return total


def in_force(connection: sa.Connection, run: int, span: Range) -> list[dict[str, Any]]:
    """Summarise the rounds of each policy version in a range of steps, ordered by first step.

    Rounds whose segment is not stored yet are left out.
    """
    where = _counting(connection, run, span)
    by_segment = connection.execute(_sums(where)).all()
    if not by_segment:
        return []
    with_rounds = {tuple(row[:2]) for row in by_segment}
    # Rounds are joined with segments in Python, because Postgres chooses a slow query plan for this
    # join while the tables are new and have no statistics.
    by_plan: dict[_Plan, _Sums] = defaultdict(_Sums)
    of_segment: dict[tuple[int, int], _Sums] = {}
    # (attempt, segment) → number of the segment's stretch. The number increases with each change of
    # attempt or plan.
    stretch_of: dict[tuple[int, int], int] = {}
    stretch, before = 0, None
    touching = _segments(connection, run, span)
    for attempt, seq, fallback, samples, *plan in connection.execute(touching):
        # Leave out a segment without rounds, because all its gradients were all-reduced.
        if fallback and (attempt, seq) not in with_rounds:
            before = None
            continue
        of_segment[attempt, seq] = sums = by_plan[tuple(plan)]
        sums.samples += samples or 0
        stretch += before != (attempt, plan)
        stretch_of[attempt, seq] = stretch
        before = attempt, plan
    for row in by_segment:
        if row[:2] in of_segment:
            _add(of_segment[row[:2]], stretch_of[row[:2]], row)
    c = rounds.c
    each = sa.select(c.attempt, c.segment, c.staleness, c.waited_s).where(*where)
    for *segment, staleness, waited_s in connection.execute(each):
        if tuple(segment) in of_segment:
            of_segment[tuple(segment)].shapes[staleness] += 1
            of_segment[tuple(segment)].waited_s.append(waited_s)
    answers = [(sums.steps, plan, sums) for plan, sums in by_plan.items() if sums.rounds]
    return [_answer(plan, sums) for _, plan, sums in sorted(answers, key=lambda item: item[0])]


def dropped(connection: sa.Connection, run: int) -> dict[tuple[int, int], int]:
    """Return, by (attempt, segment), the number of samples whose gradients were too stale."""
    c = rounds.c
    query = (
        sa.select(c.attempt, c.segment, sa.func.sum(c.dropped))
        .where(*_counting(connection, run, (None, None)))
        .group_by(c.attempt, c.segment)
    )
    return {(row[0], row[1]): int(row[2]) for row in connection.execute(query)}


def _counting(connection: sa.Connection, run: int, span: Range) -> list[sa.ColumnElement[bool]]:
    """Return the SQL conditions for rounds in a range of steps that no restart discarded."""
    c = rounds.c
    parts = [part.rows(c.step, c.attempt) for part in _parts(connection, run)]
    return [c.run == run, *within(c.step, span), sa.or_(*(sa.and_(*part) for part in parts))]


def _parts(connection: sa.Connection, run: int) -> Sequence[attempts.AttemptSpan]:
    attempt = connection.execute(sa.select(runs.c.attempt).where(runs.c.key == run)).scalar()
    return attempts.spans(connection, run, attempt)


def _counts(staleness: bytes) -> list[int]:
    return blobs.unpack(staleness, list[int])


def _segments(connection: sa.Connection, run: int, span: Range) -> sa.Select[Any]:
    """Select attempt, seq, fallback, samples and plan of segments that overlap a range of steps.

    `samples` is the number of samples of those complete steps of the segment that are in the range
    and that no restart discarded; NULL if there are none.
    """
    step, begin, end = steps.c.step, segments.c.first_step, segments.c.first_step + segments.c.steps
    parts = [part.rows(step, segments.c.attempt) for part in _parts(connection, run)]
    samples = (
        sa.select(sa.func.sum(steps.c.samples))
        .where(steps.c.run == run, step >= begin, step < end, *within(step, span))
        .where(sa.or_(*(sa.and_(*part) for part in parts)))
        .scalar_subquery()
    )
    c = segments.c
    first, last = span
    query = sa.select(c.attempt, c.seq, c.fallback, samples, c.version, c.policy, c.synchroniser)
    query = query.where(c.run == run).order_by(c.attempt, c.seq)
    if first is not None:
        query = query.where(end > first)
    return query if last is None else query.where(begin <= last)


def _sums(where: list[sa.ColumnElement[bool]]) -> sa.Select[Any]:
    c, func = rounds.c, sa.func
    columns = {
        "first": func.min(c.step),
        "last": func.max(c.step),
        "rounds": func.count(),
        "world": func.max(c.world),
        "contributors": func.sum(c.contributors),
        "dropped": func.sum(c.dropped),
        "reduced_s": func.sum(c.reduced_s),
        "copied_s": func.sum(c.copied_s),
        # Sum doubles, because a sum of integers may overflow.
        "bytes": func.sum(sa.cast(c.bytes, sa.Double)),
        "began": func.min(c.ended_at - c.waited_s - c.reduced_s),
        "ended": func.max(c.ended_at),
    }
    named = (column.label(name) for name, column in columns.items())
    query = sa.select(c.attempt, c.segment, *named).where(*where)
    return query.group_by(c.attempt, c.segment)


def _add(sums: _Sums, stretch: int, row: sa.Row[Any]) -> None:
    sums.steps = [min([row.first, *sums.steps]), max([row.last, *sums.steps])]
    sums.world = max(sums.world, row.world)
    for name in ("rounds", "contributors", "dropped", "bytes"):
        setattr(sums, name, getattr(sums, name) + int(getattr(row, name)))
    sums.reduced_s += row.reduced_s
    sums.copied_s += row.copied_s
    sums.began[stretch] = min(row.began, sums.began.get(stretch, row.began))
    sums.ended[stretch] = max(row.ended, sums.ended.get(stretch, row.ended))


def _answer(plan: _Plan, sums: _Sums) -> dict[str, Any]:
    median, p95 = np.quantile(sums.waited_s, (0.5, 0.95))
    staleness, lasted_s = sums.staleness, sums.lasted_s
    return {
        "version": plan[0],
        "policy": plan[1],
        "synchroniser": plan[2],
        "from": sums.steps[0],
        "to": sums.steps[1],
        "rounds": sums.rounds,
        "world": sums.world,
        "contributors": sums.contributors / sums.rounds,
        "staleness": staleness,
        "samples": sums.samples,
        "dropped": sums.dropped,
        "dropped_share": sums.dropped / sums.samples if sums.samples else None,
        "waited_s": float(median),
        "waited_s_p95": float(p95),
        "reduced_s": sums.reduced_s / sums.rounds,
        "copied_s": sums.copied_s / sums.rounds,
        "bytes": sums.bytes,
        "rounds_per_s": sums.rounds / lasted_s if lasted_s > 0 else None,
        "gradients_per_s": sum(staleness) / lasted_s if lasted_s > 0 else None,
    }


def _over_time(connection: sa.Connection, run: int, span: Range, bucket: int) -> dict[str, Any]:
    c, func = rounds.c, sa.func
    columns: dict[str, sa.ColumnElement[Any]] = {
        "step": func.min(c.step),
        "rounds": func.count(),
        "contributors": func.avg(sa.cast(c.contributors, sa.Double)),
        "contributors_min": func.min(c.contributors),
        "contributors_max": func.max(c.contributors),
        "dropped": func.sum(c.dropped),
        "waited_s": func.avg(c.waited_s),
        "waited_s_max": func.max(c.waited_s),
        "reduced_s": func.avg(c.reduced_s),
        "copied_s": func.avg(c.copied_s),
        "bytes": func.sum(sa.cast(c.bytes, sa.Double)),
    }
    query = sa.select(*columns.values()).where(*_counting(connection, run, span))
    query = query.group_by(c.step // bucket).order_by(columns["step"])
    values: dict[str, list[Any]] = {name: [] for name in columns}
    for row in connection.execute(query):
        for name, value in zip(columns, row, strict=True):
            values[name].append(value)
    return {"bucket": bucket, **values}
