"""Writes what ranks and agents reported: in bulk, each batch in one transaction.

Messages may come late, in any order and repeatedly; the tables end up the same:

* `StepBatch` → one row of ``worker_steps`` per rank and step; of several attempts at a step the
  latest stays. Steps that all ranks reported, in one attempt, are summed up in ``steps``.
* `RoundBatch` → one row of ``rounds`` per record.
* `Adopted` → ``segments``; a policy version's earliest one tells when that switch took effect.
* `Hello`, `RunState` → ``runs``: the latest attempt's Hello; states only go forward, an end is
  final unless it was only assumed. Whatever comes of a run is a sign that it lives.
* `NodeState` → ``nodes``: the latest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psycopg
import sqlalchemy as sa

from paceline.wire import (
    ENDED,
    Adopted,
    Hello,
    Message,
    NodeState,
    RoundBatch,
    RoundRecord,
    RunState,
    State,
    StepBatch,
    StepRecord,
)
from paceline.wire.segment import MOST_STEPS
from paceline_backend.store import blobs, refusals, rounds, schema
from paceline_backend.store.database import Store, StoreRefusedError, insert

_ALL_STEPS = range(2**62)
_RUN = [
    "key",
    "id",
    "state",
    "attempt",
    "world",
    "samples",
    "loss_mean",
    "started_at",
    "dropped",
    "node",
    "seen_at",
    "lost",
    "backend",
]  # as in `_Run`
_SEEN_EVERY_S = 1.0  # not at every batch: each would write the run's row again

# A record's fields are columns of the same names.
_COLUMNS = (*StepRecord.__struct_fields__, "run")
_NAMES = ", ".join(_COLUMNS)
_NEWER_ATTEMPT_WINS = (
    "ON CONFLICT (run, step, rank) DO UPDATE SET "
    + ", ".join(f"{c} = excluded.{c}" for c in _COLUMNS if c not in ("run", "step", "rank"))
    + " WHERE excluded.attempt > worker_steps.attempt"
)
_INSERT = (
    f"INSERT INTO worker_steps ({_NAMES}) VALUES ({', '.join('?' * len(_COLUMNS))}) "
    + _NEWER_ATTEMPT_WINS
)
_INCOMING = "CREATE TEMP TABLE IF NOT EXISTS incoming (LIKE worker_steps) ON COMMIT DELETE ROWS"
_COPY = f"COPY incoming ({_NAMES}) FROM STDIN (FORMAT BINARY)"
_INSERT_INCOMING = (
    f"INSERT INTO worker_steps ({_NAMES}) SELECT {_NAMES} FROM incoming {_NEWER_ATTEMPT_WINS}"
)
_POSTGRES_TYPES = {
    sa.BigInteger: "int8",
    sa.Integer: "int4",
    sa.SmallInteger: "int2",
    sa.Double: "float8",
}
_COPY_TYPES = [_POSTGRES_TYPES[type(schema.worker_steps.c[name].type)] for name in _COLUMNS]
# COPY in binary cuts integers off without a word, and SQLite takes any of 64 bits.
_BITS = {"int2": 16, "int4": 32, "int8": 64}
_BOUNDS = [
    (name, 2 ** (_BITS[kind] - 1))
    for name, kind in zip(_COLUMNS, _COPY_TYPES, strict=True)
    if kind in _BITS and name not in ("run", "step")
] + [("step", MOST_STEPS)]

# A rank without samples counts in every sum but the ETT error: its forward and backward are real.
# Postgres raises where a product or quotient of finite numbers leaves the range of a double, and so
# would refuse a step of which one rank reported nonsense: hence bounds, here and in `_checked`.
_HUGE = 1e100
_PREDICTED = "ett_s IS NOT NULL AND samples > 0 AND compute_s > 1e-9"
# Of a rank's mean loss in that of the global batch, as of its gradient in the update.
_WEIGHT = (
    "(CASE WHEN CAST(:by_size AS integer) = 0 THEN samples WHEN load > 1e-100 THEN load ELSE 0 END)"
)
_SUMS = {
    "run": "run",
    "step": "step",
    "epoch": "max(epoch)",
    "segment": "max(segment)",
    "workers": "count(*)",
    "samples": "sum(samples)",
    "load_sum": "sum(load)",
    "load_sq": "sum(CASE WHEN abs(load) > 1e-100 THEN load * load ELSE 0 END)",
    "compute_min": "min(compute_s)",
    "compute_max": "max(compute_s)",
    "compute_sum": "sum(compute_s)",
    "sync_min": "min(sync_s)",
    "step_s": "avg(step_s)",
    "ett_error_sum": f"sum(CASE WHEN {_PREDICTED} THEN abs(ett_s - compute_s) / compute_s END)",
    "ett_count": f"sum(CASE WHEN {_PREDICTED} THEN 1 ELSE 0 END)",
    "loss": f"sum(CASE WHEN abs(loss) > 1e-100 THEN loss * {_WEIGHT} ELSE 0 END)"
    f" / nullif(sum(CASE WHEN loss IS NOT NULL THEN {_WEIGHT} ELSE 0 END), 0)",
    "ended_at": "max(ended_at)",
}
_SUM_UP = sa.text(
    f"INSERT INTO steps ({', '.join(_SUMS)}) SELECT {', '.join(_SUMS.values())} "
    "FROM worker_steps WHERE run = :run AND step >= :first AND step < :end GROUP BY run, step "
    "HAVING count(*) = :world AND min(attempt) = max(attempt) "
    "AND min(rank) >= 0 AND max(rank) < :world "  # others came before the Hello
    "ON CONFLICT (run, step) DO UPDATE SET "
    + ", ".join(f"{c} = excluded.{c}" for c in _SUMS if c not in ("run", "step"))
)
# What one rank did of a new attempt and another of an earlier one is no step that ever ran.
_DROP_MIXED = sa.text(
    "DELETE FROM steps WHERE run = :run AND step >= :first AND step < :end AND step IN ("
    "SELECT step FROM worker_steps WHERE run = :run AND step >= :first AND step < :end "
    "GROUP BY step HAVING min(attempt) < max(attempt))"
)


@dataclass(frozen=True)
class Written:
    """What became of a batch of messages."""

    rows: int  # records of worker steps, repeated ones included
    unknown: frozenset[str]  # runs that the store does not have: nothing of theirs was written
    ended: frozenset[str]  # runs that are over
    backends: Mapping[str, str] = field(default_factory=dict)  # of each run that the store has


@dataclass
class _Run:
    """A run's row, locked, as it will be after the batch."""

    key: int
    id: str
    state: str
    attempt: int | None
    world: int | None
    samples: int | None
    loss_mean: str | None
    started_at: float | None
    dropped: int
    node: str | None
    seen_at: float | None
    lost: bool | None
    backend: str
    changes: dict[str, Any] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)  # steps with new rows
    repeated: bool = False  # some of those rows are of a later attempt
    all_steps: bool = False  # the number of ranks is new: any step may be complete now

    def set(self, **columns: Any) -> None:
        for name, value in columns.items():
            self.changes[name] = value
            if hasattr(self, name):
                setattr(self, name, value)


def write(store: Store, messages: Sequence[tuple[str, Message]]) -> Written:
    """Writes telemetry in one transaction.

    Args:
        store: where.
        messages: public run id and message, as `paceline.wire.decode` returns them.

    Raises:
        StoreRefusedError: some message holds values that no database takes; nothing was written.
        StoreError: or one of its kinds; nothing was written.
    """
    with store.write() as connection:
        runs = _lock_runs(connection, {run for run, _ in messages})
        known = [(runs[run], message) for run, message in messages if run in runs]
        for run, message in known:
            if isinstance(message, Hello):
                _hello(run, message)
            elif isinstance(message, RunState):
                _run_state(run, message)
        now = time.time()
        for run in runs.values():
            if run.seen_at is None or now - run.seen_at > _SEEN_EVERY_S:
                run.set(seen_at=now)
            if run.changes:
                query = sa.update(schema.runs).where(schema.runs.c.key == run.key)
                connection.execute(query.values(run.changes))
        _write_segments(connection, [(r, m) for r, m in known if isinstance(m, Adopted)])
        _write_nodes(connection, [m for _, m in messages if isinstance(m, NodeState)])
        rows = _write_steps(connection, [(r, m) for r, m in known if isinstance(m, StepBatch)])
        _sum_up(connection, runs.values())
        _write_rounds(connection, [(r, m) for r, m in known if isinstance(m, RoundBatch)])
    return Written(
        rows,
        unknown=frozenset(r for r, m in messages if r not in runs and not isinstance(m, NodeState)),
        ended=frozenset(run.id for run in runs.values() if run.state in ENDED),
        backends={run.id: run.backend for run in runs.values()},
    )


def _lock_runs(connection: sa.Connection, ids: set[str]) -> dict[str, _Run]:
    """The runs' rows, until the transaction ends.

    The lock makes several ingests take turns at a run: two that each see only their own rows of a
    step would both find it incomplete. (SQLite has one writer anyway.)
    """
    if not ids:
        return {}
    c = schema.runs.c
    query = (
        sa.select(*(c[name] for name in _RUN))
        .where(c.id.in_(ids))
        .order_by(c.key)
        .with_for_update(key_share=True)
    )
    return {row.id: _Run(*row) for row in connection.execute(query)}


def _refuse(run: str, kind: str, reason: str | None) -> None:
    if reason is not None:
        raise StoreRefusedError(f"run {run}: {kind}.{reason}")


def _hello(run: _Run, hello: Hello) -> None:
    _refuse(run.id, "Hello", refusals.of_hello(hello))
    _started(run, hello.started_at)
    if run.state in ("pending", "starting"):
        run.set(state="running")
    if run.attempt is not None and hello.attempt < run.attempt:
        return
    run.all_steps |= hello.world != run.world
    run.set(
        attempt=hello.attempt,
        world=hello.world,
        samples=hello.samples,
        global_batch=hello.global_batch,
        seed=hello.seed,
        loss_mean=hello.loss_mean,
        hello=blobs.pack(hello),
    )


def _run_state(run: _Run, change: RunState) -> None:
    _refuse(run.id, "RunState", refusals.of_run_state(change))
    if change.state is State.RUNNING:
        _started(run, change.at)
    if change.dropped > run.dropped:
        run.set(dropped=change.dropped)
    if run.node is None and change.node:
        run.set(node=change.node)
    before, after = State(run.state), change.state
    if before.final and not run.lost:
        return
    if after.final:
        run.set(
            lost=False,
            state=change.state,
            ended_at=change.at,
            exit_code=change.exit_code,
            message=change.message,
        )
        return
    if run.lost:  # The end was only assumed from silence; this message is a sign of life.
        run.set(lost=False, state=change.state, ended_at=None, message=None)
    elif before.may_become(after):
        run.set(state=change.state)
    if change.message is not None:
        run.set(message=change.message)  # why it was restarted


def _started(run: _Run, at: float) -> None:
    if run.started_at is None or at < run.started_at:
        run.set(started_at=at)


def _write_segments(connection: sa.Connection, adopted: list[tuple[_Run, Adopted]]) -> None:
    if not adopted:
        return
    for run, message in adopted:
        _refuse_segment(run, message)
    connection.execute(
        insert(connection, schema.segments).on_conflict_do_nothing(),
        [
            {
                "run": run.key,
                "attempt": message.attempt,
                "seq": message.segment.seq,
                "epoch": message.segment.epoch,
                "first_step": message.segment.first_step,
                "steps": message.segment.steps,
                "policy": message.segment.policy,
                "version": message.segment.version,
                "source": message.segment.source,
                "moved": message.segment.moved,
                "plan_s": message.segment.plan_s,
                "adopted_at": message.adopted_at,
                "body": blobs.pack(message.segment),
                "synchroniser": message.segment.synchroniser.name,
                "why": message.segment.why,
                "synchroniser_digest": message.segment.synchroniser.digest,
            }
            for run, message in adopted
        ],
    )
    c = schema.switches.c
    # The earliest by time, not by step: a restarted attempt may run the same steps again.
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
                "of_version": message.segment.version,
                "first_step": message.segment.first_step,
                "at": message.adopted_at,
            }
            for run, message in adopted
        ],
    )


def _refuse_segment(run: _Run, message: Adopted) -> None:
    if not 0 <= message.attempt < 2**15 or not math.isfinite(message.adopted_at):
        raise StoreRefusedError(f"run {run.id}: Adopted.attempt or adopted_at is out of range")
    known = message.attempt == run.attempt  # of another attempt, ranks and samples are unknown
    terms = (run.world, run.samples) if known else (None, None)
    _refuse(run.id, "Adopted.segment", message.segment.problem(*terms))


def _write_nodes(connection: sa.Connection, states: list[NodeState]) -> None:
    if not states:
        return
    for state in states:
        if reason := refusals.of_node_state(state):
            raise StoreRefusedError(f"NodeState.{reason}")
    latest = {state.node: state for state in sorted(states, key=lambda state: state.at)}
    rows = insert(connection, schema.nodes)
    mutable = [c.name for c in schema.nodes.c if c.name not in ("id", "registered_at")]
    upsert = rows.on_conflict_do_update(
        index_elements=["id"],
        set_={name: rows.excluded[name] for name in mutable},
        where=rows.excluded.heartbeat_at >= schema.nodes.c.heartbeat_at,
    )
    connection.execute(
        upsert,
        [
            {
                "id": state.node,
                "hostname": state.hostname,
                "cores": state.cores,
                "memory_bytes": state.memory_bytes,
                "gpus": state.gpus,
                "paceline": state.paceline,
                "registered_at": state.at,
                "heartbeat_at": state.at,
                "left": state.left,
                "runs": state.runs,
            }
            for state in latest.values()
        ],
    )


def _write_steps(connection: sa.Connection, batches: list[tuple[_Run, StepBatch]]) -> int:
    count = 0
    # By key: one INSERT of Postgres must not meet the same row twice.
    rows: dict[tuple[int, int, int], tuple[Any, ...]] = {}
    for run, batch in batches:
        key = run.key
        count += len(batch.records)
        for record in batch.records:
            run.touched.add(record.step)
            run.repeated |= record.attempt > 0
            at = (key, record.step, record.rank)
            earlier = rows.get(at)
            if earlier is None or earlier[0] < record.attempt:  # attempt is the first column
                _check_rank(run, record)
                rows[at] = (*msgspec.structs.astuple(_checked(record)), key)
    if not rows:
        return count
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(_INSERT, list(rows.values()))
    else:
        _copy(connection, rows.values())
    return count


def _write_rounds(connection: sa.Connection, batches: list[tuple[_Run, RoundBatch]]) -> None:
    for run, batch in batches:
        for record in batch.records:
            _check_rank(run, record)
    rounds.write(connection, [(run.key, batch) for run, batch in batches])


def _check_rank(run: _Run, record: StepRecord | RoundRecord) -> None:
    """Refuses ranks that the attempt does not have; how many it has, its Hello says.

    Another attempt may have had more.
    """
    world = refusals.MOST_RANKS
    if run.world is not None and record.attempt == run.attempt:
        world = run.world
    if not 0 <= record.rank < world:
        raise StoreRefusedError(
            f"run {run.id}: rank {record.rank} is out of range: attempt {record.attempt} has "
            f"{world} ranks"
        )


def _checked(record: StepRecord) -> StepRecord:
    """Only numbers that fit and can be summed up; a loss or ETT that is none is unknown."""
    for name, bound in _BOUNDS:
        if not 0 <= getattr(record, name) < bound:
            raise StoreRefusedError(f"{name} is out of range in {record}")
    total = abs(record.load) + abs(record.data_s) + abs(record.compute_s)
    total += abs(record.sync_s) + abs(record.step_s) + abs(record.ended_at)
    if not total + abs(record.squares) + abs(record.longest) < _HUGE:
        raise StoreRefusedError(f"the load or a time is not a finite number in {record}")
    if record.loss is not None and not -_HUGE < record.loss < _HUGE:
        record = msgspec.structs.replace(record, loss=None)
    if record.ett_s is not None and not -_HUGE < record.ett_s < _HUGE:
        record = msgspec.structs.replace(record, ett_s=None)
    return record


def _copy(connection: sa.Connection, rows: Iterable[tuple[Any, ...]]) -> None:
    connection.execute(sa.text(_INCOMING))
    # SQLAlchemy's transaction has begun above, so its commit commits what goes past it here.
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    with driver.cursor() as cursor, cursor.copy(_COPY) as copy:
        copy.set_types(_COPY_TYPES)
        for row in rows:
            copy.write_row(row)
    connection.execute(sa.text(_INSERT_INCOMING))


def _sum_up(connection: sa.Connection, runs: Iterable[_Run]) -> None:
    for run in runs:
        parts = [_ALL_STEPS] if run.all_steps else list(_ranges(run.touched))
        spans = [{"run": run.key, "first": part.start, "end": part.stop} for part in parts]
        if spans and run.repeated:
            connection.execute(_DROP_MIXED, spans)
        if spans and run.world is not None:
            terms = {"world": run.world, "by_size": int(run.loss_mean == "size")}
            connection.execute(_SUM_UP, [span | terms for span in spans])


def _ranges(numbers: Iterable[int]) -> Iterator[range]:
    """The fewest ranges that hold just these numbers."""
    part: range | None = None
    for number in sorted(numbers):
        if part is not None and part.stop == number:
            part = range(part.start, number + 1)
            continue
        if part is not None:
            yield part
        part = range(number, number + 1)
    if part is not None:
        yield part
