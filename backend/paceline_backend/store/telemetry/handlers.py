"""Store messages of ranks and agents, except their steps.

`telemetry.write` calls one function per kind of message, each with all messages of this kind in the
batch, in the transaction of the batch. Order and repetitions of messages do not change the result:
rows are inserted once, or the newest report replaces older ones. `settle_stops` comes last, because
it reads the rows that the other functions wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from paceline.wire import (
    MOST_METRICS,
    Adopted,
    DataEpoch,
    Evaluation,
    Fallback,
    Hello,
    MetricBatch,
    MetricRecord,
    NodeCheck,
    NodeState,
    RoundBatch,
    RoundRecord,
    State,
)
from paceline.wire.states import TransitionCause
from paceline_backend.store import blobs, refusals, runs, schema, segments
from paceline_backend.store.audit import stop_of
from paceline_backend.store.database import StoreRefusedError, insert, now
from paceline_backend.store.quality.metrics import names as metric_names
from paceline_backend.store.schema import evaluations, worker_metrics
from paceline_backend.store.telemetry.locked import LockedRun
from paceline_backend.store.telemetry.steps import ranges
from paceline_backend.store.telemetry.validation import ROUNDS, check_staleness

logger = logging.getLogger(__name__)

# Columns that heartbeats do not change.
_KEPT_OF_NODES = ("id", "registered_at", "signed", "only_run", "token", "seed", "backend", "host")

_SPAN = "run = :run AND step >= :first AND step < :end"
# A step's metric is computed like the step's loss: as the weighted mean over the ranks that
# reported a value in the newest attempt at the step.
SUM_UP_METRICS = sa.text(
    "INSERT INTO step_metrics (run, name, step, value) SELECT :run, name, step, "
    "sum(CASE WHEN abs(value) > 1e-100 THEN value * weight ELSE 0 END)"
    " / nullif(sum(CASE WHEN value IS NOT NULL THEN weight ELSE 0 END), 0) "
    "FROM worker_metrics JOIN (SELECT step, name, max(attempt) AS attempt FROM worker_metrics "
    f"WHERE {_SPAN} GROUP BY step, name) AS newest USING (step, name, attempt) "
    f"WHERE {_SPAN} GROUP BY step, name "
    "ON CONFLICT (run, name, step) DO UPDATE SET value = excluded.value"
)


def write_attempts(connection: sa.Connection, hellos: Sequence[tuple[LockedRun, Hello]]) -> None:
    """Store the first step of each attempt when its Hello arrives for the first time."""
    c = schema.worker_steps.c
    for run, hello in hellos:
        before = (
            sa.select(c.step)
            .where(c.run == run.key, c.attempt < hello.attempt)
            .order_by(c.step.desc())
            .limit(1)
        )
        newest = connection.execute(before).scalar()
        row = {
            "run": run.key,
            "attempt": hello.attempt,
            "started_at": hello.started_at,
            "step": hello.step,
            "reached": 0 if newest is None else newest + 1,
            "placement": hello.placement or None,
            "devices": msgspec.to_builtins(hello.devices) or None,
        }
        connection.execute(insert(connection, schema.attempts).values(row).on_conflict_do_nothing())


def write_segments(connection: sa.Connection, adopted: Sequence[tuple[LockedRun, Adopted]]) -> None:
    """Store the segments that are not stored yet; the caller has validated them with `defect`."""
    if not adopted:
        return
    connection.execute(
        insert(connection, schema.segments).on_conflict_do_nothing(),
        [
            {"run": run.key, "body": blobs.pack(message.plan), **segments.row(message)}
            for run, message in adopted
        ],
    )
    _note_effects(connection, adopted)


def _note_effects(connection: sa.Connection, adopted: Sequence[tuple[LockedRun, Adopted]]) -> None:
    """Store that each policy version is in force from its earliest segment on.

    The earliest segment is the first by time, not by step: a restarted attempt may repeat steps.
    """
    c = schema.switches.c
    earliest = (
        sa.update(schema.switches)
        .where(c.run == sa.bindparam("of_run"), c.version == sa.bindparam("of_version"))
        .where(sa.or_(c.effective_at.is_(None), c.effective_at > sa.bindparam("at")))
        .values(effective_step=sa.bindparam("first_step"), effective_at=sa.bindparam("at"))
    )
    connection.execute(
        earliest,
        [
            {
                "of_run": run.key,
                "of_version": message.plan.version,
                "first_step": message.plan.first_step,
                "at": message.adopted_at,
            }
            for run, message in adopted
        ],
    )


def write_fallbacks(
    connection: sa.Connection, fallbacks: Sequence[tuple[LockedRun, Fallback]]
) -> None:
    """Store each fallback with its segment; drop it if the segment is not stored.

    Rank 0 sends the segment's `Adopted` before its `Fallback`. An outage of the bus can swap the
    two messages, because spooled messages arrive later. Two ingest threads can also store them in
    the wrong order. Then the fallback of this segment is lost.
    """
    c = schema.segments.c
    for run, message in fallbacks:
        run.refuse("Fallback", refusals.of_fallback(message))
        noted = (
            sa.update(schema.segments)
            .where(c.run == run.key, c.attempt == message.attempt, c.seq == message.segment)
            .values(fallback=message.why)
        )
        if not connection.execute(noted).rowcount:
            logger.debug(
                "run %s: a fallback of segment %d of attempt %d is dropped: no such segment",
                run.id,
                message.segment,
                message.attempt,
            )


def write_rounds(
    connection: sa.Connection, batches: Sequence[tuple[LockedRun, RoundBatch]]
) -> None:
    """Store the rounds that are not stored yet."""
    rows = [_round_row(run, record) for run, batch in batches for record in batch.records]
    if rows:
        connection.execute(insert(connection, schema.rounds).on_conflict_do_nothing(), rows)


def _round_row(run: LockedRun, record: RoundRecord) -> dict[str, Any]:
    run.check_rank(record.attempt, record.rank)
    record = ROUNDS.checked(record)
    check_staleness(record)
    staleness = blobs.pack(record.staleness)
    return msgspec.structs.asdict(record) | {"run": run.key, "staleness": staleness}


def write_data_epochs(
    connection: sa.Connection, messages: Sequence[tuple[LockedRun, DataEpoch]]
) -> None:
    """Store one row for each attempt, epoch and rank; a later message replaces an earlier one."""
    c = schema.data_epochs.c
    for run, message in messages:
        run.refuse("DataEpoch", refusals.of_data_epoch(message))
        run.check_rank(message.attempt, message.rank)
        row = msgspec.structs.asdict(message) | {"run": run.key}
        keys = [c.run, c.attempt, c.epoch, c.rank]
        upsert = insert(connection, schema.data_epochs).values(row)
        values = {name: upsert.excluded[name] for name in row if c[name] not in set(keys)}
        connection.execute(upsert.on_conflict_do_update(index_elements=keys, set_=values))


def write_metrics(
    connection: sa.Connection, batches: Sequence[tuple[LockedRun, MetricBatch]]
) -> None:
    """Store metrics of steps, and their means over ranks, from the newest attempt at each step.

    A run can have `MOST_METRICS` different metrics; values of further metrics are dropped.
    """
    of_runs: dict[int, tuple[LockedRun, list[MetricRecord]]] = {}
    for run, batch in batches:
        of_runs.setdefault(run.key, (run, []))[1].extend(batch.records)
    for run, records in of_runs.values():
        for record in records:
            run.refuse("MetricBatch", refusals.of_metrics(record))
            run.check_rank(record.attempt, record.rank)
        rows = list(_metric_rows(run, records, set(metric_names(connection, run.key))))
        if not rows:
            continue
        _upsert_metrics(connection, rows)
        spans = [
            {"run": run.key, "first": part.start, "end": part.stop}
            for part in ranges({row["step"] for row in rows})
        ]
        connection.execute(SUM_UP_METRICS, spans)


def _metric_rows(
    run: LockedRun, records: Sequence[MetricRecord], known: set[str]
) -> Iterator[dict[str, Any]]:
    for record in records:
        for name, value in record.values.items():
            if name not in known and len(known) >= MOST_METRICS:
                logger.debug(
                    "run %s: the metric %s is dropped, because the run already has %d metrics",
                    run.id,
                    name,
                    MOST_METRICS,
                )
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


def _upsert_metrics(connection: sa.Connection, rows: list[dict[str, Any]]) -> None:
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


def write_nodes(connection: sa.Connection, states: Sequence[NodeState]) -> None:
    """Store each node's latest state, with the database's time because a node's clock may be wrong.

    `states` are in the order of arrival. The caller has checked that the agents have a session: see
    `store.nodes.admission.expect`.
    """
    if not states:
        return
    for state in states:
        if reason := refusals.of_node_state(state):
            raise StoreRefusedError(f"NodeState.{reason}")
    latest = {state.node: state for state in states}
    at = now(connection)
    rows = insert(connection, schema.nodes)
    mutable = [c.name for c in schema.nodes.c if c.name not in _KEPT_OF_NODES]
    changes: dict[str, sa.ColumnElement[Any]] = {name: rows.excluded[name] for name in mutable}
    # An agent that was just started has not measured the node's speeds yet: keep the stored speeds.
    changes["check"] = sa.func.coalesce(rows.excluded["check"], schema.nodes.c["check"])
    upsert = rows.on_conflict_do_update(index_elements=["id"], set_=changes)
    connection.execute(
        upsert,
        [
            {
                "id": state.node,
                "registered_at": at,
                "heartbeat_at": at,
                "left": state.left,
                "signed": False,
                "report": _report(state),
                "check": None if state.check is None else _speeds(state.check),
            }
            for state in latest.values()
        ],
    )


def _report(state: NodeState) -> dict[str, Any]:
    names = ("hostname", "cores", "memory_bytes", "gpus", "paceline", "runs")
    report = {name: getattr(state, name) for name in names}
    return report | {"gpu_states": [msgspec.structs.asdict(gpu) for gpu in state.gpu_states]}


def _speeds(check: NodeCheck) -> dict[str, float | None]:
    names = ("compute_gflops", "memory_gbps", "disk_mbps", "at")
    return {name: getattr(check, name) for name in names}


def settle_stops(connection: sa.Connection, of: Iterable[LockedRun]) -> None:
    """Change runs that have just finished to `stopped` if a stop was requested.

    A run that completed its last epoch although a stop was requested stays finished. A run whose
    number of epochs is unknown becomes stopped. Call this in the transaction that wrote the runs'
    newest segments, after the runs' changes were saved.
    """
    for run in of:
        if run.changes.get("state") is not State.FINISHED:
            continue
        stop = stop_of(connection, run.id)
        if stop is None or _has_completed(connection, run.key):
            continue
        message = f"stopped by {stop['who']}"
        if stop["why"]:
            message += f": {stop['why']}"
        finished = schema.runs.c.state.in_(TransitionCause.STOP_REQUESTED.sources(State.STOPPED))
        query = sa.update(schema.runs).where(schema.runs.c.key == run.key, finished)
        connection.execute(query.values(state=State.STOPPED, message=message))


def _has_completed(connection: sa.Connection, run: int) -> bool:
    hello = runs.hello(connection, run)
    return (
        hello is not None
        and hello.epochs is not None
        and segments.is_complete(connection, run, hello)
    )
