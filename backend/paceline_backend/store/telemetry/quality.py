"""Store metrics of steps and evaluations; order and repetitions do not change the result."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from paceline.wire import MOST_METRICS, Evaluation, MetricBatch, MetricRecord
from paceline_backend.store import refusals
from paceline_backend.store.database import insert
from paceline_backend.store.quality.metrics import names
from paceline_backend.store.quality.tables import evaluations, worker_metrics
from paceline_backend.store.telemetry.locked import LockedRun

logger = logging.getLogger(__name__)

_SPAN = "run = :run AND step >= :first AND step < :end"
# Like the loss of a step: of its newest attempt, over the ranks that have a value.
_SUM_UP = sa.text(
    "INSERT INTO step_metrics (run, name, step, value) SELECT :run, name, step, "
    "sum(CASE WHEN abs(value) > 1e-100 THEN value * weight ELSE 0 END)"
    " / nullif(sum(CASE WHEN value IS NOT NULL THEN weight ELSE 0 END), 0) "
    "FROM worker_metrics JOIN (SELECT step, name, max(attempt) AS attempt FROM worker_metrics "
    f"WHERE {_SPAN} GROUP BY step, name) AS newest USING (step, name, attempt) "
    f"WHERE {_SPAN} GROUP BY step, name "
    "ON CONFLICT (run, name, step) DO UPDATE SET value = excluded.value"
)


def write_metrics(
    connection: sa.Connection, batches: Sequence[tuple[LockedRun, MetricBatch]]
) -> None:
    """Store metrics of steps, and their means over ranks. The newest attempt counts.

    If a run has more names than `MOST_METRICS`, further names are dropped.
    """
    of_runs: dict[int, tuple[LockedRun, list[MetricRecord]]] = {}
    for run, batch in batches:
        of_runs.setdefault(run.key, (run, []))[1].extend(batch.records)
    for run, records in of_runs.values():
        for record in records:
            run.refuse("MetricBatch", refusals.of_metrics(record))
            run.check_rank(record.attempt, record.rank)
        rows = list(_rows(run, records, set(names(connection, run.key))))
        if not rows:
            continue
        _upsert(connection, rows)
        spans = [
            {"run": run.key, "first": part.start, "end": part.stop}
            for part in _ranges({row["step"] for row in rows})
        ]
        connection.execute(_SUM_UP, spans)


def _rows(
    run: LockedRun, records: Sequence[MetricRecord], known: set[str]
) -> Iterator[dict[str, Any]]:
    for record in records:
        for name, value in record.values.items():
            if name not in known and len(known) >= MOST_METRICS:
                logger.debug("run %s has too many metrics: %s is dropped", run.id, name)
                continue
            known.add(name)
            yield {
                "run": run.key,
                "step": record.step,
                "name": name,
                "rank": record.rank,
                "attempt": record.attempt,
                "weight": record.weight,
                "value": _finite(value),
            }


def _upsert(connection: sa.Connection, rows: list[dict[str, Any]]) -> None:
    made = insert(connection, worker_metrics)
    made = made.on_conflict_do_update(
        index_elements=list(worker_metrics.primary_key),
        set_={name: made.excluded[name] for name in ("attempt", "weight", "value")},
        where=made.excluded.attempt >= worker_metrics.c.attempt,
    )
    connection.execute(made, rows)


def write_evaluations(
    connection: sa.Connection, messages: Sequence[tuple[LockedRun, Evaluation]]
) -> None:
    """Store evaluations. If a rank reports a metric twice after a step, the newest value counts."""
    rows = []
    for run, message in messages:
        run.refuse("Evaluation", refusals.of_evaluation(message))
        run.check_rank(message.attempt, message.rank)
        fields = ("step", "attempt", "rank", "epoch", "trained", "at", "samples")
        about = {"run": run.key, **{name: getattr(message, name) for name in fields}}
        rows += [
            {**about, "name": name, "value": _finite(value)}
            for name, value in message.values.items()
        ]
    if not rows:
        return
    made = insert(connection, evaluations)
    made = made.on_conflict_do_update(
        index_elements=list(evaluations.primary_key),
        set_={name: made.excluded[name] for name in ("epoch", "trained", "at", "samples", "value")},
        where=made.excluded.at >= evaluations.c.at,
    )
    connection.execute(made, rows)


def _finite(value: float) -> float | None:
    return value if -refusals.HUGE < value < refusals.HUGE else None


def _ranges(numbers: set[int]) -> Iterator[range]:
    first = last = None
    for number in sorted(numbers):
        if first is None or last is None or number != last + 1:
            if first is not None and last is not None:
                yield range(first, last + 1)
            first = number
        last = number
    if first is not None and last is not None:
        yield range(first, last + 1)
