"""Record the nodes that verdicts named slow, and read the history of a node."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.wire import State
from paceline_backend.store import leases
from paceline_backend.store.database import now
from paceline_backend.store.nodes import cordons
from paceline_backend.store.schema import run_nodes, runs, slow_nodes


@dataclass(frozen=True)
class RunOnNodes:
    """A multi-node run that trains."""

    key: int
    id: str
    attempt: int
    replace_slow_nodes: bool


@dataclass(frozen=True)
class Slow:
    """A node that is currently named slow: a row of `slow_nodes` without an end.

    `run` is the run's key. `step` is the newest step that the first verdict about the node used.
    """

    run: int
    at: float
    node: str
    attempt: int
    step: int
    factor: float | None
    words: str


def watched(connection: sa.Connection, owner: str) -> list[RunOnNodes]:
    """Return the multi-node runs that train, except those that another worker plans."""
    c = runs.c
    query = (
        sa.select(c.key, c.id, c.attempt, c.replace_slow_nodes)
        .where(c.state == State.RUNNING, c.nodes_max > 1, c.attempt.is_not(None))
        .order_by(c.key)
    )
    own = leases.unless_planned(query, owner, now(connection))
    return [RunOnNodes(*row) for row in connection.execute(own)]


def present(connection: sa.Connection, run: int) -> Slow | None:
    """Return the node of a run that verdicts currently name slow; None if there is none."""
    c = slow_nodes.c
    columns = [c[name] for name in Slow.__dataclass_fields__]
    query = sa.select(*columns).where(c.run == run, c.ended_at.is_(None))
    row = connection.execute(query.order_by(c.at.desc()).limit(1)).one_or_none()
    return None if row is None else Slow(*row)


def name(connection: sa.Connection, slow: Slow) -> Slow:
    """Record a verdict that names a node slow; return the row as it is stored.

    While verdicts about the same attempt name the same node, the row stays, and only `factor` and
    `words` are updated.
    """
    known = present(connection, slow.run)
    if known is None or (known.node, known.attempt) != (slow.node, slow.attempt):
        clear(connection, slow.run)
        connection.execute(sa.insert(slow_nodes).values(**vars(slow)))
        return slow
    c = slow_nodes.c
    mine = (c.run == known.run, c.at == known.at)
    values = {"factor": slow.factor, "words": slow.words}
    connection.execute(sa.update(slow_nodes).where(*mine).values(values))
    return known


def clear(connection: sa.Connection, run: int) -> None:
    """End the period in which verdicts name a node of the run slow, if there is one now."""
    c = slow_nodes.c
    mine = (c.run == run, c.ended_at.is_(None))
    connection.execute(sa.update(slow_nodes).where(*mine).values(ended_at=time.time()))


def history(connection: sa.Connection, node: str, limit: int) -> dict[str, Any]:
    """Return a node's history, at most `limit` items of each kind, newest first.

    Raises:
        UnknownNodeError: no such node.
    """
    cordons.check(connection, node)
    return {
        "node": node,
        "runs": _runs(connection, node, limit),
        "slow": _slow_periods(connection, node, limit),
        "cordons": cordons.of_node(connection, node)[:limit],
    }


def _runs(connection: sa.Connection, node: str, limit: int) -> list[dict[str, Any]]:
    c, own = runs.c, run_nodes.c
    here = sa.and_(own.run == c.key, own.node == node)
    query = (
        sa.select(
            c.id.label("run"),
            c.name,
            sa.func.coalesce(own.state, c.state).label("state"),
            sa.func.coalesce(own.launched_at, c.created_at).label("launched_at"),
            sa.func.coalesce(own.message, sa.case((own.node.is_(None), c.message))).label(
                "message"
            ),
            sa.func.coalesce(own.leaving, False).label("asked_to_leave"),
            own.replaces,
        )
        .outerjoin(run_nodes, here)
        .where(sa.or_(own.node.is_not(None), c.node == node), c.pruned_at.is_(None))
        .order_by(c.key.desc())
        .limit(limit)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def _slow_periods(connection: sa.Connection, node: str, limit: int) -> list[dict[str, Any]]:
    """Return the newest periods in which verdicts named a node slow.

    If verdicts named the node until the run ended, `ended_at` is the end of the run.
    """
    c = slow_nodes.c
    ended = sa.func.coalesce(c.ended_at, runs.c.ended_at).label("ended_at")
    query = (
        sa.select(runs.c.id.label("run"), c.at, ended, c.attempt, c.step, c.factor, c.words)
        .join(runs, runs.c.key == c.run)
        .where(c.node == node, runs.c.pruned_at.is_(None))
        .order_by(c.at.desc())
        .limit(limit)
    )
    return [dict(row) for row in connection.execute(query).mappings()]
