"""Replaces a node of a run on several nodes by another.

The other node joins first. The launcher of a node that is one more than the run may have waits
where all meet, and the run trains on meanwhile. When it is there, the first node leaves, and so all
meet once, with the other one (`control.nodes`).

An engine gives the other node when it has one: another job is asked for, and the node that it
brings takes the first one's place when it comes (`requests.enlisting`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core import logs
from paceline_backend.insight import replacements
from paceline_backend.requests import spares, streams
from paceline_backend.requests.cordons import cordon_too
from paceline_backend.requests.errors import ConflictError, InvalidRequestError
from paceline_backend.requests.joining import (
    cannot_join,
    least_busy,
    refuse_adopted,
    row_of,
    start,
    under_way,
)
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
        node: that leaves.
        other: that joins; None: a spare of the run, or else the least busy one, or the one that
            the run's engine gives.
        cordon: whether to cordon the node that leaves.
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
    """Lets another node join a run, and then a node of it leave.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        change: the run, and who asks.
        wanted: the nodes that leave and join.
        env: values of the variables that the run was started with, which nobody stored.

    Raises:
        UnknownRunError: no such run.
        RevisionError: somebody else has changed the run.
        ConflictError: the run is not under way on this node, or no other can join.
        InvalidRequestError: a variable has no value.
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
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
    """Takes back that an engine was asked for another node in place of one; a cordon stays.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        change: the run, and who asks.
        node: that stays.

    Raises:
        UnknownRunError: no such run.
        RevisionError: somebody else has changed the run.
        ConflictError: nothing was asked for, or the other node is there.
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
    """
    run = change.run
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            new_runs.stored(connection, run)
            group = under_way(connection, run)
            other = _come(group, node)
            if other is not None:
                raise ConflictError(
                    f"{other} has come in place of {node}: let {other} leave the run instead"
                )
            if node not in jobs.awaited(connection, run):
                raise ConflictError(f"nobody waits for another node in place of {node}")
            details = {"node": node}
            record_change(connection, change, "run.withdraw", details)
            jobs.withdraw(connection, run, node)
        streams.tell_change(bus, run)


def stand_in(store: Store, bus_url: str, run: str, lost: str) -> bool:
    """Lets a spare of a run join in place of a node that went away; False: nothing to be done.

    Raises:
        UnknownRunError: no such run.
        ConflictError: the run is not under way.
        InvalidRequestError: a variable has no value, as nobody stored it.
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
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
    """The node that joins in place of another; None: the run's engine is asked for it."""
    node, other = wanted.node, wanted.other
    if not new.has_jobs:
        listed = nodes.listed(connection)
        joins = other or _chosen(new, group, listed)
        _check_other(group, joins, listed)
        return joins
    if other is not None:
        raise ConflictError(f"node: {new.backend} chooses the other node: leave it out")
    if node in jobs.replaced(connection, group.id) and _come(group, node) is None:
        raise ConflictError(f"{new.backend} was asked for another node in place of {node} already")
    return None


def _come(group: MultiNodeRun, node: str) -> str | None:
    """The node that has come in place of another, and is there."""
    come = (row.node for row in group.nodes if row.replaces == node and not row.ended)
    return next(come, None)


def _check(connection: Connection, group: MultiNodeRun, row: RunNode, new: NewRun) -> None:
    """Refuses to replace a node that leaves anyway, or without which nothing would go on."""
    if row.leaving:
        raise ConflictError(f"{row.node} leaves run {group.id} already")
    other = _come(group, row.node)
    if other is not None:
        raise ConflictError(f"{other} replaces {row.node} already")
    if row.node != group.host:
        return
    try:
        environment(connection, group.id, new, {})
    except InvalidRequestError as error:
        raise ConflictError(
            f"{row.node} serves the rendezvous: without it the run would be launched anew, for "
            f"which {error.message}"
        ) from error


def _chosen(new: NewRun, group: MultiNodeRun, listed: list[dict[str, Any]]) -> str:
    """A spare of the run, or else the least busy node that can take part."""
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
        raise ConflictError(f"node: run {group.id} trains on {joins} already")
    node = next((node for node in listed if node["id"] == joins), None)
    if node is None or not node["alive"] or not node["signed"]:
        raise ConflictError(f"node: {joins} has no agent with a session that answers")
    if (reason := cannot_join(node, group.id)) is not None:
        raise ConflictError(f"node: {reason}")
