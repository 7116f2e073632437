"""Nodes: machines whose agents have registered with the control plane.

`admission` decides which nodes are admitted, `cordons` which are excluded from new runs, and
`run_nodes` which belong to a run on several nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from paceline.wire.states import ACTIVE
from paceline_backend.store.database import now
from paceline_backend.store.nodes import cordons, spares
from paceline_backend.store.nodes.admission import (
    UNHEARD,
    admitted,
    bind,
    expect,
    forget,
    is_name,
    of_token,
    registered,
    seeds,
)
from paceline_backend.store.schema import nodes
from paceline_backend.store.schema import run_nodes as run_nodes_table
from paceline_backend.store.schema import runs as runs_table

__all__ = [
    "NODE_ALIVE_S",
    "admitted",
    "alive",
    "bind",
    "bound",
    "expect",
    "forget",
    "hosts",
    "is_name",
    "known",
    "launched",
    "listed",
    "of_token",
    "registered",
    "seeds",
    "states_of_gpus",
]

# A node that sent no heartbeat for this many seconds (three intervals) is shown as dead and gets no
# new runs.
NODE_ALIVE_S = 7.0


def listed(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return all nodes that ever registered, alive ones first.

    `cordoned` has author, time and reason of a cordon, `in_engine` tells whether the node's engine
    has accepted the cordon, and `spare_of` is the run that the node is held back for, or None. A
    node that serves only one run is listed only while it is alive or cordoned: after the run, an
    operator must still be able to lift the cordon.
    """
    rows, named = _rows(connection), cordons.active(connection).by_node
    shown = [each for each in rows if each["alive"] or not each["only_run"] or each["id"] in named]
    return sorted(shown, key=lambda node: not node["alive"])


def known(connection: sa.Connection, node: str) -> dict[str, Any]:
    """Return one registered node in the form of `listed`, even if that list omits it."""
    return next(each for each in _rows(connection, nodes.c.id == node))


def hosts(connection: sa.Connection, names: Iterable[str]) -> dict[str, str | None]:
    """Return the engine's name of each node's machine, by node; None if it is unknown."""
    names = list(names)
    query = sa.select(nodes.c.id, nodes.c.host).where(nodes.c.id.in_(names))
    return dict.fromkeys(names) | {row.id: row.host for row in connection.execute(query)}


_HIDDEN = ("token", "seed")


def _rows(connection: sa.Connection, *conditions: sa.ColumnElement[bool]) -> list[dict[str, Any]]:
    """Return the nodes that ever registered.

    A node does not count as alive if its heartbeat is more than `NODE_ALIVE_S` in the future: such
    a heartbeat was stored before the database's clock was set back.
    """
    at = now(connection)
    some = (nodes.c.heartbeat_at > UNHEARD, *conditions)
    shown = [column for column in nodes.c if column.name not in _HIDDEN]
    query = sa.select(*shown, sa.not_(admitted()).label("revoked")).where(*some)
    query = query.order_by(nodes.c.id)
    rows = [dict(row) for row in connection.execute(query).mappings()]
    cordoned, held = cordons.active(connection), spares.held(connection)
    of_node = launched(connection)
    for node in rows:
        node |= node.pop("report")
        node["gpu_states"] = node["gpu_states"] or None
        check = dict(node["check"] or {})
        node["checked_at"], node["check"] = check.pop("at", None), check or None
        # Runs that the agent reported with its last heartbeat, and runs launched there since then.
        node["runs"] = sorted({*node["runs"], *of_node.get(node["id"], ())})
        cordon = cordoned.of(node["id"], node.pop("backend"), node["host"])
        node["cordoned"] = cordon and cordon.shown
        node["in_engine"] = cordon and cordon.in_engine
        node["spare_of"] = held.get(node["id"])
        beats = not node.pop("left") and abs(at - node["heartbeat_at"]) <= NODE_ALIVE_S
        node["revoked"] = bool(node["revoked"])
        node["alive"] = beats and not node["revoked"]
    return rows


def launched(connection: sa.Connection) -> dict[str, list[str]]:
    """Return, by node, the runs that were launched there and have not ended."""
    runs, of_several = runs_table.c, run_nodes_table.c
    active = runs.state.in_(ACTIVE)
    alone = sa.select(runs.node, runs.id).where(active, runs.nodes_max == 1)
    several = (
        sa.select(of_several.node, runs.id)
        .join(runs_table, runs.key == of_several.run)
        .where(active, of_several.state.in_(ACTIVE), of_several.lost.is_(False))
    )
    runs_of: dict[str, list[str]] = {}
    for node, run in connection.execute(sa.union_all(alone, several)):
        if node is not None:
            runs_of.setdefault(node, []).append(run)
    return runs_of


def alive(connection: sa.Connection) -> set[str]:
    """Return the names of the nodes with recent heartbeats."""
    c = nodes.c
    beats = sa.select(c.id, c.heartbeat_at).where(c.left.is_(False), admitted())
    at = now(connection)
    return {
        row.id for row in connection.execute(beats) if abs(at - row.heartbeat_at) <= NODE_ALIVE_S
    }


def bound(connection: sa.Connection, run: str) -> set[str]:
    """Return the nodes that serve only this run and have recent heartbeats."""
    query = sa.select(nodes.c.id).where(nodes.c.only_run == run)
    return alive(connection) & set(connection.execute(query).scalars())


def states_of_gpus(connection: sa.Connection, node: str) -> list[dict[str, Any]]:
    """Return the states of a node's GPUs from its last heartbeat; empty if unknown."""
    query = sa.select(nodes.c.report).where(nodes.c.id == node)
    report = connection.execute(query).scalar() or {}
    return list(report.get("gpu_states", ()))
