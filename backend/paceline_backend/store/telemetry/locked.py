"""The rows of the runs that a batch of telemetry is about, locked until it is committed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import sqlalchemy as sa

from paceline.wire import Hello, RoundRecord, RunState, State, StepRecord
from paceline_backend.store import blobs, refusals, schema
from paceline_backend.store.database import StoreRefusedError

_SEEN_EVERY_S = 1.0  # not at every batch: each would write the run's row again


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
    backend: str
    changes: dict[str, Any] = field(default_factory=dict, init=False)
    touched: set[int] = field(default_factory=set, init=False)  # steps with new rows
    repeated: bool = field(default=False, init=False)  # some of those rows are of a later attempt
    # The number of ranks is new: any step may be complete now.
    all_steps: bool = field(default=False, init=False)

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

    def check_rank(self, record: StepRecord | RoundRecord) -> None:
        """Refuses ranks that the attempt does not have; how many it has, its Hello says.

        Another attempt may have had more.

        Raises:
            StoreRefusedError: there is no such rank.
        """
        world = refusals.MOST_RANKS
        if self.world is not None and record.attempt == self.attempt:
            world = self.world
        if not 0 <= record.rank < world:
            raise StoreRefusedError(
                f"run {self.id}: rank {record.rank} is out of range: attempt {record.attempt} has "
                f"{world} ranks"
            )

    def take_hello(self, hello: Hello) -> None:
        """Takes in a leader's introduction.

        Raises:
            StoreRefusedError: it holds what no database takes.
        """
        self.refuse("Hello", refusals.of_hello(hello))
        self._started(hello.started_at)
        if self.state in ("pending", "starting"):
            self.set(state="running")
        if self.attempt is not None and hello.attempt < self.attempt:
            return
        self.all_steps |= hello.world != self.world
        self.set(
            attempt=hello.attempt,
            world=hello.world,
            samples=hello.samples,
            global_batch=hello.global_batch,
            seed=hello.seed,
            loss_mean=hello.loss_mean,
            hello=blobs.pack(hello),
        )

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
        if self.node is None and change.node:
            self.set(node=change.node)
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
            self.set(state=change.state)
        if change.message is not None:
            self.set(message=change.message)  # why it was restarted

    def _started(self, at: float) -> None:
        if self.started_at is None or at < self.started_at:
            self.set(started_at=at)


_READ = [part.name for part in fields(LockedRun) if part.init]  # the fields that are columns


def runs(connection: sa.Connection, ids: set[str]) -> dict[str, LockedRun]:
    """The runs of these ids that the database has, locked until the transaction ends.

    The lock makes several ingests take turns at a run: two that each see only their own rows of a
    step would both find it incomplete. (SQLite has one writer anyway.)
    """
    if not ids:
        return {}
    c = schema.runs.c
    query = (
        sa.select(*(c[name] for name in _READ))
        .where(c.id.in_(ids))
        .order_by(c.key)
        .with_for_update(key_share=True)
    )
    return {row.id: LockedRun(*row) for row in connection.execute(query)}


def save(connection: sa.Connection, of: Iterable[LockedRun]) -> None:
    """Writes what changed in some runs' rows, and that each of these runs lives."""
    now = time.time()
    for run in of:
        if run.seen_at is None or now - run.seen_at > _SEEN_EVERY_S:
            run.set(seen_at=now)
        if run.changes:
            query = sa.update(schema.runs).where(schema.runs.c.key == run.key)
            connection.execute(query.values(run.changes))
