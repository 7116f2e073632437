"""Replacement of a node of a multi-node run by another node.

The new node joins first. The run may then have more nodes than its maximum, so the new node's
launcher waits at the rendezvous while the run continues. Once this launcher has arrived, the old
node leaves (`control.multi_node`). So only one rendezvous is needed, and it includes the new node.

For a run on an engine, Paceline requests one more job from the engine. When a node arrives, it
replaces the old node (`requests.enlisting`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core import logs
from paceline_backend.insight import replacements
from paceline_backend.requests import spares, streams
from paceline_backend.requests.errors import ConflictError, InvalidRequestError
from paceline_backend.requests.joining import (
    cannot_join,
    least_busy,
    refuse_adopted,
    row_of,
    start,
    under_way,
)
from paceline_backend.requests.nodes import cordon_too
from paceline_backend.requests.resume import environment
from paceline_backend.store import Connection, Store, jobs, new_runs, nodes
from paceline_backend.store.audit import CONTROL_PLANE, RequestedChange, record_change, stop_asked
from paceline_backend.store.new_runs import NewRun
from paceline_backend.store.nodes import run_nodes
from paceline_backend.store.nodes.run_nodes import MultiNodeRun, RunNode


@dataclass(frozen=True)
class NodeReplacement:
    """Replacement of a node of a run.

    Args:
        node: old node, which leaves the run.
        other: new node, which joins. If `other` is None, the engine of the run chooses the new
            node. Without an engine, the new node is a spare of the run, or else the least busy
            node.
        cordon: also cordon the old node.
    """

    node: str
    other: str | None = None
    cordon: bool = False


def replace(
    store: Store,
    bus_url: str,
    change: RequestedChange,
    wanted: NodeReplacement,
    env: Mapping[str, str] | None = None,
) -> None:
    """Let another node join a run, after which `wanted.node` leaves it.

    Raises:
        ConflictError: the run is not active on this node, or no other node can join.
        InvalidRequestError: an environment variable has no value.
    """
    logs.hide_environment(env or {})
    run, node = change.run, wanted.node
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            new, _ = new_runs.stored(connection, run)
            group = under_way(connection, run)
            refuse_adopted(new)
            _check(connection, group, row_of(group, node), new)
            new = dataclasses.replace(new, env=environment(connection, run, new, env or {}))
            joins = _joins(connection, new, group, wanted)
            known = replacements.before(connection, group.key, node)
            details = {"node": node, "other": joins, "cordon": wanted.cordon, **known}
            record_change(connection, change, "run.replace", details)
            if wanted.cordon:
                cordon_too(connection, node, change.by)
            if joins is None:
                jobs.add(connection, run, 1, replaces=node)
            else:
                run_nodes.launch(connection, group.key, [joins], group.first_attempt, replaces=node)
        if joins is None:
            streams.tell_change(bus, run)
            return
        start(store, bus_url, bus, group, dataclasses.replace(new, nodes=[joins]))


def withdraw(store: Store, bus_url: str, change: RequestedChange, node: str) -> None:
    """Withdraw the request to an engine for a node that replaces `node`.

    If `node` was cordoned, it stays cordoned.

    Raises:
        ConflictError: no replacement was requested, or it has arrived already.
    """
    run = change.run
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            new_runs.stored(connection, run)
            group = under_way(connection, run)
            other = _replacement_of(group, node)
            if other is not None:
                raise ConflictError(
                    f"{other} has already replaced {node}: let {other} leave the run instead"
                )
            if node not in jobs.awaited(connection, run):
                raise ConflictError(f"no replacement of {node} is pending")
            details = {"node": node}
            record_change(connection, change, "run.withdraw", details)
            jobs.withdraw(connection, run, node)
        streams.tell_change(bus, run)


def stand_in(store: Store, bus_url: str, run: str, lost: str) -> bool:
    """Let a spare of a run join in place of a lost node; return whether a spare joins.

    No spare joins if none answers, if the run was asked to stop, or if the lost node has been
    replaced already.

    Raises:
        ConflictError: the run is not active.
        InvalidRequestError: the run was started with environment variables, whose values are not
            stored.
    """
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            new, _ = new_runs.stored(connection, run)
            group = under_way(connection, run)
            names = spares.of_run(run, nodes.listed(connection))[:1]
            if not names or stop_asked(connection, run):
                return False
            if lost not in {row.node for row in spares.missed(group)}:
                return False
            new = dataclasses.replace(new, env=environment(connection, run, new, {}), nodes=names)
            details = {"nodes": names, "lost": lost}
            record_change(connection, RequestedChange(run, CONTROL_PLANE), "run.join", details)
            run_nodes.launch(connection, group.key, names, group.first_attempt, replaces=lost)
        start(store, bus_url, bus, group, new)
    return True


def _joins(
    connection: Connection, new: NewRun, group: MultiNodeRun, wanted: NodeReplacement
) -> str | None:
    """Return the node that joins, or None if the run's engine chooses it."""
    node, other = wanted.node, wanted.other
    if not new.has_jobs:
        listed = nodes.listed(connection)
        joins = other or _chosen(new, group, listed)
        _check_other(group, joins, listed)
        return joins
    if other is not None:
        raise ConflictError(f"node: {new.backend} chooses the replacement: omit it")
    if node in jobs.replaced(connection, group.id) and _replacement_of(group, node) is None:
        raise ConflictError(f"{new.backend} was already asked for a replacement of {node}")
    return None


def _replacement_of(group: MultiNodeRun, node: str) -> str | None:
    come = (row.node for row in group.nodes if row.replaces == node and not row.ended)
    return next(come, None)


def _check(connection: Connection, group: MultiNodeRun, row: RunNode, new: NewRun) -> None:
    if row.leaving:
        raise ConflictError(f"{row.node} is already leaving run {group.id}")
    other = _replacement_of(group, row.node)
    if other is not None:
        raise ConflictError(f"{other} is already replacing {row.node}")
    if row.node != group.host:
        return
    try:
        environment(connection, group.id, new, {})
    except InvalidRequestError as error:
        raise ConflictError(
            f"{row.node} serves the rendezvous: to replace it, the run must be relaunched, but "
            f"{error.message}"
        ) from error


def _chosen(new: NewRun, group: MultiNodeRun, listed: list[dict[str, Any]]) -> str:
    present = {row.node for row in group.nodes if not row.ended}
    for node in spares.of_run(group.id, listed):
        if node not in present:
            return node
    others = [node for node in listed if node["id"] not in present]
    peers = [node for node in listed if node["id"] in present]
    [chosen] = least_busy(new, 1, others, peers)
    return chosen


def _check_other(group: MultiNodeRun, joins: str, listed: list[dict[str, Any]]) -> None:
    if joins in {row.node for row in group.nodes if not row.ended}:
        raise ConflictError(f"node: run {group.id} already trains on {joins}")
    node = next((node for node in listed if node["id"] == joins), None)
    if node is None or not node["alive"] or not node["signed"]:
        raise ConflictError(
            f"node: no agent with a session answers on {joins}: start `paceline agent` there, "
            "with --server and a token"
        )
    if (reason := cannot_join(node, group.id)) is not None:
        raise ConflictError(f"node: {reason}")
