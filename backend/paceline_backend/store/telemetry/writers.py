"""Decide which nodes and runs may send messages on the bus, and which nodes report on which run."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.wire import ENDED, State
from paceline.wire.states import ACTIVE
from paceline_backend.store.nodes import admitted, run_nodes
from paceline_backend.store.schema import nodes, runs, tokens

# An ended run keeps its streams and its user on the bus for this many seconds.
WRITERS_KEPT_S = 3_600.0
# A run whose end was only assumed keeps its streams and its user for this many seconds, because it
# may still train without a connection and send its messages later.
_LOST_KEPT_S = 30 * 86_400.0


@dataclass(frozen=True)
class PermittedWriters:
    """The nodes that may report about a run, and whether the run has its own user on the bus."""

    nodes: tuple[str, ...]
    signed: bool


def signed_nodes(connection: sa.Connection) -> list[str]:
    """Return the nodes whose sessions are valid.

    Nodes of runs that ended recently are included even if the run's token is revoked. The token is
    revoked when the engine has no more jobs of the run, and ingest may not have read the nodes'
    last reports by then.
    """
    only = nodes.c.only_run
    of_run = only.in_(_lately_signed())
    over = only.in_(sa.select(runs.c.id).where(runs.c.state.in_(ENDED)))
    counts = admitted() & (only.is_(None) | of_run)
    query = sa.select(nodes.c.id).where(nodes.c.signed, counts | (of_run & over))
    return list(connection.execute(query).scalars())


def signed_runs(connection: sa.Connection) -> list[str]:
    """Return the runs that have a session and are active or ended recently."""
    return list(connection.execute(_lately_signed()).scalars())


def unrevoked_runs(connection: sa.Connection) -> list[str]:
    """Return runs without an engine that ended some time ago and whose token is not revoked."""
    used = sa.select(tokens.c.run).where(tokens.c.run.is_not(None), tokens.c.revoked_at.is_(None))
    own = (runs.c.id.in_(used), runs.c.backend_jobs.is_(None))
    query = sa.select(runs.c.id).where(*own, runs.c.id.not_in(_lately_signed()))
    return list(connection.execute(query).scalars())


def _lately_signed() -> sa.Select[Any]:
    seen_at = sa.func.coalesce(runs.c.seen_at, runs.c.created_at)
    kept_s = sa.case((runs.c.lost, _LOST_KEPT_S), else_=WRITERS_KEPT_S)
    lately = seen_at > time.time() - kept_s
    return sa.select(runs.c.id).where(runs.c.signed, runs.c.state.in_(ACTIVE) | lately)


def permitted_writers(
    connection: sa.Connection, of: Collection[str]
) -> dict[str, PermittedWriters]:
    """Return the `PermittedWriters` of each run, by public id; unknown runs are left out."""
    c = runs.c
    query = sa.select(c.key, c.id, c.node, c.signed, c.nodes_max).where(c.id.in_(of))
    rows = connection.execute(query).all()
    nodes_of = run_nodes.reporting(connection, rows)
    return {row.id: PermittedWriters(nodes_of[row.key], row.signed) for row in rows}


def sign(connection: sa.Connection, run: str) -> bool:
    """Record that a run gets a session; return False if the run has started without one."""
    may = runs.c.signed | (runs.c.state == State.PENDING)
    update = sa.update(runs).where(runs.c.id == run, may)
    return connection.execute(update.values(signed=True)).rowcount > 0
