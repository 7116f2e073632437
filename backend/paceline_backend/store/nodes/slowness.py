"""Which nodes of runs verdicts named slow, since when and until when."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.wire import State
from paceline_backend.store.database import now
from paceline_backend.store.schema import leases, runs, slow_nodes


@dataclass(frozen=True)
class RunOnNodes:
    """A run on several nodes that trains."""

    key: int
    id: str
    attempt: int
    replace_slow_nodes: bool


@dataclass(frozen=True)
class Slow:
    """A node that is named slow: a row of `slow_nodes` without an end."""

    run: int  # key
    at: float
    node: str
    attempt: int
    step: int  # the newest one that the first verdict rested on
    factor: float | None
    words: str


def watched(connection: sa.Connection, owner: str) -> list[RunOnNodes]:
    """The runs on several nodes that train, but those that another worker plans."""
    c, at = runs.c, now(connection)
    mine = sa.or_(leases.c.owner.is_(None), leases.c.owner == owner, leases.c.expires_at <= at)
    query = (
        sa.select(c.key, c.id, c.attempt, c.replace_slow_nodes)
        .outerjoin(leases, leases.c.run == c.key)
        .where(c.state == State.RUNNING, c.nodes_max > 1, c.attempt.is_not(None), mine)
        .order_by(c.key)
    )
    return [RunOnNodes(*row) for row in connection.execute(query)]


def present(connection: sa.Connection, run: int) -> Slow | None:
    """The node of a run, by its key, that is named slow; None: there is none."""
    c = slow_nodes.c
    columns = [c[name] for name in Slow.__dataclass_fields__]
    query = sa.select(*columns).where(c.run == run, c.ended_at.is_(None))
    row = connection.execute(query.order_by(c.at.desc()).limit(1)).one_or_none()
    return None if row is None else Slow(*row)


def name(connection: sa.Connection, slow: Slow) -> Slow:
    """Notes a verdict that names a node; what is noted then.

    The row stays while verdicts about the attempt name the same node, with the newest figures.
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
    """Notes that no node of a run, by its key, is named slow any more."""
    c = slow_nodes.c
    mine = (c.run == run, c.ended_at.is_(None))
    connection.execute(sa.update(slow_nodes).where(*mine).values(ended_at=time.time()))


def of_node(connection: sa.Connection, node: str, limit: int) -> list[dict[str, Any]]:
    """The newest verdicts about a node; `ended_at` is the run's end where nothing ended it."""
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
