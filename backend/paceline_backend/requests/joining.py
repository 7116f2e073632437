"""Scale events of an active multi-node run: nodes join it, and a node leaves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import redis

from paceline.core import logs
from paceline.wire import COMMANDS_LENGTH, Kill, commands
from paceline.wire.bus import publish
from paceline_backend import backends
from paceline_backend.backends.checks import fast_enough
from paceline_backend.backends.local import taken
from paceline_backend.requests import sessions, streams
from paceline_backend.requests.errors import ConflictError
from paceline_backend.requests.launch import credentials, placed
from paceline_backend.requests.nodes import cordon_too
from paceline_backend.requests.resume import environment
from paceline_backend.store import (
    Connection,
    Store,
    jobs,
    new_runs,
    nodes,
    runs,
    telemetry,
)
from paceline_backend.store.audit import RequestedChange, record_change
from paceline_backend.store.new_runs import NewRun
from paceline_backend.store.nodes import run_nodes
from paceline_backend.store.nodes.run_nodes import MultiNodeRun, RunNode


def join(
    store: Store,
    bus_url: str,
    change: RequestedChange,
    wanted: int | Sequence[str],
    env: Mapping[str, str],
) -> None:
    """Launch a run on more nodes, which join at the launchers' next rendezvous.

    `wanted` is the number of nodes, or their names.

    Raises:
        ConflictError: the run is not active on several nodes, or the requested nodes cannot join.
        InvalidRequestError: an environment variable has no value.
    """
    logs.hide_environment(env)
    run = change.run
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            new, _ = new_runs.stored(connection, run)
            group = under_way(connection, run)
            refuse_adopted(new)
            if new.has_jobs:
                _ask_engine(connection, new, group, wanted, change)
                return
            new = replace(new, env=environment(connection, run, new, env))
            names = _chosen(new, group, wanted, nodes.listed(connection))
            details = {"nodes": names}
            record_change(connection, change, "run.join", details)
            run_nodes.launch(connection, group.key, names, group.first_attempt)
        start(store, bus_url, bus, group, replace(new, nodes=names))


def start(store: Store, bus_url: str, bus: redis.Redis, group: MultiNodeRun, new: NewRun) -> None:
    """Launch a run on additional nodes that are recorded already.

    `new` is the run with only the additional nodes, and with values of all environment variables.
    If the launch fails, the nodes are recorded as lost.
    """
    run, new = group.id, replace(new, first_attempt=group.first_attempt, signed=True)
    try:
        made = credentials(store, bus_url, run, new)
        backends.get(new.backend).start(bus, run, new, made)
    except Exception:
        with store.write() as connection:
            for node in new.nodes:
                telemetry.lose(connection, run, node, "it could not be launched")
        raise
    streams.tell_change(bus, run)


def leave(
    store: Store,
    bus_url: str,
    change: RequestedChange,
    node: str,
    *,
    cordon: bool = False,
) -> None:
    """Kill a run's processes on one of its nodes, and let the other nodes continue without it.

    After a `redis.RedisError` the caller may retry.

    Raises:
        ConflictError: the run is not active on this node, or too few nodes would be left.
    """
    run = change.run
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            new_runs.stored(connection, run)
            group = under_way(connection, run)
            leaver = row_of(group, node)
            staying = [row for row in group.nodes if not row.ended and not row.leaving]
            staying = [row for row in staying if row.node != node]
            if len(staying) < group.nodes_min:
                raise ConflictError(
                    f"run {run} needs {group.nodes_min} nodes, and without {node} it would have "
                    f"{len(staying)}: stop it, or let another node join first"
                )
            details = {"node": node, "cordon": cordon}
            record_change(connection, change, "run.leave", details)
            run_nodes.change(connection, leaver, {"leaving": True})
            if cordon:
                cordon_too(connection, node, change.by)
        order_to_leave(store, bus, group, node)
        streams.tell_change(bus, run)


def order_to_leave(store: Store, bus: redis.Redis, group: MultiNodeRun, node: str) -> None:
    """Order a node's agent to kill the processes of a run on the node. Idempotent."""
    order = Kill("it was asked to leave the run", group.first_attempt, leaves=True)
    key = sessions.keys(store, [node]).of_node(node)
    publish(bus, commands(node), order, group.id, maxlen=COMMANDS_LENGTH, key=key)


def row_of(group: MultiNodeRun, node: str) -> RunNode:
    """Return the row of a node, or raise `ConflictError` if the run is not active on the node."""
    active = {row.node: row for row in group.nodes if not row.ended}
    if node not in active:
        names = ", ".join(active) or "none"
        raise ConflictError(f"run {group.id} does not train on {node}; its nodes are: {names}")
    return active[node]


def under_way(connection: Connection, run: str) -> MultiNodeRun:
    """Return a run that was launched on several nodes and has not ended.

    Raises:
        ConflictError: the run has ended, was not launched on several nodes, or is being relaunched.
    """
    group = run_nodes.group(connection, run)
    if group is None or not group.nodes:
        runs.key_of(connection, run)
        raise ConflictError(f"run {run} has ended, or was not launched on several nodes")
    if group.rendezvous.restarts:
        raise ConflictError(
            f"run {run} is being relaunched, because its rendezvous host was lost: try again"
        )
    return group


def refuse_adopted(new: NewRun) -> None:
    """Raise `ConflictError` if the run is adopted: its user starts its nodes, not Paceline."""
    if new.backend == backends.AdoptedBackend.name:
        raise ConflictError(
            "this run's user starts its nodes: add one with `paceline node` and the run's key, "
            "while it has fewer nodes than its `nodes_max`"
        )


def _ask_engine(
    connection: Connection,
    new: NewRun,
    group: MultiNodeRun,
    wanted: int | Sequence[str],
    change: RequestedChange,
) -> None:
    if not isinstance(wanted, int):
        raise ConflictError(f"nodes: give a number: {new.backend} chooses the nodes")
    present = sum(not row.ended for row in group.nodes)
    _refuse_more(new, group, present, wanted, expected=jobs.expected(connection, group.id))
    details = {"nodes": wanted}
    record_change(connection, change, "run.join", details)
    jobs.add(connection, group.id, wanted)


def _refuse_more(
    new: NewRun, group: MultiNodeRun, present: int, count: int, *, expected: int = 0
) -> None:
    if present + expected + count > new.nodes_max:
        waits = f" and waits for {expected} more" if expected else ""
        raise ConflictError(
            f"nodes: run {group.id} has {present} nodes{waits}, and may have at most "
            f"{new.nodes_max}"
        )


def _chosen(
    new: NewRun,
    group: MultiNodeRun,
    wanted: int | Sequence[str],
    listed: Sequence[Mapping[str, Any]],
) -> list[str]:
    present = {row.node for row in group.nodes if not row.ended}
    _refuse_more(new, group, len(present), wanted if isinstance(wanted, int) else len(set(wanted)))
    others = [node for node in listed if node["id"] not in present]
    if isinstance(wanted, int):
        return least_busy(new, wanted, others, [n for n in listed if n["id"] in present])
    able = [node for node in others if node["signed"] and node["alive"]]
    names = {node["id"] for node in able if cannot_join(node, group.id) is None}
    if missing := sorted(set(wanted) - names):
        can = ", ".join(sorted(names)) or "none"
        reasons = [cannot_join(node, group.id) for node in able if node["id"] in missing]
        why = "".join(f"; {reason}" for reason in reasons if reason)
        raise ConflictError(f"nodes: {', '.join(missing)} cannot join; those that can: {can}{why}")
    return sorted(set(wanted))


def least_busy(
    new: NewRun,
    count: int,
    listed: Sequence[Mapping[str, Any]],
    peers: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Return the `count` least busy nodes that can join a run and are not much slower than `peers`.

    `listed` has the candidates, and `peers` the current nodes of the run.

    Raises:
        ConflictError: there are fewer than `count` such nodes.
    """
    answering = [node for node in listed if node["signed"] and node["alive"]]
    able, reasons = fast_enough(answering, peers, new.join_check)
    some = replace(new, node=None, nodes=(), nodes_min=count, nodes_max=count, spares=0)
    try:
        chosen = placed(backends.get(new.backend), replace(some, join_check=0), [*map(dict, able)])
    except ConflictError as error:
        if not reasons:
            raise
        raise ConflictError(
            f"{error}; {'; '.join(reasons)}; to use a node in spite of this, name it in the request"
        ) from error
    return chosen.where


def cannot_join(node: Mapping[str, Any], run: str) -> str | None:
    """Return the reason why a node cannot join a run (cordoned, spare of another run), or None."""
    return taken({**node, "spare_of": None} if node["spare_of"] == run else node)
