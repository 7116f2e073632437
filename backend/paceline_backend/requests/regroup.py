"""Restart of a multi-node run after its rendezvous host is lost.

The restart has four steps, one function for each: `begin`, `end_launch`, `regroup`, `launch`. The
database records the progress, as a phase of the run's `Rendezvous`. If a worker process is killed
between two steps, `control.multi_node` continues with the next step when it is called again. If all
nodes of a run have ended, some of them only because the rendezvous was lost, and no restart has
begun, `settle` ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

import redis

from paceline.wire import Kill, State
from paceline.wire.states import Rendezvous, TransitionCause
from paceline_backend import backends
from paceline_backend.requests import spares, streams
from paceline_backend.requests.errors import ConflictError, InvalidRequestError
from paceline_backend.requests.launch import credentials, placed
from paceline_backend.requests.resume import MOST_ATTEMPTS, environment
from paceline_backend.requests.stop import kill
from paceline_backend.store import Connection, Store, StoreError, new_runs, nodes, runs
from paceline_backend.store.audit import CONTROL_PLANE, RequestedChange, record_change, stop_asked
from paceline_backend.store.new_runs import NewRun
from paceline_backend.store.nodes import run_nodes
from paceline_backend.store.nodes.run_nodes import MultiNodeRun
from paceline_backend.store.telemetry import several

log = logging.getLogger(__name__)


class _NoNumbersError(ConflictError):
    """The run has used all attempt numbers."""


def begin(store: Store, group: MultiNodeRun) -> bool:
    """Record that a run's rendezvous was lost. Return whether this was recorded.

    It is not recorded if a stop was requested, or if the run's rendezvous has changed meanwhile.
    """
    with store.write() as connection:
        if stop_asked(connection, group.id):
            return False
        return run_nodes.advance(connection, group, Rendezvous.HOST_LOST, group.host)


def end_launch(
    store: Store, bus: redis.Redis, group: MultiNodeRun, names: Collection[str], why: str
) -> None:
    """Kill the launchers on these nodes: agents cannot relaunch a run that has processes."""
    order = Kill(why, group.first_attempt)
    kill(store, bus, group.id, names, order)


def regroup(store: Store, bus: redis.Redis, group: MultiNodeRun) -> None:
    """Record the next launch, on those nodes of the run that answer; if impossible, end the run.

    Do nothing until all launchers of the previous launch have ended.
    """
    with store.write() as connection:
        known = run_nodes.locked(connection, group)
        if known is None or not all(row.ended for row in known.nodes):
            return
        if stop_asked(connection, group.id):
            _settle(connection, known)
            recorded = False
        else:
            recorded = _recorded(connection, known)
    if recorded:
        log.warning(
            "run %s: the rendezvous host %s was lost, so the run is relaunched",
            group.id,
            group.host,
        )
    else:
        streams.tell_end(bus, group.id)


def launch(store: Store, bus_url: str, bus: redis.Redis, group: MultiNodeRun) -> None:
    """Order the nodes of a recorded launch to start it.

    After an error, repeat the call: agents ignore an order that they get twice.
    """
    try:
        _tell_pending(store, bus_url, bus, group)
    except (redis.RedisError, StoreError):
        raise
    except Exception as error:
        _failed(store, bus, group, error)
        return
    with store.write() as connection:
        noted = run_nodes.advance(connection, group, Rendezvous.WAITING)
    # Either another worker has done this step, or the run was stopped. In the second case, agents
    # got the order to stop before the launch, so repeat the order.
    if not noted:
        _end_if_stopped(store, bus, group)
    streams.tell_change(bus, group.id)


def _tell_pending(store: Store, bus_url: str, bus: redis.Redis, group: MultiNodeRun) -> None:
    names = [row.node for row in group.nodes if row.state == State.PENDING]
    with store.write() as connection:
        new, _ = new_runs.stored(connection, group.id)
        env = environment(connection, group.id, new, {})
    new = replace(new, env=env, nodes=names, first_attempt=group.first_attempt, signed=True)
    made = credentials(store, bus_url, group.id, new)
    backends.get(new.backend).start(bus, group.id, new, made)


def _failed(store: Store, bus: redis.Redis, group: MultiNodeRun, error: Exception) -> None:
    log.error("run %s was not relaunched", group.id, exc_info=error)
    with store.write() as connection:
        why = f"it could not be relaunched: {type(error).__name__}"
        runs.end(connection, group.id, State.FAILED, why)
    streams.tell_end(bus, group.id)


def _end_if_stopped(store: Store, bus: redis.Redis, group: MultiNodeRun) -> None:
    if State(runs.get(store, group.id)["state"]).final:
        order = Kill("stopped before it started", group.first_attempt)
        names = [row.node for row in group.nodes]
        kill(store, bus, group.id, names, order)


def settle(store: Store, bus: redis.Redis, group: MultiNodeRun) -> None:
    """End a run whose nodes have all ended, some of them only because the rendezvous was lost."""
    with store.write() as connection:
        known = run_nodes.locked(connection, group)
        if known is None or not undecided(known):
            return
        _settle(connection, known)
    streams.tell_end(bus, group.id)


def undecided(group: MultiNodeRun) -> bool:
    """Return True if all launchers have ended, but ingest cannot tell how the run has ended."""
    return all(row.ended for row in group.nodes) and several.outcome(group.nodes) is None


def _settle(connection: Connection, group: MultiNodeRun) -> None:
    if stop_asked(connection, group.id):
        runs.end(connection, group.id, State.STOPPED, "stopped")
        return
    failed = [row for row in group.nodes if row.state == State.FAILED]
    own = [row for row in failed if not row.orphaned and not row.lost]
    own = [row for row in own if not row.followed] or own
    end = several.ended(own or failed, group.nodes)
    runs.end(connection, group.id, State.FAILED, end.message or "its rendezvous was lost")


def _first_attempt(group: MultiNodeRun, new: NewRun) -> int:
    """Return the first attempt number of the next launch.

    A node that counts as lost may still train, without a connection. So the attempt numbers that
    the node may reach are not reused.
    """
    first = new.first_attempt
    if any(row.lost for row in group.nodes):
        before = runs.last_attempt(group.first_attempt, new.max_restarts, new.nodes_max)
        first = max(first, before + 1)
    if runs.last_attempt(first, new.max_restarts, new.nodes_max) >= MOST_ATTEMPTS:
        raise _NoNumbersError(f"a run has at most {MOST_ATTEMPTS:,} attempts: start another run")
    return first


def _recorded(connection: Connection, group: MultiNodeRun) -> bool:
    new, _ = new_runs.stored(connection, group.id)
    listed = spares.stand_ins(group, nodes.listed(connection))
    try:
        new = replace(new, env=environment(connection, group.id, new, {}))
        new = replace(new, first_attempt=_first_attempt(group, new))
        new = placed(backends.get(new.backend), replace(new, spares=0, join_check=0), listed)
    except (ConflictError, InvalidRequestError) as error:
        why = f"rendezvous host {group.host} was lost: {error}"
        if not isinstance(error, _NoNumbersError):
            why += f"; continue with `paceline resume {group.id}`"
        runs.end(connection, group.id, State.FAILED, why)
        return False
    details = {"left": group.host, "nodes": list(new.nodes), "first_attempt": new.first_attempt}
    record_change(connection, RequestedChange(group.id, CONTROL_PLANE), "run.regroup", details)
    new_runs.resume(connection, group.id, new, TransitionCause.RELAUNCH)
    return True
