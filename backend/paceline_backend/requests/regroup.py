"""Launches a run on several nodes anew whose host went away: the others cannot meet without it.

Each function is a step. What a step has done stands in the database, and a worker that is killed in
between leaves the next step to another look (`control.meetings`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

import redis

from paceline.wire import Kill, State
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
from paceline_backend.store.nodes.run_nodes import ANEW, GONE, MultiNodeRun
from paceline_backend.store.telemetry import several

log = logging.getLogger(__name__)


class _NoNumbersError(ConflictError):
    """The run has had as many attempts as a run may have."""


def begin(store: Store, group: MultiNodeRun) -> bool:
    """Notes that a run's rendezvous went away; False if it shall not be launched anew.

    Raises:
        StoreError: or one of its kinds.
    """
    with store.write() as connection:
        if stop_asked(connection, group.id):
            return False
        return run_nodes.set_rendezvous(connection, group, GONE, group.host)


def end_launch(
    store: Store, bus: redis.Redis, group: MultiNodeRun, names: Collection[str], why: str
) -> None:
    """Ends the launchers of some nodes: an agent launches no run of which processes go on.

    Raises:
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
    """
    order = Kill(why, group.first_attempt)
    kill(store, bus, group.id, names, order)


def regroup(store: Store, bus: redis.Redis, group: MultiNodeRun) -> None:
    """Records that a run is launched on those of its nodes that answer; or ends it.

    Nothing happens unless all launchers of the launch before have ended. `launch` is the next step.

    Raises:
        StoreError: or one of its kinds.
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
        log.warning("run %s: %s went away; launched anew", group.id, group.host)
    else:
        streams.tell_end(bus, group.id)


def launch(store: Store, bus_url: str, bus: redis.Redis, group: MultiNodeRun) -> None:
    """Tells the nodes of a recorded launch to start it. It may be repeated until it is noted.

    An agent ignores what it is told twice.

    Raises:
        redis.RedisError: the bus is away: repeat it.
        StoreError: or one of its kinds: repeat it.
    """
    try:
        _tell_pending(store, bus_url, bus, group)
    except (redis.RedisError, StoreError):
        raise
    except Exception as error:
        _failed(store, bus, group, error)
        return
    with store.write() as connection:
        noted = run_nodes.set_rendezvous(connection, group, None, None)
    if not noted:  # somebody has stopped it, and that order came first; or another worker noted it
        _end_if_stopped(store, bus, group)
    streams.tell_change(bus, group.id)


def _tell_pending(store: Store, bus_url: str, bus: redis.Redis, group: MultiNodeRun) -> None:
    """Tells those nodes that have not said anything yet."""
    names = [row.node for row in group.nodes if row.state == State.PENDING]
    with store.write() as connection:
        new, _ = new_runs.stored(connection, group.id)
        env = environment(connection, group.id, new, {})
    new = replace(new, env=env, nodes=names, first_attempt=group.first_attempt, signed=True)
    made = credentials(store, bus_url, group.id, new)
    backends.get(new.backend).start(bus, group.id, new, made)


def _failed(store: Store, bus: redis.Redis, group: MultiNodeRun, error: Exception) -> None:
    log.error("run %s was not launched anew", group.id, exc_info=error)
    with store.write() as connection:
        why = f"it could not be launched anew: {type(error).__name__}"
        runs.end(connection, group.id, State.FAILED, why)
    streams.tell_end(bus, group.id)


def _end_if_stopped(store: Store, bus: redis.Redis, group: MultiNodeRun) -> None:
    if State(runs.get(store, group.id)["state"]).final:
        order = Kill("stopped before it started", group.first_attempt)
        names = [row.node for row in group.nodes]
        kill(store, bus, group.id, names, order)


def settle(store: Store, bus: redis.Redis, group: MultiNodeRun) -> None:
    """Ends a run whose nodes have all ended, some only because the rendezvous went away.

    Raises:
        StoreError: or one of its kinds.
    """
    with store.write() as connection:
        known = run_nodes.locked(connection, group)
        if known is None or not undecided(known):
            return
        _settle(connection, known)
    streams.tell_end(bus, group.id)


def undecided(group: MultiNodeRun) -> bool:
    """Whether all launchers have ended, and ingest does not know what that means for the run."""
    return all(row.ended for row in group.nodes) and several.outcome(group.nodes) is None


def _settle(connection: Connection, group: MultiNodeRun) -> None:
    if stop_asked(connection, group.id):
        runs.end(connection, group.id, State.STOPPED, "stopped")
        return
    failed = [row for row in group.nodes if row.state == State.FAILED]
    own = [row for row in failed if not row.orphaned and not row.lost]
    own = [row for row in own if not row.followed] or own
    end = several.ended(own or failed, group.nodes)
    runs.end(connection, group.id, State.FAILED, end.message or "its rendezvous went away")


def _first_attempt(group: MultiNodeRun, new: NewRun) -> int:
    """The first attempt of the next launch.

    A lost node may only be cut off, and still train: then the numbers of its attempts are left to
    it, as `resume` leaves them to a lost run.

    Raises:
        _NoNumbersError: none are left.
    """
    first = new.first_attempt
    if any(row.lost for row in group.nodes):
        before = runs.last_attempt(group.first_attempt, new.max_restarts, new.nodes_max)
        first = max(first, before + 1)
    if runs.last_attempt(first, new.max_restarts, new.nodes_max) >= MOST_ATTEMPTS:
        raise _NoNumbersError(f"no run has more than {MOST_ATTEMPTS:,} attempts: start another run")
    return first


def _recorded(connection: Connection, group: MultiNodeRun) -> bool:
    """Records the next launch; False: the run has failed, with the reason."""
    new, _ = new_runs.stored(connection, group.id)
    listed = spares.stand_ins(group, nodes.listed(connection))
    try:
        new = replace(new, env=environment(connection, group.id, new, {}))
        new = replace(new, first_attempt=_first_attempt(group, new))
        new = placed(backends.get(new.backend), replace(new, spares=0, join_check=0), listed)
    except (ConflictError, InvalidRequestError) as error:
        why = f"{group.host}, where its nodes met, went away: {error}"
        if not isinstance(error, _NoNumbersError):
            why += f"; `paceline resume {group.id}` goes on"
        runs.end(connection, group.id, State.FAILED, why)
        return False
    details = {"left": group.host, "nodes": list(new.nodes), "first_attempt": new.first_attempt}
    record_change(connection, RequestedChange(group.id, CONTROL_PLANE), "run.regroup", details)
    new_runs.resume(connection, group.id, new, ANEW)
    return True
