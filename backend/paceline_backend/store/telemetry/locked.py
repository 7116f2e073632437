"""Rows of the runs that a batch of telemetry is about, locked until the batch is committed.

`runs` locks and reads the rows, `LockedRun` collects the changes that messages make, and `save`
writes them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import sqlalchemy as sa

from paceline.wire import OBSERVED, Hello, HelloPart, RunState, State
from paceline.wire.states import Rendezvous, TransitionCause
from paceline_backend.store import hellos, refusals, schema
from paceline_backend.store.database import StoreRefusedError
from paceline_backend.store.nodes import run_nodes
from paceline_backend.store.nodes.run_nodes import RunNode
from paceline_backend.store.telemetry import several

# Minimum interval, in seconds, between two updates of a run's `seen_at`. It is not updated with
# every batch, because SQLite reads and compares the whole row to write it.
_SEEN_EVERY_S = 2.0


@dataclass
class LockedRun:
    """A run's locked row, with the changes that the batch makes.

    Fields that are not described here are columns of `runs`.

    Args:
        changes: new values of columns.
        nodes: nodes of the run's latest launch, for a multi-node run.
        changed_nodes: new values of these nodes' rows.
        touched: steps with new rows in `worker_steps`.
        repeated: whether some of these new rows are of an attempt after the first.
        all_steps: whether the number of ranks has changed, so that any step may be complete now.
        new_step: the earliest step that may be complete now.
    """

    key: int
    id: str
    state: str
    attempt: int | None
    world: int | None
    loss_mean: str | None
    started_at: float | None
    dropped: int
    node: str | None
    seen_at: float | None
    lost: bool | None
    hello: bytes | None
    backend: str
    first_attempt: int
    attempts: int
    nodes_max: int
    policy: str
    rendezvous: str
    changes: dict[str, Any] = field(default_factory=dict, init=False)
    nodes: dict[str, RunNode] = field(default_factory=dict, init=False)
    changed_nodes: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    touched: set[int] = field(default_factory=set, init=False)
    repeated: bool = field(default=False, init=False)
    all_steps: bool = field(default=False, init=False)
    new_step: int | None = field(default=None, init=False)

    def set(self, **columns: Any) -> None:
        """Record new values of columns of the run's row, which `save` writes."""
        self.changes |= columns
        for name in columns.keys() & _READ:
            setattr(self, name, columns[name])

    def refuse(self, what: str, reason: str | None) -> None:
        """Raise `StoreRefusedError` if there is a reason to refuse a message of the kind `what`.

        `reason` starts with the name of the invalid field; None means that the message is valid.
        """
        if reason is not None:
            raise StoreRefusedError(f"run {self.id}: {what}.{reason}")

    def check_rank(self, attempt: int, rank: int) -> None:
        """Raise `StoreRefusedError` if the attempt cannot have this rank.

        The number of ranks is known only for the latest attempt. For other attempts, the limit is
        `MOST_RANKS`.
        """
        world = refusals.MOST_RANKS
        if self.world is not None and attempt == self.attempt:
            world = self.world
        if not 0 <= rank < world:
            raise StoreRefusedError(
                f"run {self.id}: rank {rank} is out of range: attempt {attempt} has {world} ranks"
            )

    def take_hello(self, hello: Hello, packed: hellos.PackedHello) -> bool:
        """Apply a validated Hello; return whether it is the Hello of the latest attempt."""
        self._note_start(hello.started_at)
        self._note_attempt(hello.attempt)
        may = TransitionCause.REPORT.allows(State(self.state), State.RUNNING)
        if may and hello.attempt >= self.first_attempt:
            self._advance(State.RUNNING)
        if self.is_past(hello.attempt):
            return False
        self.all_steps |= hello.world != self.world
        self.set(
            attempt=hello.attempt,
            world=hello.world,
            samples=hello.samples,
            loss_mean=hello.loss_mean,
            hello=packed.digest,
            device=hello.device,
        )
        # For an observed run on one node, the number of ranks is unknown until the Hello.
        if self.policy == OBSERVED and self.nodes_max == 1:
            self.set(nproc=hello.world)
        return True

    def is_past(self, attempt: int) -> bool:
        """Return whether a later attempt has sent its Hello."""
        return self.attempt is not None and attempt < self.attempt

    def has(self, part: HelloPart) -> bool:
        """Return whether a part belongs to the run's current Hello."""
        return (part.attempt, part.hello) == (self.attempt, self.hello)

    def take_state(self, change: RunState) -> None:
        """Apply a state change of the run."""
        self.refuse("RunState", refusals.of_run_state(change))
        if change.state is State.RUNNING:
            self._note_start(change.at)
        if change.dropped > self.dropped:
            self.set(dropped=change.dropped)
        if self.node is None and change.node and not self.nodes:
            self.set(node=change.node)
        self._note_attempt(change.attempt)
        if change.attempt < self.first_attempt:
            # The message is about an earlier launch.
            return
        if not self.nodes:
            self._apply(change)
        elif change.node in self.nodes:
            self.change_node(change.node, several.changes(self.nodes[change.node], change))
            self.sum_up(change)

    def change_node(self, node: str, values: Mapping[str, Any]) -> None:
        """Record new values of columns of a node's row, which `save` writes."""
        self.nodes[node] = replace(self.nodes[node], **values)
        self.changed_nodes.setdefault(node, {}).update(values)

    def sum_up(self, change: RunState) -> None:
        """Apply the combined state of all nodes, after a change of one of them."""
        together = several.summed(list(self.nodes.values()), change)
        # While the run is relaunched because its rendezvous host was lost, nodes report only the
        # end of the previous launch.
        lost = self.rendezvous == Rendezvous.HOST_LOST
        if together is not None and not (together.state.final and lost):
            self._apply(together)

    def _apply(self, change: RunState) -> None:
        before, after = State(self.state), change.state
        # If the run was ended only because no messages arrived, this message makes it active again.
        cause = TransitionCause.REVIVE if self.lost else TransitionCause.REPORT
        allowed = cause.allows(before, after)
        if allowed and after.final:
            self.set(
                lost=False,
                state=after,
                ended_at=change.at,
                exit_code=change.exit_code,
                message=change.message,
            )
            return
        if allowed and self.lost:
            self.set(lost=False, state=after, ended_at=None, message=None)
        elif allowed:
            self._advance(after)
        if change.message is not None and (allowed or not before.final):
            # If the reported state is not final, the message is the reason for a restart.
            self.set(message=change.message)

    def _advance(self, state: State) -> None:
        if self.state == State.QUEUED:
            # Remove the run's message, which was the reason for waiting in the queue.
            self.set(message=None)
        self.set(state=state)

    def _note_attempt(self, attempt: int) -> None:
        if attempt >= self.attempts:
            self.set(attempts=attempt + 1)

    def _note_start(self, at: float) -> None:
        if self.started_at is None or at < self.started_at:
            self.set(started_at=at)


# Names of the fields of `LockedRun` that are columns of `runs`.
_READ = [part.name for part in fields(LockedRun) if part.init]


# Query that locks and reads rows of runs. It is built only once, because building it takes as long
# as executing it.
_LOCK = (
    sa.select(*(schema.runs.c[name] for name in _READ))
    .where(
        schema.runs.c.id.in_(sa.bindparam("ids", expanding=True)), schema.runs.c.pruned_at.is_(None)
    )
    .order_by(schema.runs.c.key)
    .with_for_update(key_share=True)
)


def runs(connection: sa.Connection, ids: set[str]) -> dict[str, LockedRun]:
    """Return the runs that exist among `ids`, locked until the transaction ends.

    The lock prevents two ingest threads from writing rows of the same run at the same time.
    Otherwise, both could write a part of a step's rows, see only their own rows, and find the step
    incomplete. SQLite needs no such lock, because it has only one writer at a time.
    """
    if not ids:
        return {}
    return {row.id: LockedRun(*row) for row in connection.execute(_LOCK, {"ids": list(ids)})}


def read_nodes(connection: sa.Connection, of: Iterable[LockedRun]) -> None:
    """Read the nodes of multi-node runs. Call this before `take_state`."""
    several_nodes = {run.key: run for run in of if run.nodes_max > 1}
    for key, rows in run_nodes.of_runs(connection, several_nodes.keys()).items():
        run = several_nodes[key]
        run.nodes = {row.node: row for row in rows if row.first_attempt == run.first_attempt}


def lose(connection: sa.Connection, run: str, node: str, message: str) -> str | None:
    """Mark a node of an active run as failed because it is assumed lost.

    A later report of the node replaces this state. Return the run's new state, or None if the run
    or the node had ended already.
    """
    locked = runs(connection, {run}).get(run)
    if locked is None or State(locked.state).final:
        return None
    read_nodes(connection, [locked])
    row = locked.nodes.get(node)
    if row is None or row.ended:
        return None
    locked.change_node(node, {"state": State.FAILED, "lost": True, "message": message})
    locked.sum_up(RunState(State.FAILED, time.time(), node, row.attempt))
    if State(locked.state).final:
        locked.set(lost=all(each.lost for each in locked.nodes.values()))
    save(connection, [locked], seen=False)
    return locked.state


def save(connection: sa.Connection, of: Iterable[LockedRun], *, seen: bool = True) -> None:
    """Write the changes of some runs' rows; if `seen`, also update their `seen_at`."""
    now = time.time()
    only_seen: list[int] = []
    for run in of:
        changed = bool(run.changes)
        # abs(), because the clock may have been set back.
        if seen and (run.seen_at is None or abs(now - run.seen_at) > _SEEN_EVERY_S):
            run.set(seen_at=now)
            if not changed:
                only_seen.append(run.key)
        if changed:
            query = sa.update(schema.runs).where(schema.runs.c.key == run.key)
            connection.execute(query.values(run.changes))
        for node, values in run.changed_nodes.items():
            if values:
                run_nodes.change(connection, run.nodes[node], values)
    # One statement for all, because there may be hundreds of runs.
    if only_seen:
        query = sa.update(schema.runs).where(schema.runs.c.key.in_(only_seen))
        connection.execute(query.values(seen_at=now))
