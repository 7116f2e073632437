"""Read the evaluations that no restart discarded, combined over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.attempts import AttemptSpan
from paceline_backend.store.rollups.metrics import ratio
from paceline_backend.store.schema import evaluations


@dataclass(frozen=True)
class Evaluated:
    """Metrics that a script measured on held-out data after a step, combined over `ranks` ranks.

    A value in `metrics` is None if it was not a finite number. For the other fields see
    `wire.Evaluation`.
    """

    step: int
    epoch: int
    attempt: int
    trained: int
    at: float
    ranks: int
    metrics: dict[str, float | None]


def read(
    connection: sa.Connection,
    run: int,
    counting: Sequence[AttemptSpan],
    *,
    limit: int | None = None,
    since: int = -1,
    metric: str | None = None,
) -> list[Evaluated]:
    """Return the evaluations of a run, oldest first.

    If rank 0 reported a metric without a number of evaluated samples, only rank 0's value counts.
    Otherwise, the value is the mean over all ranks that reported a number of evaluated samples,
    weighted by these numbers.

    Args:
        counting: the steps that no restart discarded, from `store.attempts.spans`.
        limit: return at most this many evaluations, the newest ones; None: all.
        since: only evaluations after this step or a later one.
        metric: only this metric; None: all.
    """
    where = [evaluations.c.run == run, evaluations.c.step >= since, _not_discarded(counting)]
    if metric is not None:
        where.append(evaluations.c.name == metric)
    if limit is not None:
        first = _first_of_newest(connection, where, limit)
        if first is None:
            return []
        where.append(evaluations.c.step >= first)
    by_step: dict[int, Evaluated] = {}
    for row in connection.execute(_combined(where)):
        known = by_step.get(row.step)
        if known is None or known.attempt < row.attempt:
            known = Evaluated(row.step, row.epoch, row.attempt, row.trained, row.at, row.ranks, {})
        metrics = {**known.metrics, row.name: row.value}
        by_step[row.step] = Evaluated(
            *(row.step, row.epoch, row.attempt),
            *(max(known.trained, row.trained), max(known.at, row.at)),
            *(max(known.ranks, row.ranks), metrics),
        )
    return list(by_step.values())


def shown(evaluated: Evaluated, began: float | None) -> dict[str, Any]:
    """Return an evaluation in the form that REST shows.

    `began` is the start of the run in Unix time, None if unknown.
    """
    after_s = None if began is None else max(0.0, evaluated.at - began)
    return {**vars(evaluated), "after_s": after_s}


def _first_of_newest(
    connection: sa.Connection, where: Sequence[sa.ColumnElement[bool]], limit: int
) -> int | None:
    step = evaluations.c.step
    newest = sa.select(step).where(*where).distinct().order_by(step.desc()).limit(limit)
    first: int | None = connection.execute(
        sa.select(sa.func.min(newest.subquery().c.step))
    ).scalar()
    return first


def _combined(where: Sequence[sa.ColumnElement[bool]]) -> sa.Select[Any]:
    c = evaluations.c
    alone = sa.and_(c.rank == 0, c.samples.is_(None))
    weight = sa.cast(c.samples, sa.Double)
    weighted = sa.case((sa.func.abs(c.value) > 1e-100, c.value * weight), else_=0.0)
    mean = ratio(sa.func.sum(sa.case((c.samples.is_not(None), weighted))), sa.func.sum(weight))
    missing = sa.func.sum(sa.case((c.value.is_(None), 1), else_=0)) > 0
    of_rank_0 = sa.func.sum(sa.case((alone, 1), else_=0)) > 0
    value = sa.case(
        (of_rank_0, sa.func.max(sa.case((alone, c.value)))), (missing, None), else_=mean
    )
    columns = (
        *(c.step, c.attempt, c.name, sa.func.max(c.epoch).label("epoch")),
        *(sa.func.max(c.trained).label("trained"), sa.func.max(c.at).label("at")),
        sa.case((of_rank_0, 1), else_=sa.func.count()).label("ranks"),
        value.label("value"),
    )
    counted = sa.or_(c.rank == 0, c.samples.is_not(None))
    query = sa.select(*columns).where(*where, counted).group_by(c.step, c.attempt, c.name)
    return query.order_by(c.step, c.attempt, c.name)


def _not_discarded(counting: Sequence[AttemptSpan]) -> sa.ColumnElement[bool]:
    """Return the SQL condition for evaluations that no later attempt has discarded.

    An attempt may evaluate before it trains its first step. The `step` of such an evaluation is the
    step before the attempt's first step.
    """
    c = evaluations.c
    parts = []
    for span in counting:
        part = [c.step >= span.first - 1]
        if span.attempt is not None:
            part.append(c.attempt.between(span.attempt - span.before, span.attempt))
        if span.end is not None:
            part.append(c.step < span.end)
        parts.append(sa.and_(*part))
    return sa.or_(*parts) if parts else sa.false()
