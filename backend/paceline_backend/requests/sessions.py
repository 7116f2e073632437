"""Sessions: what a node's agent or a run's processes need to take part on the bus."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.wire import State, is_node
from paceline_backend.requests import streams
from paceline_backend.requests.errors import ConflictError, InvalidRequestError
from paceline_backend.server import users
from paceline_backend.server.keys import Keys
from paceline_backend.server.users import User
from paceline_backend.store import Store, meta, nodes, runs
from paceline_backend.store.telemetry import writers


@dataclass(frozen=True)
class Session:
    """Credentials of a node or a run."""

    bus: str = field(repr=False)  # URL, with a user that reaches its own streams only
    key: bytes = field(repr=False)  # for the MACs of what it is told


def of_node(store: Store, bus_url: str, node: str, only_run: str | None = None) -> Session:
    """Credentials of a node's agent; from now on nobody else speaks for this node.

    Args:
        store: the database.
        bus_url: ``redis://…``, as the control plane uses it.
        node: its name.
        only_run: the only run whose nodes the caller may speak for; None: any.

    Raises:
        InvalidRequestError: no node has a name like this.
        ConflictError: the caller may speak for nodes of a run, and this is another's; or the bus
            has no users.
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
    """
    if not is_node(node):
        raise InvalidRequestError(
            "node",
            "a name has 1 to 200 letters, digits, dots, - and _, and begins with a letter or digit",
        )
    keys = Keys(meta.secret(store))
    url = _url(bus_url, users.of_node(keys, node))
    with store.write() as connection:
        if not nodes.expect(connection, node, only_run):
            raise ConflictError(f"node {node}: its name is taken; choose another with --slot")
    return Session(url, keys.of_node(node))


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
    keys = Keys(meta.secret(store))
    return Session(_url(bus_url, users.of_run(keys, run)), keys.of_run(run))


def _url(bus_url: str, user: User) -> str:
    with streams.answering(bus_url) as bus:
        missing = users.make(bus, [user])
    if missing is None:
        return user.url(bus_url)
    if users.shared():
        return bus_url
    raise ConflictError(
        f"the bus lets the control plane make no users ({missing}), so {user.name} would get the "
        "bus's own password. Allow the user of --bus ACL SETUSER, ACL USERS and ACL DELUSER, on "
        "Valkey or on Redis 7.0 or later; or start the server with --share-bus-password"
    )
