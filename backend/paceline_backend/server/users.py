"""Users of the bus: each node and each run reaches its own streams only.

They are the bus's access control list (ACL). A bus forgets them when it restarts, so the worker
makes missing users again. Where the bus does not let the control plane make users, nodes and runs
get no credentials, unless the server was started with ``--share-bus-password``: then they get the
URL of the control plane itself.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from paceline.wire import answers, commands, control, node_telemetry, run_telemetry
from paceline.wire.bus import as_user
from paceline_backend.server import floods
from paceline_backend.server.keys import Keys

log = logging.getLogger(__name__)

_NODE, _RUN = "paceline-node-", "paceline-run-"
# All that agents, ranks and simulations send; XLEN says only how long a stream is.
_COMMANDS = ("xadd", "xread", "xrevrange", "xlen", "ping", "hello", "auth")
_CONNECTING = ("client|setname",)
_SET_INFO = "client|setinfo"  # sent by clients that connect; Redis 7.0 does not have it

RIGHTS = "ACL SETUSER, ACL GETUSER, ACL USERS, ACL DELUSER and CLIENT KILL"  # that `make` needs
SHARE = "PACELINE_SHARE_BUS_PASSWORD"  # "1": nodes and runs may get the control plane's own URL


@dataclass(frozen=True)
class User:
    """A user of the bus, with streams that it writes and a stream that it reads."""

    name: str
    password: str = field(repr=False)
    writes: tuple[str, ...]  # patterns
    reads: str

    @property
    def digest(self) -> str:
        """Of the password, as the bus keeps it."""
        return hashlib.sha256(self.password.encode()).hexdigest()

    def url(self, bus_url: str) -> str:
        """The URL of this bus for this user."""
        return as_user(bus_url, self.name, self.password)

    def rules(self, database: int = 0, *, off: bool = False, info: bool = True) -> list[str]:
        """The arguments of ``ACL SETUSER``, which has nothing of an earlier definition left.

        Args:
            database: of the bus. Clients select it if it is not 0. Otherwise they select none:
                nobody looks for floods in the others.
            off: it may not log in.
            info: the bus has the command CLIENT SETINFO.
        """
        selecting = ("select",) if database else ()
        describing = (_SET_INFO,) if info else ()
        commands = (*_COMMANDS, *_CONNECTING, *describing, *selecting)
        allowed = [f"+{command}" for command in commands]
        streams = [*(f"%W~{pattern}" for pattern in self.writes), f"%R~{self.reads}"]
        state = "off" if off else "on"
        return [self.name, "reset", state, f"#{self.digest}", "-@all", *allowed, *streams]


def name_of_node(node: str) -> str:
    """Return the name of a node's user."""
    return f"{_NODE}{node}"


def of_node(keys: Keys, node: str) -> User:
    """The user of a node's agent."""
    password = keys.node_password(node)
    writes = (node_telemetry(node), answers(node, "*"))
    return User(name_of_node(node), password, writes, commands(node))


def name_of_run(run: str) -> str:
    """Return the name of a run's user."""
    return f"{_RUN}{run}"


def of_run(keys: Keys, run: str) -> User:
    """The user of a run's ranks."""
    password = keys.run_password(run)
    return User(name_of_run(run), password, (run_telemetry(run),), control(run))


def shared() -> bool:
    """Return whether nodes and runs may get the URL of the control plane where it has no users."""
    return os.environ.get(SHARE) == "1"


def make(client: redis.Redis, users: Iterable[User]) -> str | None:
    """Makes users, or makes them what they should be. Who was switched off stays so.

    A user whose password changes loses its connections: whoever has the old one is out.

    Returns:
        None; or why this bus has no such users.

    Raises:
        redis.RedisError: the bus is away.
    """
    wanted = {user.name: user for user in users}
    pending, off = list(wanted.values()), _off(client)
    while pending:
        reason = _make(client, pending, off)
        if reason is not None:
            return reason
        now_off = _off(client)
        changed = off ^ now_off  # meanwhile, and we may have undone it
        pending, off = [wanted[name] for name in sorted(changed & wanted.keys())], now_off
    return None


def _with_other_passwords(client: redis.Redis, users: Sequence[User]) -> set[str]:
    """Return those of some users that the bus knows by another password."""
    pipeline = client.pipeline(transaction=False)
    for user in users:
        pipeline.acl_getuser(user.name)
    known = zip(users, pipeline.execute(), strict=True)
    return {user.name for user, row in known if row and user.digest not in row["passwords"]}


def _off(client: redis.Redis) -> set[str]:
    names: Any = client.hkeys(floods.OFF)
    return {name.decode() for name in names}


def _make(
    client: redis.Redis, users: Sequence[User], off: set[str], *, info: bool = True
) -> str | None:
    # In one transaction: a bus that refuses one command, or goes away, has done none of them.
    pipeline: Any = client.pipeline(transaction=True)
    database = int(client.get_connection_kwargs().get("db") or 0)
    try:
        changing = _with_other_passwords(client, users)
        for user in users:
            rules = user.rules(database, off=user.name in off, info=info)
            pipeline.execute_command("ACL", "SETUSER", *rules)
            if user.name in changing:
                pipeline.execute_command("CLIENT", "KILL", "USER", user.name)
        answers = pipeline.execute(raise_on_error=False)
    except redis.ResponseError as error:
        answers = [error]
    for answer in answers:
        # Subclasses, such as a full memory's, pass: nobody may get more rights by an outage.
        if type(answer) in (redis.ResponseError, redis.exceptions.NoPermissionError):
            if info and f"+{_SET_INFO}" in str(answer):
                return _make(client, users, off, info=False)
            return str(answer).rpartition("caused error: ")[2]  # without the command, its digests
        if isinstance(answer, Exception):
            raise answer
    return None


def names(client: redis.Redis) -> set[str]:
    """The users of nodes and runs that the bus knows.

    Raises:
        redis.RedisError: the bus is away, or does not tell.
    """
    known: Any = client.execute_command("ACL", "USERS")  # type: ignore[no-untyped-call]
    texts = {name.decode(errors="replace") for name in known}
    return {name for name in texts if name.startswith((_NODE, _RUN))}


def runs(names: Iterable[str]) -> set[str]:
    """The runs whose users have these names; names of other users are left out."""
    return {name.removeprefix(_RUN) for name in names if name.startswith(_RUN)}


def nodes(names: Iterable[str]) -> set[str]:
    """Return the nodes whose users have these names; names of other users are left out."""
    return {name.removeprefix(_NODE) for name in names if name.startswith(_NODE)}


def forget(client: redis.Redis, names: Iterable[str]) -> None:
    """Remove users; their connections end.

    Raises:
        redis.RedisError: the bus is away.
    """
    if listed := sorted(names):
        client.execute_command("ACL", "DELUSER", *listed)  # type: ignore[no-untyped-call]
