"""The nodes of multi-node runs: the launches on each node, and how they ended.

Rows change only in transactions that have locked the run's row, except the column `met`. If a later
launch does not use a node, the node's row stays, because the node may still report about the
earlier launch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import sqlalchemy as sa

from paceline.wire import FAILED_ELSEWHERE, RENDEZVOUS_GONE, State
from paceline.wire.states import ACTIVE, Rendezvous
from paceline_backend.store.database import insert
from paceline_backend.store.nodes import alive, spares
from paceline_backend.store.schema import nodes, run_nodes, runs, worker_steps


@dataclass(frozen=True)
class RunNode:
    """A node of a run: a row of `run_nodes`. `run` is the run's key."""

    run: int
    node: str
    first_attempt: int
    state: str
    attempt: int
    exit_code: int | None
    message: str | None
    address: str | None
    port: int | None
    launched_at: float
    reported_at: float | None
    met: bool
    lost: bool
    leaving: bool
    replaces: str | None = None
    arrived: bool = False

    @property
    def ended(self) -> bool:
        """Return whether the node's launcher has ended."""
        return State(self.state).final

    @property
    def orphaned(self) -> bool:
        """Return whether the node's launcher ended only because the rendezvous was lost."""
        return self.state == State.FAILED and (self.message or "").startswith(RENDEZVOUS_GONE)

    @property
    def followed(self) -> bool:
        """Return whether the node's ranks failed only because ranks of another node failed."""
        return self.state == State.FAILED and (self.message or "").startswith(FAILED_ELSEWHERE)

    @property
    def away(self) -> bool:
        """Return whether the node was lost or stopped, or its agent or launcher was killed."""
        killed = self.state == State.FAILED and self.exit_code is None and not self.orphaned
        return self.lost or killed or self.state == State.STOPPED

    @property
    def gone(self) -> bool:
        """Return whether the node is away although no order to leave was sent to it."""
        return not self.leaving and self.away


@dataclass(frozen=True)
class MultiNodeRun:
    """An active multi-node run with the nodes of its latest launch.

    `host` is the node that serves the rendezvous, or served it until it was lost. `address` is the
    address of the rendezvous, "address:port".
    """

    key: int
    id: str
    state: str
    first_attempt: int
    nodes_min: int
    host: str | None
    rendezvous: Rendezvous
    address: str | None
    nodes: list[RunNode]


def launch(
    connection: sa.Connection,
    run: int,
    names: Iterable[str],
    first_attempt: int,
    replaces: str | None = None,
) -> None:
    """Record a launch of a run on some nodes; this overwrites the nodes' state in earlier launches.

    `first_attempt` is the first attempt number of the launch, and `replaces` the slow or lost node
    that the new node replaces, if any.
    """
    names = list(names)
    spares.use(connection, run, names)
    values: dict[str, Any] = {
        "run": run,
        "first_attempt": first_attempt,
        "state": State.PENDING,
        "attempt": first_attempt,
        "exit_code": None,
        "message": None,
        "address": None,
        "port": None,
        "launched_at": time.time(),
        "reported_at": None,
        "met": False,
        "lost": False,
        "leaving": False,
        "replaces": replaces,
        "arrived": False,
    }
    for node in names:
        row = values | {"node": node}
        query = insert(connection, run_nodes).values(row)
        query = query.on_conflict_do_update(index_elements=["run", "node"], set_=row)
        connection.execute(query)


def of_runs(connection: sa.Connection, keys: Collection[int]) -> dict[int, list[RunNode]]:
    """Return the nodes of each run's launches: key of the run → its nodes, ordered by name."""
    by_run: dict[int, list[RunNode]] = {key: [] for key in keys}
    if not keys:
        return by_run
    query = sa.select(run_nodes).where(run_nodes.c.run.in_(keys)).order_by(run_nodes.c.node)
    for row in connection.execute(query):
        by_run[row.run].append(RunNode(*row))
    return by_run


def reporting(connection: sa.Connection, rows: Sequence[Any]) -> dict[int, tuple[str, ...]]:
    """Return the nodes that may send reports about each run, by the run's key.

    `rows` are rows of runs with `key`, `node` and `nodes_max`.
    """
    several = of_runs(connection, [row.key for row in rows if row.nodes_max > 1])
    known = {}
    for row in rows:
        own = {row.node} if row.node else set()
        known[row.key] = tuple(sorted(own | {each.node for each in several.get(row.key, ())}))
    return known


def names(connection: sa.Connection, run: str) -> list[str]:
    """Return the nodes that may have processes of a multi-node run; empty for other runs."""
    query = sa.select(run_nodes.c.node).join(runs, runs.c.key == run_nodes.c.run)
    ordered = query.where(runs.c.id == run).order_by(run_nodes.c.node)
    return list(connection.execute(ordered).scalars())


def listed(connection: sa.Connection, run: int) -> list[dict[str, Any]]:
    """Return the nodes of a run in the form that the API shows."""
    query = sa.select(runs.c.node, runs.c.rendezvous).where(runs.c.key == run)
    host, rendezvous = connection.execute(query).one()
    rows = of_runs(connection, [run])[run]
    answering = {row.node for row in rows} & alive(connection)
    return [
        {
            **asdict(row),
            "host": rendezvous == Rendezvous.READY and row.node == host,
            "alive": row.node in answering,
        }
        for row in rows
    ]


def change(connection: sa.Connection, row: RunNode, values: Mapping[str, Any]) -> RunNode:
    """Update columns of a row, unless the node was relaunched; return the row with these values."""
    c = run_nodes.c
    mine = (c.run == row.run, c.node == row.node, c.launched_at == row.launched_at)
    connection.execute(sa.update(run_nodes).where(*mine).values(dict(values)))
    return replace(row, **values)


def group(connection: sa.Connection, run: str) -> MultiNodeRun | None:
    """Return a run as `groups` lists it; None if it has ended or is not a multi-node run."""
    return next((each for each in groups(connection) if each.id == run), None)


def locked(connection: sa.Connection, known: MultiNodeRun) -> MultiNodeRun | None:
    """Lock a run until the transaction ends and return its current state.

    Return None if the run has ended, was relaunched or changed its rendezvous since `known` was
    read.
    """
    if not _update(connection, known, {"node": known.host}):
        return None
    return group(connection, known.id)


def groups(connection: sa.Connection) -> list[MultiNodeRun]:
    """Return the active multi-node runs, oldest first."""
    c = runs.c
    query = (
        sa.select(
            *(c.key, c.id, c.state, c.first_attempt, c.nodes_min, c.node),
            *(c.rendezvous, c.rendezvous_address),
        )
        .where(c.state.in_(ACTIVE), c.nodes_max > 1, c.pruned_at.is_(None))
        .order_by(c.key)
    )
    rows = connection.execute(query).all()
    of = of_runs(connection, [row.key for row in rows])
    return [
        MultiNodeRun(
            key=row.key,
            id=row.id,
            state=row.state,
            first_attempt=row.first_attempt,
            nodes_min=row.nodes_min,
            host=row.node,
            rendezvous=Rendezvous(row.rendezvous),
            address=row.rendezvous_address,
            nodes=[node for node in of[row.key] if node.first_attempt == row.first_attempt],
        )
        for row in rows
    ]


def heartbeats(connection: sa.Connection) -> list[tuple[str, str, float | None]]:
    """Return the heartbeats of the nodes whose launchers have not ended, in all multi-node runs.

    Each item is the public run id, the node and the time of its last heartbeat (None: none).
    """
    known = [
        (group.id, row.node) for group in groups(connection) for row in group.nodes if not row.ended
    ]
    if not known:
        return []
    c = nodes.c
    query = sa.select(c.id, c.heartbeat_at).where(c.id.in_({node for _, node in known}))
    at = {row.id: row.heartbeat_at for row in connection.execute(query)}
    return [(run, node, at.get(node)) for run, node in known]


def newest_step(connection: sa.Connection, run: str, node: str) -> tuple[int, float] | None:
    """Return number and duration in seconds of the newest step that any rank reported.

    Return None if there is no such step, or if the step's attempt is not the latest attempt that
    the node has reported.
    """
    w, c = worker_steps.c, run_nodes.c
    newest = (
        sa.select(w.attempt, w.step, w.step_s, c.attempt.label("own"))
        .join(runs, runs.c.key == w.run)
        .join(run_nodes, (c.run == w.run) & (c.node == node))
        .where(runs.c.id == run)
        .order_by(w.step.desc())
        .limit(1)
    )
    row = connection.execute(newest).one_or_none()
    return None if row is None or row.attempt != row.own else (row.step, row.step_s)


def pending(connection: sa.Connection) -> list[tuple[str, str, float]]:
    """Return nodes that have not yet reported about the latest launch of their active run.

    Each item is the public run id, the node and the time of the launch.
    """
    return [
        (group.id, row.node, row.launched_at)
        for group in groups(connection)
        for row in group.nodes
        if row.state == State.PENDING
    ]


def advance(
    connection: sa.Connection,
    group: MultiNodeRun,
    to: Rendezvous,
    host: str | None = None,
    address: str | None = None,
) -> bool:
    """Advance the rendezvous of a run; return False if it has changed since `group` was read.

    Raises:
        ImpossibleTransitionError: phase `to` cannot follow the phase of `group`.
    """
    group.rendezvous.check(to)
    values = {"rendezvous": to, "rendezvous_address": address, "node": host}
    return _update(connection, group, values)


def _update(connection: sa.Connection, group: MultiNodeRun, values: Mapping[str, Any]) -> bool:
    """Update columns of a run; return False if its rendezvous is no longer as in `group`."""
    c = runs.c
    same = (
        c.key == group.key,
        c.first_attempt == group.first_attempt,
        c.rendezvous == group.rendezvous,
        c.rendezvous_address.is_not_distinct_from(group.address),
        c.state.in_(ACTIVE),
    )
    query = sa.update(runs).where(*same).values(dict(values))
    return connection.execute(query).rowcount > 0
