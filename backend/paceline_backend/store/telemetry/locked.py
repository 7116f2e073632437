"""The rows of the runs that a batch of telemetry is about, locked until it is committed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import sqlalchemy as sa

from paceline.wire import OBSERVED, Hello, HelloPart, RunState, State
from paceline_backend.store import hellos, refusals, schema
from paceline_backend.store.database import StoreRefusedError
from paceline_backend.store.nodes import run_nodes
from paceline_backend.store.nodes.run_nodes import GONE, RunNode
from paceline_backend.store.telemetry import several

# Not at every batch: SQLite reads and compares the whole row to write it.
_SEEN_EVERY_S = 2.0


@dataclass
class LockedRun:
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
    hello: bytes | None  # its digest
    backend: str
    first_attempt: int
    attempts: int
    nodes_max: int
    policy: str
    rendezvous: str | None
    changes: dict[str, Any] = field(default_factory=dict, init=False)
    nodes: dict[str, RunNode] = field(default_factory=dict, init=False)  # of its launch
    changed_nodes: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    touched: set[int] = field(default_factory=set, init=False)  # steps with new rows
    repeated: bool = field(default=False, init=False)  # some of those rows are of a later attempt
    # The number of ranks is new: any step may be complete now.
    all_steps: bool = field(default=False, init=False)
    new_step: int | None = field(default=None, init=False)  # the earliest that may be complete now

    def set(self, **columns: Any) -> None:
        """Notes new values of the row."""
        self.changes |= columns
        for name in columns.keys() & _READ:
            setattr(self, name, columns[name])

    def refuse(self, what: str, reason: str | None) -> None:
        """Refuses a message of this run if there is a reason.

        Args:
            what: the message.
            reason: it begins with the field that is wrong; None: nothing is wrong.

        Raises:
            StoreRefusedError: there is a reason.
        """
        if reason is not None:
            raise StoreRefusedError(f"run {self.id}: {what}.{reason}")

    def check_rank(self, attempt: int, rank: int) -> None:
        """Refuses ranks that the attempt does not have; how many it has, its Hello says.

        Another attempt may have had more.

        Raises:
            StoreRefusedError: there is no such rank.
        """
        world = refusals.MOST_RANKS
        if self.world is not None and attempt == self.attempt:
            world = self.world
        if not 0 <= rank < world:
            raise StoreRefusedError(
                f"run {self.id}: rank {rank} is out of range: attempt {attempt} has {world} ranks"
            )

    def take_hello(self, hello: Hello, packed: hellos.PackedHello) -> bool:
        """Take in a Hello that was checked; return whether it is the latest attempt's."""
        self._started(hello.started_at)
        self._tells_of(hello.attempt)
        may = State(self.state).may_become(State.RUNNING)
        if may and hello.attempt >= self.first_attempt:
            self._advance(State.RUNNING)
        if self.is_past(hello.attempt):
            return False
        self.all_steps |= hello.world != self.world
        self.set(
            attempt=hello.attempt,
            world=hello.world,
            samples=hello.samples,
            global_batch=hello.global_batch,
            seed=hello.seed,
            loss_mean=hello.loss_mean,
            hello=packed.digest,
            device=hello.device,
        )
        if self.policy == OBSERVED and self.nodes_max == 1:  # who started them did not say
            self.set(nproc=hello.world)
        return True

    def is_past(self, attempt: int) -> bool:
        """Return whether a later attempt has said hello."""
        return self.attempt is not None and attempt < self.attempt

    def has(self, part: HelloPart) -> bool:
        """Return whether the run's Hello is the one that a part is of."""
        return (part.attempt, part.hello) == (self.attempt, self.hello)

    def take_state(self, change: RunState) -> None:
        """Takes in a change of the run's life.

        Raises:
            StoreRefusedError: it holds what no database takes.
        """
        self.refuse("RunState", refusals.of_run_state(change))
        if change.state is State.RUNNING:
            self._started(change.at)
        if change.dropped > self.dropped:
            self.set(dropped=change.dropped)
        if self.node is None and change.node and not self.nodes:
            self.set(node=change.node)
        self._tells_of(change.attempt)
        if change.attempt < self.first_attempt:
            return  # who looked after the run before it went on
        if not self.nodes:
            self._become(change)
        elif change.node in self.nodes:
            self.change_node(change.node, several.changes(self.nodes[change.node], change))
            self.sum_up(change)

    def change_node(self, node: str, values: Mapping[str, Any]) -> None:
        """Notes new values of the row of one of several nodes."""
        self.nodes[node] = replace(self.nodes[node], **values)
        self.changed_nodes.setdefault(node, {}).update(values)

    def sum_up(self, change: RunState) -> None:
        """Takes in what all nodes say together, after a change of one of them."""
        together = several.summed(list(self.nodes.values()), change)
        # While another launch is on its way, ends are those of the launch before.
        if together is not None and not (together.state.final and self.rendezvous == GONE):
            self._become(together)

    def _become(self, change: RunState) -> None:
        before, after = State(self.state), change.state
        if before.final and not self.lost:
            return
        if after.final:
            self.set(
                lost=False,
                state=change.state,
                ended_at=change.at,
                exit_code=change.exit_code,
                message=change.message,
            )
            return
        if self.lost:  # The end was only assumed from silence; this message is a sign of life.
            self.set(lost=False, state=change.state, ended_at=None, message=None)
        elif before.may_become(after):
            self._advance(change.state)
        if change.message is not None:
            self.set(message=change.message)  # why it was restarted

    def _advance(self, state: State) -> None:
        if self.state == State.QUEUED:
            self.set(message=None)  # why it waited
        self.set(state=state)

    def _tells_of(self, attempt: int) -> None:
        if attempt >= self.attempts:
            self.set(attempts=attempt + 1)

    def _started(self, at: float) -> None:
        if self.started_at is None or at < self.started_at:
            self.set(started_at=at)


_READ = [part.name for part in fields(LockedRun) if part.init]  # the fields that are columns


_LOCK = (  # made once: to make it takes as long as to execute it
    sa.select(*(schema.runs.c[name] for name in _READ))
    .where(
        schema.runs.c.id.in_(sa.bindparam("ids", expanding=True)), schema.runs.c.pruned_at.is_(None)
    )
    .order_by(schema.runs.c.key)
    .with_for_update(key_share=True)
)


def runs(connection: sa.Connection, ids: set[str]) -> dict[str, LockedRun]:
    """The runs of these ids that the database has, locked until the transaction ends.

    The lock makes several ingests take turns at a run: two that each see only their own rows of a
    step would both find it incomplete. (SQLite has one writer anyway.)
    """
    if not ids:
        return {}
    return {row.id: LockedRun(*row) for row in connection.execute(_LOCK, {"ids": list(ids)})}


def read_nodes(connection: sa.Connection, of: Iterable[LockedRun]) -> None:
    """Reads the nodes of those runs that train on several, before their states are taken in."""
    several_nodes = {run.key: run for run in of if run.nodes_max > 1}
    for key, rows in run_nodes.of_runs(connection, several_nodes.keys()).items():
        run = several_nodes[key]
        run.nodes = {row.node: row for row in rows if row.first_attempt == run.first_attempt}


def lose(connection: sa.Connection, run: str, node: str, message: str) -> str | None:
    """Fails a node of an unfinished run that is assumed lost; what the node reports revives it.

    Returns:
        The run's state afterwards; None if there was nothing to fail.
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
    """Writes what changed in some runs' rows, and with `seen` that each of these runs lives."""
    now = time.time()
    only_seen: list[int] = []
    for run in of:
        changed = bool(run.changes)
        if seen and (
            run.seen_at is None or abs(now - run.seen_at) > _SEEN_EVERY_S
        ):  # clocks may be set
            run.set(seen_at=now)
            if not changed:
                only_seen.append(run.key)
        if changed:
            query = sa.update(schema.runs).where(schema.runs.c.key == run.key)
            connection.execute(query.values(run.changes))
        for node, values in run.changed_nodes.items():
            if values:
                run_nodes.change(connection, run.nodes[node], values)
    if only_seen:  # of all at once: there may be hundreds
        query = sa.update(schema.runs).where(schema.runs.c.key.in_(only_seen))
        connection.execute(query.values(seen_at=now))
