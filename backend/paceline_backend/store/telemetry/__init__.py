"""Write what ranks and agents report: in bulk, each batch in one transaction.

Ingest calls `decode` for each bus entry, `defect` to validate a single message, and `write` for
each batch. Late, reordered and repeated messages do not change the resulting tables, with one
exception: a `Fallback` is lost if the `Adopted` of its segment comes in a later batch. Messages are
stored as follows:

* `StepBatch` → one row of ``worker_steps`` per rank and step; if several attempts trained a step,
  the row of the latest attempt stays. Steps that all ranks reported, in one attempt, are summed up
  in ``steps``.
* `RoundBatch` → one row of ``rounds`` per record.
* `MetricBatch` → ``worker_metrics``, and means over ranks in ``step_metrics``. `Evaluation` →
  ``evaluations``.
* `Adopted` → ``segments``; a switch takes effect with the earliest segment of its policy version.
* `Fallback` → ``segments.fallback``, if the segment is stored.
* `LongPhase` → ``long_phases``: the newest report of each rank.
* `DataEpoch` → ``data_epochs``: one row for each attempt, epoch and rank.
* `Hello`, `RunState` → ``runs``: the latest attempt's Hello, and the state. States only advance. A
  final state changes only if it was assumed because no messages arrived. Any message of a run
  updates ``seen_at``.
* `RunState` of a run on several nodes → ``run_nodes``; `several` combines the nodes' states.
* `Hello`, `HelloPart` → ``hello_parts``: `write` returns the Hellos that are complete now.
* `Hello` → ``attempts``, too: the first step of its attempt, and the end of the steps of earlier
  attempts.
* `NodeState` → ``nodes``: the latest heartbeat of each node.

`locked` locks the runs' rows during the transaction; `steps`, `phases` and `handlers` write the
tables. `validation` validates messages, most of them while it decodes them. `writers` decides who
may send which message. Functions that store messages raise `StoreRefusedError` if a message has
values that no database accepts. `write` does not validate segments, because that takes time for
each of their samples: the caller must validate segments with `defect` first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.wire import (
    ENDED,
    OBSERVED,
    Adopted,
    DataEpoch,
    Evaluation,
    Fallback,
    Hello,
    HelloPart,
    LongPhase,
    Message,
    MetricBatch,
    NodeState,
    RoundBatch,
    RunState,
    StepBatch,
)
from paceline_backend.store import hellos, refusals
from paceline_backend.store.database import Store, StoreRefusedError
from paceline_backend.store.telemetry import handlers, locked, phases, steps
from paceline_backend.store.telemetry.locked import lose
from paceline_backend.store.telemetry.validation import decode, defect

__all__ = ["Written", "decode", "defect", "lose", "write"]


@dataclass(frozen=True)
class Written:
    """Result of writing a batch of messages.

    Args:
        rows: number of step records in the batch, including those that arrived before.
        unknown: runs that the store does not have; nothing about them was written.
        backends: backend of each known run, except observed runs, which are not planned.
        steps: run → the earliest step that the batch may have completed.
        complete: Hellos whose parts have all arrived, with the run's id. The caller must validate
            such a Hello and pass it to `write` as a message; only then is it the run's Hello.
        again: runs whose current Hello is complete, and of which the batch repeats a part.
    """

    rows: int
    unknown: frozenset[str]
    ended: frozenset[str]
    backends: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    complete: tuple[tuple[str, hellos.HelloKey], ...] = ()
    again: frozenset[str] = frozenset()


def write(
    store: Store,
    messages: Sequence[tuple[str, Message]],
    *,
    roll_up: bool = True,
    packed: Mapping[int, hellos.PackedHello] | None = None,
    assembling: Collection[hellos.HelloKey] = (),
) -> Written:
    """Write telemetry in one transaction; on any `StoreError`, nothing is written.

    `messages` has public run id and message, as `paceline.wire.decode` returns them. `packed` has
    the Hellos that the caller has validated and encoded already, by their index in `messages`;
    other Hellos are validated and encoded here. If `roll_up` is false, new roll-ups are left to
    `rollups.writing.fill`, because more telemetry is waiting. Parts of the Hellos in `assembling`
    are not deleted, because the caller still reads them.
    """
    known_hellos = packed or {}
    new = {
        place: known_hellos.get(place) or _packed(run, message)
        for place, (run, message) in enumerate(messages)
        if isinstance(message, Hello)
    }
    with store.write() as connection:
        runs = locked.runs(connection, {run for run, _ in messages})
        known = [(runs[run], message) for run, message in messages if run in runs]
        new_hellos = [
            (runs[run], message, new[place])
            for place, (run, message) in enumerate(messages)
            if run in runs and isinstance(message, Hello)
        ]
        locked.read_nodes(connection, (r for r, m in known if isinstance(m, RunState)))
        for run, hello, stored in new_hellos:
            if run.take_hello(hello, stored):
                hellos.write(connection, run.key, hello.attempt, stored)
        for run, message in known:
            if isinstance(message, RunState):
                run.take_state(message)
        locked.save(connection, runs.values())
        parts = [(r, m) for r, m in known if isinstance(m, HelloPart)]
        again = frozenset(run.id for run, part in parts if run.has(part))
        parts = [(r, p) for r, p in parts if not r.is_past(p.attempt) and not r.has(p)]
        complete = hellos.add(connection, [(run.key, part) for run, part in parts], assembling)
        ids = {run.key: run.id for run, _ in parts}
        for run in runs.values():
            if run.changes.get("state") in ENDED:
                hellos.bound(connection, run.key, [*complete, *assembling], most=0)
        handlers.write_segments(connection, [(r, m) for r, m in known if isinstance(m, Adopted)])
        handlers.write_fallbacks(connection, [(r, m) for r, m in known if isinstance(m, Fallback)])
        handlers.write_data_epochs(
            connection, [(r, m) for r, m in known if isinstance(m, DataEpoch)]
        )
        phases.write(connection, [(r, m) for r, m in known if isinstance(m, LongPhase)])
        handlers.write_nodes(connection, [m for _, m in messages if isinstance(m, NodeState)])
        rows = steps.write(connection, [(r, m) for r, m in known if isinstance(m, StepBatch)])
        steps.sum_up(connection, runs.values(), roll_up)
        handlers.write_attempts(connection, [(r, m) for r, m in known if isinstance(m, Hello)])
        handlers.write_rounds(connection, [(r, m) for r, m in known if isinstance(m, RoundBatch)])
        handlers.write_metrics(connection, [(r, m) for r, m in known if isinstance(m, MetricBatch)])
        evaluated = [(r, m) for r, m in known if isinstance(m, Evaluation)]
        handlers.write_evaluations(connection, evaluated)
        handlers.settle_stops(connection, runs.values())
    return Written(
        rows,
        unknown=frozenset(r for r, m in messages if r not in runs and not isinstance(m, NodeState)),
        ended=frozenset(run.id for run in runs.values() if run.state in ENDED),
        backends={run.id: run.backend for run in runs.values() if run.policy != OBSERVED},
        steps={run.id: run.new_step for run in runs.values() if run.new_step is not None},
        complete=tuple((ids[named.run], named) for named in complete),
        again=again,
    )


def _packed(run: str, hello: Hello) -> hellos.PackedHello:
    if reason := refusals.of_hello(hello):
        raise StoreRefusedError(f"run {run}: Hello.{reason}")
    return hellos.pack(hello)
