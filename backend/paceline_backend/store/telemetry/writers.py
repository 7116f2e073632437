"""Who may report on the bus: nodes and runs that have a session, and whose a run is."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.wire import ENDED, State
from paceline_backend.store.nodes import admitted, run_nodes
from paceline_backend.store.schema import nodes, runs, tokens

KEPT_S = 3_600.0  # a run that is over keeps its streams and its user for so long
_LOST_S = 30 * 86_400.0  # a run that is only assumed to be over: it may still train, cut off


@dataclass(frozen=True)
class Owner:
    """Whose a run is."""

    nodes: tuple[str, ...]  # that may report about it
    signed: bool  # it has a user of the bus of its own


def signed_nodes(connection: sa.Connection) -> list[str]:
    """Return the nodes whose sessions count.

    The token of a run ends when its engine has no jobs of it any more. What its nodes reported
    until then is read all the same.
    """
    only = nodes.c.only_run
    of_run = only.in_(_lately_signed())
    over = only.in_(sa.select(runs.c.id).where(runs.c.state.in_(ENDED)))
    counts = admitted() & (only.is_(None) | of_run)
    query = sa.select(nodes.c.id).where(nodes.c.signed, counts | (of_run & over))
    return list(connection.execute(query).scalars())


def signed_runs(connection: sa.Connection) -> list[str]:
    """The runs that have a session and are not over, or ended only lately."""
    return list(connection.execute(_lately_signed()).scalars())


def adopted_over(connection: sa.Connection) -> list[str]:
    """The runs without an engine whose nodes still have a token, and have nothing more to tell."""
    used = sa.select(tokens.c.run).where(tokens.c.run.is_not(None), tokens.c.revoked_at.is_(None))
    own = (runs.c.id.in_(used), runs.c.backend_jobs.is_(None))
    query = sa.select(runs.c.id).where(*own, runs.c.id.not_in(_lately_signed()))
    return list(connection.execute(query).scalars())


def _lately_signed() -> sa.Select[Any]:
    seen_at = sa.func.coalesce(runs.c.seen_at, runs.c.created_at)
    kept_s = sa.case((runs.c.lost, _LOST_S), else_=KEPT_S)
    lately = seen_at > time.time() - kept_s
    return sa.select(runs.c.id).where(runs.c.signed, runs.c.state.not_in(ENDED) | lately)


def owners(connection: sa.Connection, of: Collection[str]) -> dict[str, Owner]:
    """The owners of those of some runs that the store has."""
    c = runs.c
    query = sa.select(c.key, c.id, c.node, c.signed, c.nodes_max).where(c.id.in_(of))
    rows = connection.execute(query).all()
    nodes_of = run_nodes.reporting(connection, rows)
    return {row.id: Owner(nodes_of[row.key], row.signed) for row in rows}


def sign(connection: sa.Connection, run: str) -> bool:
    """Notes that a run has a session; False if it has begun without."""
    may = runs.c.signed | (runs.c.state == State.PENDING)
    update = sa.update(runs).where(runs.c.id == run, may)
    return connection.execute(update.values(signed=True)).rowcount > 0
