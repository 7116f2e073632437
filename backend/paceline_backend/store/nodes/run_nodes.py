"""The nodes of runs that train on several: what was launched there, and what became of it.

Rows of a run are changed under the lock of the run's row, but for `met`. A row stays when a later
launch leaves its node out: what the node still tells of the earlier launch is no lie.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import sqlalchemy as sa

from paceline.wire import ENDED, FAILED_ELSEWHERE, RENDEZVOUS_GONE, State
from paceline_backend.store.database import insert
from paceline_backend.store.nodes import alive, spares
from paceline_backend.store.schema import nodes, run_nodes, runs, worker_steps

_GOING_ON = [state for state in State if state not in ENDED]  # the index on states serves this
# What `runs.rendezvous` says besides a place:
GONE = ""  # it went away, and the launch ends
ANEW = "anew"  # the next launch is recorded; its nodes are to be told


@dataclass(frozen=True)
class RunNode:
    """A node of a run: a row of `run_nodes`."""

    run: int  # key
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
        """Whether its launcher has ended."""
        return State(self.state).final

    @property
    def orphaned(self) -> bool:
        """Whether its launcher ended only because the rendezvous went away."""
        return self.state == State.FAILED and (self.message or "").startswith(RENDEZVOUS_GONE)

    @property
    def followed(self) -> bool:
        """Whether its ranks failed only because another node's did."""
        return self.state == State.FAILED and (self.message or "").startswith(FAILED_ELSEWHERE)

    @property
    def away(self) -> bool:
        """Whether it was lost, stopped, or its agent or launcher killed; asked to leave or not."""
        killed = self.state == State.FAILED and self.exit_code is None and not self.orphaned
        return self.lost or killed or self.state == State.STOPPED

    @property
    def gone(self) -> bool:
        """Whether it went away without having been asked: a script that fails has an exit code."""
        return not self.leaving and self.away


@dataclass(frozen=True)
class MultiNodeRun:
    """An unfinished run on several nodes, with the nodes of its latest launch."""

    key: int
    id: str
    state: str
    first_attempt: int
    nodes_min: int
    host: str | None  # the node that serves the rendezvous
    rendezvous: str | None
    nodes: list[RunNode]


def launch(
    connection: sa.Connection,
    run: int,
    names: Iterable[str],
    first_attempt: int,
    replaces: str | None = None,
) -> None:
    """Notes that nodes are launched, from this attempt on; what they did before is forgotten.

    Args:
        connection: to write with.
        run: key of the run.
        names: of the nodes.
        first_attempt: of the launch.
        replaces: the node that makes way for them, or that was lost.
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
    """The nodes of some runs, by name; of all their launches."""
    by_run: dict[int, list[RunNode]] = {key: [] for key in keys}
    query = sa.select(run_nodes).where(run_nodes.c.run.in_(keys)).order_by(run_nodes.c.node)
    for row in connection.execute(query) if keys else ():
        by_run[row.run].append(RunNode(*row))
    return by_run


def reporting(connection: sa.Connection, rows: Sequence[Any]) -> dict[int, tuple[str, ...]]:
    """The nodes that may report about runs, by the runs' keys.

    Args:
        connection: to read from.
        rows: of runs, with `key`, `node` and `nodes_max`.
    """
    several = of_runs(connection, [row.key for row in rows if row.nodes_max > 1])
    known = {}
    for row in rows:
        own = {row.node} if row.node else set()
        known[row.key] = tuple(sorted(own | {each.node for each in several.get(row.key, ())}))
    return known


def names(connection: sa.Connection, run: str) -> list[str]:
    """The nodes that may have processes of a run on several nodes; none of another run."""
    query = sa.select(run_nodes.c.node).join(runs, runs.c.key == run_nodes.c.run)
    ordered = query.where(runs.c.id == run).order_by(run_nodes.c.node)
    return list(connection.execute(ordered).scalars())


def listed(connection: sa.Connection, run: int) -> list[dict[str, Any]]:
    """The nodes of a run, by its key, as the API shows them."""
    query = sa.select(runs.c.node, runs.c.rendezvous).where(runs.c.key == run)
    host, rendezvous = connection.execute(query).one()
    rows = of_runs(connection, [run])[run]
    answering = {row.node for row in rows} & alive(connection)
    return [
        {
            **asdict(row),
            "host": bool(rendezvous) and row.node == host,
            "alive": row.node in answering,
        }
        for row in rows
    ]


def change(connection: sa.Connection, row: RunNode, values: Mapping[str, Any]) -> RunNode:
    """Writes new values of a row, unless it was launched again; the row with them."""
    c = run_nodes.c
    mine = (c.run == row.run, c.node == row.node, c.launched_at == row.launched_at)
    connection.execute(sa.update(run_nodes).where(*mine).values(dict(values)))
    return replace(row, **values)


def group(connection: sa.Connection, run: str) -> MultiNodeRun | None:
    """A run as `groups` lists it; None: it has ended, or is not on several nodes."""
    return next((each for each in groups(connection) if each.id == run), None)


def locked(connection: sa.Connection, known: MultiNodeRun) -> MultiNodeRun | None:
    """A run as it is now, locked until the transaction ends.

    Returns:
        None: it has ended, was launched anew or meets elsewhere since `known` was read.
    """
    if not set_rendezvous(connection, known, known.rendezvous, known.host):
        return None
    return group(connection, known.id)


def groups(connection: sa.Connection) -> list[MultiNodeRun]:
    """The runs on several nodes that have not ended, the oldest first."""
    c = runs.c
    query = (
        sa.select(
            *(c.key, c.id, c.state, c.first_attempt, c.nodes_min, c.node, c.rendezvous),
        )
        .where(c.state.in_(_GOING_ON), c.nodes_max > 1, c.pruned_at.is_(None))
        .order_by(c.key)
    )
    rows = connection.execute(query).all()
    of = of_runs(connection, [row.key for row in rows])
    return [
        MultiNodeRun(
            *row, [node for node in of[row.key] if node.first_attempt == row.first_attempt]
        )
        for row in rows
    ]


def heartbeats(connection: sa.Connection) -> list[tuple[str, str, float | None]]:
    """The agents that should look after runs on several nodes, and when each was heard last.

    Returns:
        Public run id, node, and the heartbeat's time.
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
    """The newest step that any rank reported of the attempt that a node trains, and its seconds.

    None: there is none, or a later attempt has begun, of which the node has said nothing.

    Args:
        connection: to read from.
        run: public run id.
        node: its name.
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
    """The nodes of unfinished runs of whose latest launch they have said nothing.

    Returns:
        Public run id, node, and when the run was launched there.
    """
    return [
        (group.id, row.node, row.launched_at)
        for group in groups(connection)
        for row in group.nodes
        if row.state == State.PENDING
    ]


def set_rendezvous(
    connection: sa.Connection, group: MultiNodeRun, rendezvous: str | None, host: str | None
) -> bool:
    """Says where the launchers of a run meet; False if that is no longer as `group` has it."""
    c = runs.c
    same = (
        c.key == group.key,
        c.first_attempt == group.first_attempt,
        c.rendezvous.is_not_distinct_from(group.rendezvous),
        c.state.in_(_GOING_ON),
    )
    query = sa.update(runs).where(*same).values(rendezvous=rendezvous, node=host)
    return connection.execute(query).rowcount > 0
