"""Sessions on the bus: credentials of a node's agent or of a run's processes.

Each session has a user of its own on the bus. `bus_url` is the control plane's own URL of the bus
in all functions.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import redis

from paceline.wire import State, commands, is_node, node_telemetry
from paceline_backend.requests import streams
from paceline_backend.requests.errors import ConflictError, InvalidRequestError
from paceline_backend.server import users
from paceline_backend.server.keys import Keys
from paceline_backend.server.users import User
from paceline_backend.store import Connection, Store, meta, nodes, runs
from paceline_backend.store.audit import Requester, record
from paceline_backend.store.nodes import cordons
from paceline_backend.store.telemetry import writers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionCredentials:
    """Credentials of the session of a node or a run.

    Args:
        bus: URL of the bus, with a user that can access only the streams of the node or run.
        key: key of the MACs with which the control plane signs messages to the node or run.
    """

    bus: str = field(repr=False)
    key: bytes = field(repr=False)


def keys(store: Store, of: Iterable[str] = ()) -> Keys:
    """Return the keys of all runs, and of the nodes named in `of`."""
    with store.read() as connection:
        seeds = nodes.seeds(connection, of)
    return Keys(meta.secret(store), seeds)


def of_node(
    store: Store, bus_url: str, node: str, token: str | None = None, run: str | None = None
) -> SessionCredentials:
    """Create the session of a node's agent. Earlier sessions of this node end.

    `token` is the id of the caller's token; the session ends when this token ends. If `token` is
    None, the session does not end. `run` is the run to which the token belongs, or None if it
    belongs to no run.

    Raises:
        ConflictError: the name is taken, the token is no longer valid, or the bus does not support
            users.
    """
    if not is_node(node):
        raise InvalidRequestError(
            "node",
            "a name has 1 to 200 letters, digits, dots, - and _, and begins with a letter or digit",
        )
    if run is not None and not nodes.is_name(node, run):
        raise ConflictError(f"node {node}: the token of run {run} is for nodes named NAME.{run}")
    with store.write() as connection:
        seed = nodes.expect(connection, node, token, run)
        if seed is None:
            raise ConflictError(
                f"node {node}: its name is taken (choose another with --node), or its token "
                "is no longer valid"
            )
    # Do not read the seed from the database: a later session of this name may have replaced it.
    own = Keys(meta.secret(store), {node: seed})
    return SessionCredentials(_url(bus_url, users.of_node(own, node)), own.of_node(node))


def end(bus_url: str, names: Collection[str]) -> None:
    """Remove the bus users of nodes whose sessions have ended; if the bus is down, log a warning.

    A worker process then removes the users when the bus is back.
    """
    try:
        with streams.answering(bus_url) as bus:
            users.forget(bus, map(users.name_of_node, names))
    except redis.RedisError as error:
        log.warning("bus users of nodes without a session remain until the bus answers: %s", error)


def forget(store: Store, bus_url: str, node: str, by: Requester) -> dict[str, Any]:
    """Delete an unused node, and return its last state.

    Raises:
        UnknownNodeError: no such node.
        ConflictError: the node's agent answers, or a run on the node has not ended.
    """
    with streams.answering(bus_url) as bus:
        with store.read() as connection:
            _out_of_use(connection, node)
        # Remove the user before the node. In the other order, an outage of the bus in between would
        # leave the user of an unknown node. If the node turns out to be in use below, a worker
        # recreates its user.
        users.forget(bus, [users.name_of_node(node)])
        with store.write() as connection:
            known = _out_of_use(connection, node)
            nodes.forget(connection, node)
            record(connection, by, "node.forget", target=node)
        bus.delete(commands(node), node_telemetry(node))
    return known


def _out_of_use(connection: Connection, node: str) -> dict[str, Any]:
    cordons.check(connection, node)
    known = nodes.known(connection, node)
    if known["alive"]:
        raise ConflictError(
            f"the agent of node {node} answers: stop it, or revoke its token first "
            "(`paceline token revoke`)"
        )
    if running := nodes.launched(connection).get(node):
        names = ", ".join(running)
        raise ConflictError(f"node {node} still takes part in run {names}: stop it first")
    return known


def of_run(store: Store, bus_url: str, run: str) -> SessionCredentials:
    """Create the session of a run that the caller starts. Earlier sessions of the run end.

    Raises:
        ConflictError: the run has ended, its processes run without a session, or the bus does not
            support users.
    """
    known = runs.get(store, run)
    if State(known["state"]).final:
        raise ConflictError(f"run {run} has ended already: {known['state']}")
    # Record the session before creating its user on the bus, because the worker process removes
    # users of runs that have no session.
    with store.write() as connection:
        if not writers.sign(connection, run):
            raise ConflictError(
                f"run {run} was started without credentials of its own: with new credentials, its "
                "telemetry would be rejected"
            )
    return credentials(store, bus_url, run)


def credentials(store: Store, bus_url: str, run: str) -> SessionCredentials:
    """Return the credentials of a run's processes, and create their user on the bus.

    Raises:
        ConflictError: the bus does not support users.
    """
    own = keys(store)
    return SessionCredentials(_url(bus_url, users.of_run(own, run)), own.of_run(run))


def _url(bus_url: str, user: User) -> str:
    with streams.answering(bus_url) as bus:
        missing = users.make(bus, [user])
    if missing is None:
        return user.url(bus_url)
    if users.shared():
        return bus_url
    raise ConflictError(
        f"the control plane cannot create users on the bus ({missing}), so {user.name} would get "
        f"the bus's own password. Grant the user of --bus {users.RIGHTS}; this needs Valkey, or "
        "Redis 7.0 or later. Or start the server with --share-bus-password"
    )
