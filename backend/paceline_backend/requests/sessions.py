"""Sessions: what a node's agent or a run's processes need to take part on the bus."""

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
class Session:
    """Credentials of a node or a run."""

    bus: str = field(repr=False)  # URL, with a user that reaches its own streams only
    key: bytes = field(repr=False)  # for the MACs of what it is told


def keys(store: Store, of: Iterable[str] = ()) -> Keys:
    """Return the keys of runs, and of some nodes.

    Args:
        store: the database.
        of: the nodes.

    Raises:
        StoreError: or one of its kinds.
    """
    with store.read() as connection:
        seeds = nodes.seeds(connection, of)
    return Keys(meta.secret(store), seeds)


def of_node(
    store: Store, bus_url: str, node: str, token: str | None = None, run: str | None = None
) -> Session:
    """Credentials of a node's agent; from now on nobody else speaks for this node.

    Args:
        store: the database.
        bus_url: ``redis://…``, as the control plane uses it.
        node: its name.
        token: id of the caller's token, with which the session ends; None: it cannot end.
        run: the run whose token it is; None: it is no run's.

    Raises:
        InvalidRequestError: no node has a name like this.
        ConflictError: the name is another's, or the bus has no users.
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
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
                f"node {node}: its name is taken (choose another with --node), or its token has "
                "ended"
            )
    # Not read again: the node may be another's by then.
    own = Keys(meta.secret(store), {node: seed})
    return Session(_url(bus_url, users.of_node(own, node)), own.of_node(node))


def end(bus_url: str, names: Collection[str]) -> None:
    """End the bus's users of nodes at once; while the bus is away, a worker does it later.

    Args:
        bus_url: ``redis://…``, as the control plane uses it.
        names: of nodes whose sessions no longer count.
    """
    try:
        with streams.answering(bus_url) as bus:
            users.forget(bus, map(users.name_of_node, names))
    except redis.RedisError as error:
        log.warning("nodes without a session keep their users until the bus answers: %s", error)


def forget(store: Store, bus_url: str, node: str, by: Requester) -> dict[str, Any]:
    """Delete a node that is out of use; return it as it was.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        node: its name.
        by: who asks.

    Raises:
        UnknownNodeError: no such node.
        ConflictError: its agent answers, or a run that has not ended was launched there.
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
    """
    with streams.answering(bus_url) as bus:
        with store.read() as connection:
            _out_of_use(connection, node)
        # First: a bus that goes away later would keep the user of a node that nobody knows. If the
        # node turns out to be in use below, a worker makes its user again.
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
        raise ConflictError(f"node {node} still has a part in run {names}: stop it first")
    return known


def of_run(store: Store, bus_url: str, run: str) -> Session:
    """Credentials of a run that its caller starts; from now on nobody else speaks for this run.

    Args:
        store: the database.
        bus_url: ``redis://…``, as the control plane uses it.
        run: the run's public id.

    Raises:
        UnknownRunError: no such run.
        ConflictError: it has ended, its processes run without a session, or the bus has no users.
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
    """
    known = runs.get(store, run)
    if State(known["state"]).final:
        raise ConflictError(f"run {run} has ended already: {known['state']}")
    with store.write() as connection:  # first: the worker removes users of runs without a session
        if not writers.sign(connection, run):
            raise ConflictError(
                f"run {run} runs already, without credentials of its own: what it reports would no "
                "longer be taken"
            )
    return credentials(store, bus_url, run)


def credentials(store: Store, bus_url: str, run: str) -> Session:
    """Credentials of a run's processes.

    Raises:
        ConflictError: the bus has no users.
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
    """
    own = keys(store)
    return Session(_url(bus_url, users.of_run(own, run)), own.of_run(run))


def _url(bus_url: str, user: User) -> str:
    with streams.answering(bus_url) as bus:
        missing = users.make(bus, [user])
    if missing is None:
        return user.url(bus_url)
    if users.shared():
        return bus_url
    raise ConflictError(
        f"the bus lets the control plane make no users ({missing}), so {user.name} would get the "
        f"bus's own password. Allow the user of --bus {users.RIGHTS}, on Valkey or on Redis 7.0 "
        "or later; or start the server with --share-bus-password"
    )
