"""Rounds of relaxed synchronisers: written as they come, summed up by the policy in force."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from paceline.wire import RoundBatch, RoundRecord
from paceline_backend.store import attempts
from paceline_backend.store._store import StoreRefusedError, insert
from paceline_backend.store.reads import Range, bucket_of, within
from paceline_backend.store.schema import rounds, runs, segments, steps

_BOUNDS: dict[type, int] = {sa.SmallInteger: 2**15, sa.Integer: 2**31, sa.BigInteger: 2**63}
_WHOLE = [
    (name, _BOUNDS[type(rounds.c[name].type)])
    for name in RoundRecord.__struct_fields__
    if type(rounds.c[name].type) in _BOUNDS
]
_HUGE = 1e100  # Postgres raises where sums of finite numbers leave the range of a double

_planned = rounds.join(
    segments,
    (segments.c.run == rounds.c.run)
    & (segments.c.attempt == rounds.c.attempt)
    & (segments.c.seq == rounds.c.segment),
)
_KEY = (segments.c.version, segments.c.policy, segments.c.synchroniser)
_Key = tuple[int, str, str]


def write(connection: sa.Connection, batches: Iterable[tuple[int, RoundBatch]]) -> None:
    """Writes what is not there yet.

    Args:
        connection: to write to.
        batches: with the key of their run.

    Raises:
        StoreRefusedError: some record holds values that no database takes.
    """
    found = [_row(run, record) for run, batch in batches for record in batch.records]
    if found:
        connection.execute(insert(connection, rounds).on_conflict_do_nothing(), found)


def _row(run: int, record: RoundRecord) -> dict[str, Any]:
    for name, bound in _WHOLE:
        if not -bound <= getattr(record, name) < bound:
            raise StoreRefusedError(f"{name} is out of range in {record}")
    if not abs(record.waited_s) + abs(record.reduced_s) + abs(record.ended_at) < _HUGE:
        raise StoreRefusedError(f"a time is not a finite number in {record}")
    if not all(0 <= count < 2**31 for count in record.staleness):
        raise StoreRefusedError(f"staleness holds what is no count in {record}")
    staleness = msgspec.msgpack.encode(record.staleness)
    return msgspec.structs.asdict(record) | {"run": run, "staleness": staleness}


def rows(connection: sa.Connection, run: int, span: Range, limit: int) -> list[dict[str, Any]]:
    """The last `limit` rounds of a range of steps, in order, as `wire.RoundRecord` has them."""
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
    """What rounds there were: by the policy in force, and over the steps in which they ended.

    Args:
        connection: to read from.
        run: key of the run.
        span: first and last step.
        points: at most so many steps or buckets of them.
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
    """Of the rounds under one policy."""

    first: int  # step
    last: int
    rounds: int = 0
    world: int = 0
    contributors: int = 0
    staleness: list[int] = field(default_factory=list)
    dropped: int = 0
    samples: int = 0
    waited_s: list[float] = field(default_factory=list)
    reduced_s: float = 0.0
    bytes: int = 0
    lasted_s: float = 0.0


def in_force(connection: sa.Connection, run: int, span: Range) -> list[dict[str, Any]]:
    """Of each policy version with rounds in a range of steps, in order: what they were like.

    Args:
        connection: to read from.
        run: key of the run.
        span: first and last step.
    """
    where = _counting(connection, run, span)
    found: dict[_Key, _Sums] = {}
    _add_sums(connection, where, found)
    if not found:
        return []
    c = rounds.c
    shapes = sa.select(*_KEY, c.staleness, sa.func.count()).select_from(_planned).where(*where)
    for *key, staleness, count in connection.execute(shapes.group_by(*_KEY, c.staleness)):
        sums = found[tuple(key)]
        pairs = zip_longest(sums.staleness, _counts(staleness), fillvalue=0)
        sums.staleness = [before + count * more for before, more in pairs]
    times = sa.select(*_KEY, c.waited_s).select_from(_planned).where(*where)
    for *key, waited_s in connection.execute(times):
        found[tuple(key)].waited_s.append(waited_s)
    for *key, samples in connection.execute(_samples(connection, run, span)):
        if tuple(key) in found:
            found[tuple(key)].samples = int(samples)
    return [_answer(key, found[key]) for key in sorted(found, key=lambda key: found[key].first)]


def dropped(connection: sa.Connection, run: int) -> dict[int, int]:
    """Epoch → samples whose gradients were not applied, as they had become too old."""
    query = (
        sa.select(segments.c.epoch, sa.func.sum(rounds.c.dropped))
        .select_from(_planned)
        .where(*_counting(connection, run, (None, None)))
        .group_by(segments.c.epoch)
    )
    return {epoch: int(samples) for epoch, samples in connection.execute(query)}


def _counting(connection: sa.Connection, run: int, span: Range) -> list[sa.ColumnElement[bool]]:
    """The condition for rounds of a range of steps, as far as they count; see `store.attempts`."""
    c = rounds.c
    parts = [part.rows(c.step, c.attempt) for part in _parts(connection, run)]
    return [c.run == run, *within(c.step, span), sa.or_(*(sa.and_(*part) for part in parts))]


def _parts(connection: sa.Connection, run: int) -> Sequence[attempts.Span]:
    attempt = connection.execute(sa.select(runs.c.attempt).where(runs.c.key == run)).scalar()
    return attempts.spans(connection, run, attempt)


def _counts(staleness: bytes) -> list[int]:
    return msgspec.msgpack.decode(staleness, type=list[int])


def _add_sums(
    connection: sa.Connection, where: list[sa.ColumnElement[bool]], found: dict[_Key, _Sums]
) -> None:
    c, func = rounds.c, sa.func
    columns = {
        "first": func.min(c.step),
        "last": func.max(c.step),
        "rounds": func.count(),
        "world": func.max(c.world),
        "contributors": func.sum(c.contributors),
        "dropped": func.sum(c.dropped),
        "reduced_s": func.sum(c.reduced_s),
        "bytes": func.sum(sa.cast(c.bytes, sa.Double)),  # integers may overflow
        # By the wall clock, as several ranks may tell; of each attempt, as time passes between.
        "lasted_s": func.max(c.ended_at) - func.min(c.ended_at - c.waited_s - c.reduced_s),
    }
    query = (
        sa.select(*_KEY, *(column.label(name) for name, column in columns.items()))
        .select_from(_planned)
        .where(*where)
        .group_by(*_KEY, c.attempt)
    )
    for row in connection.execute(query):
        sums = found.setdefault(tuple(row[:3]), _Sums(row.first, row.last))
        sums.first, sums.last = min(sums.first, row.first), max(sums.last, row.last)
        sums.world = max(sums.world, row.world)
        for name in ("rounds", "contributors", "dropped", "bytes"):
            setattr(sums, name, getattr(sums, name) + int(getattr(row, name)))
        sums.reduced_s += row.reduced_s
        sums.lasted_s += row.lasted_s


def _samples(connection: sa.Connection, run: int, span: Range) -> sa.Select[Any]:
    """Samples of complete steps under each policy, as far as they count."""
    own = steps.c.step
    of_segment = (own >= segments.c.first_step) & (own < segments.c.first_step + segments.c.steps)
    parts = [part.rows(own, segments.c.attempt) for part in _parts(connection, run)]
    return (
        sa.select(*_KEY, sa.func.sum(steps.c.samples))
        .select_from(segments.join(steps, (steps.c.run == segments.c.run) & of_segment))
        .where(segments.c.run == run, *within(own, span))
        .where(sa.or_(*(sa.and_(*part) for part in parts)))
        .group_by(*_KEY)
    )


def _answer(key: _Key, sums: _Sums) -> dict[str, Any]:
    median, p95 = np.quantile(sums.waited_s, (0.5, 0.95))
    gradients = sum(sums.staleness)
    return {
        "version": key[0],
        "policy": key[1],
        "synchroniser": key[2],
        "from": sums.first,
        "to": sums.last,
        "rounds": sums.rounds,
        "world": sums.world,
        "contributors": sums.contributors / sums.rounds,
        "staleness": sums.staleness,
        "samples": sums.samples,
        "dropped": sums.dropped,
        "dropped_share": sums.dropped / sums.samples if sums.samples else None,
        "waited_s": float(median),
        "waited_s_p95": float(p95),
        "reduced_s": sums.reduced_s / sums.rounds,
        "bytes": sums.bytes,
        "rounds_per_s": sums.rounds / sums.lasted_s if sums.lasted_s > 0 else None,
        "gradients_per_s": gradients / sums.lasted_s if sums.lasted_s > 0 else None,
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
        "bytes": func.sum(sa.cast(c.bytes, sa.Double)),
    }
    query = sa.select(*columns.values()).where(*_counting(connection, run, span))
    query = query.group_by(c.step // bucket).order_by(columns["step"])
    found: dict[str, list[Any]] = {name: [] for name in columns}
    for row in connection.execute(query):
        for name, value in zip(columns, row, strict=True):
            found[name].append(value)
    return {"bucket": bucket, **found}
